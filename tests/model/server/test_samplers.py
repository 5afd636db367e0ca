"""Samplers beside llama-server: the same tokens of the same prompt and seed, whatever the samplers are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.served import llama_server, served

import pykvgraph as kvg

LILY = "Once upon a time, there was a little girl named Lily. Lily loved to play"
TOM = "Tom and Ben like to play. Tom and Ben like to"
WARM = {"temperature": 1.2, "seed": 7}
BODIES: dict[str, dict[str, Any]] = {
    "penalties of the prompt": {"prompt": LILY, "repeat_penalty": 1.3, "presence_penalty": 0.2},
    "frequency": {"prompt": LILY, "frequency_penalty": 1.3},
    "DRY": {"prompt": TOM, "dry_multiplier": 0.8},
    "DRY of single tokens": {"prompt": TOM, "dry_multiplier": 2, "dry_allowed_length": 1},
    "DRY with other breakers": {
        "prompt": TOM * 3,
        "dry_multiplier": 5,
        "dry_allowed_length": 1,
        "dry_sequence_breakers": [" play", "."],
    },
    "DRY of the last tokens": {"prompt": TOM * 3, "dry_multiplier": 5, "dry_penalty_last_n": 4},
    "DRY with a small base": {"prompt": TOM, "dry_multiplier": 1, "dry_base": 0.5},
    "top_n_sigma": {**WARM, "top_n_sigma": 1.0},
    "xtc": {**WARM, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "xtc, the likeliest of those left": {"xtc_probability": 1.0, "xtc_threshold": 0.1},
    "dynamic temperature": {**WARM, "dynatemp_range": 1.0, "dynatemp_exponent": 0.7},
    "dynamic temperature about 0": {"seed": 7, "dynatemp_range": 0.7},
    "all of them": {
        **WARM,
        "prompt": TOM,
        "dry_multiplier": 0.8,
        "xtc_probability": 0.3,
        "dynatemp_range": 0.5,
        "top_n_sigma": 2.0,
        "repeat_penalty": 1.1,
        "typical_p": 0.9,
    },
    "without some of them": {
        **WARM,
        "prompt": TOM,
        "dry_multiplier": 5,
        "xtc_probability": 1.0,
        "samplers": ["top_k", "temperature"],
    },
    "in another order": {
        **WARM,
        "prompt": TOM,
        "repeat_penalty": 1.4,
        "temperature": 2.0,
        "samplers": ["temperature", "min_p", "top_p", "penalties", "top_k"],
    },
    "by their letters": {
        **WARM,
        "prompt": TOM,
        "xtc_probability": 0.6,
        "xtc_threshold": 0.03,
        "samplers": "txmk",
    },
    "by other names": {**WARM, "prompt": TOM, "top_p": 0.5, "samplers": ["Temp", "top-k", "nucleus"]},
    "the same one twice": {**WARM, "seed": 11, "top_p": 0.8, "samplers": ["top_p", "temperature", "top_p"]},
    "no temperature": {"temperature": 0, "seed": 5, "samplers": ["top_k", "min_p"]},
    "none": {"temperature": 0, "seed": 5, "samplers": []},
    "a temperature of 0 before penalties": {
        "prompt": LILY,
        "repeat_penalty": 1.5,
        "samplers": ["temperature", "penalties"],
    },
    "typical, the likeliest of those left": {"prompt": LILY, "typical_p": 0.05},
    "infill": {**WARM, "prompt": LILY, "samplers": ["top_k", "top_p", "infill"]},
    "min_keep": {**WARM, "temperature": 3.0, "top_p": 0.3, "min_p": 0.5, "typical_p": 0.4, "min_keep": 7},
    "adaptive": {
        **WARM,
        "samplers": ["adaptive_p", "top_k", "min_p"],
        "adaptive_target": 0.3,
        "adaptive_decay": 0.7,
    },
    "adaptive, but not in the list": {**WARM, "adaptive_target": 0.3},
    "mirostat": {**WARM, "prompt": LILY, "mirostat": 1, "repeat_penalty": 1.5, "mirostat_tau": 3},
    "mirostat 2": {**WARM, "prompt": LILY, "mirostat": 2, "dry_multiplier": 3, "mirostat_tau": 3},
}


@pytest.fixture(scope="module")
def clients(stories: Path) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """llama-server's and ours."""

    def load() -> kvg.Engine:
        return kvg.Engine(kvg.Model(stories, "cpu"), n_ctx=512, n_seq_max=4)

    with (
        llama_server(stories, "-c", "512", "-np", "1") as rival,
        served(load) as (ours, _),
        httpx.Client(base_url=rival, timeout=60) as theirs,
        httpx.Client(base_url=ours, timeout=60) as us,
    ):
        yield theirs, us


@pytest.mark.parametrize("name", BODIES)
def test_the_same_tokens(clients: tuple[httpx.Client, httpx.Client], name: str) -> None:
    body = {"prompt": "One day", "temperature": 0, "n_predict": 40, "return_tokens": True, **BODIES[name]}
    wanted, told = (client.post("/completion", json=body).json() for client in clients)
    assert told["tokens"] == wanted["tokens"]
    # what the sampler changes is there to be seen
    assert len(told["tokens"]) > 8


PROBS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy behind penalties": {"repeat_penalty": 1.5},
    "few": {**WARM, "top_k": 3},
    "many": {**WARM, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "n_probs": 7},
    "mirostat": {**WARM, "mirostat": 2},
    "adaptive": {**WARM, "samplers": ["top_k", "adaptive_p"], "adaptive_target": 0.3},
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", PROBS)
def test_the_probabilities_behind_the_samplers(
    clients: tuple[httpx.Client, httpx.Client], name: str, streams: bool
) -> None:
    body = {"prompt": LILY, "temperature": 0, "n_predict": 12, "n_probs": 5, "post_sampling_probs": True}
    body |= PROBS[name] | {"stream": streams}
    wanted, told = (probs_of(client.post("/completion", json=body).text, streams) for client in clients)
    assert len(told) == len(wanted) > 8
    for theirs, ours in zip(wanted, told, strict=True):
        assert set(theirs) == set(ours)
        assert ours["id"] == theirs["id"]
        assert ours["prob"] == pytest.approx(theirs["prob"], abs=1e-2)
        if name != "adaptive":  # of which llama-server tells the likeliest ones before it
            top = [each["prob"] for each in theirs["top_probs"]]
            assert [each["prob"] for each in ours["top_probs"]] == pytest.approx(top, abs=1e-2)


def probs_of(text: str, streams: bool) -> list[dict[str, Any]]:
    """completion_probabilities of an answer."""
    if not streams:
        found: list[dict[str, Any]] = json.loads(text)["completion_probabilities"]
        return found
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [each for event in events for each in event.get("completion_probabilities", [])]


def test_the_settings_are_told(clients: tuple[httpx.Client, httpx.Client]) -> None:
    body = {"prompt": TOM, "n_predict": 2, **BODIES["all of them"], "seed": 3}
    wanted, told = (client.post("/completion", json=body).json() for client in clients)
    names = [
        name
        for name in wanted["generation_settings"]
        if name.startswith(("dry", "xtc", "dyna", "top_n", "min_keep", "post"))
    ]
    assert len(names) == 12
    for name in names:
        assert told["generation_settings"][name] == pytest.approx(wanted["generation_settings"][name]), name
    assert told["generation_settings"]["samplers"] == wanted["generation_settings"]["samplers"]


def test_no_breakers_are_refused(clients: tuple[httpx.Client, httpx.Client]) -> None:
    body = {"prompt": TOM, "n_predict": 2, "dry_sequence_breakers": []}
    refused = clients[1].post("/completion", json=body)
    assert refused.status_code == 400
    assert "dry_sequence_breakers" in refused.json()["error"]["message"]


CODE = "root ::= " + r'"def f():\n    x = 1\n\t    y = 2\n  z\nprint(1)\n"'


@pytest.mark.parametrize("n_indent", [0, 1, 2, 3, 5])
def test_lines_that_are_indented_too_little(
    clients: tuple[httpx.Client, httpx.Client], n_indent: int
) -> None:
    body = {"prompt": "One day", "grammar": CODE, "n_indent": n_indent, "temperature": 0}
    wanted, told = (client.post("/completion", json=body).json() for client in clients)
    for name in ("content", "stop_type", "truncated", "tokens_predicted"):
        assert told[name] == wanted[name], name


def test_a_line_that_comes_late(clients: tuple[httpx.Client, httpx.Client]) -> None:
    body = {"prompt": "One day", "grammar": CODE, "temperature": 0, "t_max_predict_ms": 1}
    wanted, told = (client.post("/completion", json=body).json() for client in clients)
    assert told["content"] in ("def f():\n", "def f():\n    x = 1\n")
    assert told["content"].endswith("\n") and wanted["content"].endswith("\n")
    assert told["stop_type"] == wanted["stop_type"] == "limit"
    body["t_max_predict_ms"] = 100_000
    assert clients[1].post("/completion", json=body).json()["content"].endswith("print(1)\n")
