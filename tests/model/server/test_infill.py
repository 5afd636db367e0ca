"""/infill: llama-server's prompts, on a model with its tokens, and its error on one without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gguf_parts import take_apart
from support.served import N_SLOTS, llama_server, served

import pykvgraph as kvg

from .conftest import STORIES

UINT32 = 4
BODIES: list[dict[str, Any]] = [
    {"input_prefix": "Once upon", "input_suffix": "the end."},
    {"input_prefix": "", "input_suffix": ""},
    {"input_prefix": "a " * 300, "input_suffix": "b " * 300, "prompt": "and"},
    {
        "input_prefix": "x",
        "input_suffix": "<s>",
        "input_extra": [{"text": "more", "filename": "one.py"}, {"text": "c " * 700}],
    },
]


def model_with(folder: Path, *names: str) -> Path:
    """stories260K with some of its tokens named."""
    parts = take_apart(STORIES.read_bytes())
    for i, name in enumerate(names):
        parts.set(f"tokenizer.ggml.fim_{name}_token_id", UINT32, 300 + i)
    return parts.raw().write(folder / f"{'-'.join(names)}.gguf")


def loader(path: Path) -> Callable[[], kvg.Engine]:
    return lambda: kvg.Engine(
        kvg.Model(path, device="cpu"), n_ctx=2048, n_batch=256, n_seq_max=N_SLOTS, overcommit=True
    )


@pytest.fixture(params=[("pre", "suf", "mid"), ("pre", "suf", "mid", "rep", "sep")], ids=len)
def model(request: Any, tmp_path: Path) -> Iterator[Path]:
    yield model_with(tmp_path, *request.param)


def test_the_prompt_is_llama_servers(model: Path) -> None:
    """But for a space in front, which it takes away where no BOS is."""
    arguments = ("-c", "2048", "-np", "4", "-b", "256")
    with llama_server(model, *arguments) as theirs, served(loader(model), n_ctx_slot=512) as (ours, _):
        for body in BODIES:
            asked = {**body, "n_predict": 8, "temperature": 0, "return_tokens": True}
            mine, other = (httpx.post(f"{url}/infill", json=asked).json() for url in (ours, theirs))
            assert mine["prompt"].removeprefix(" ") == other["prompt"].removeprefix(" ")
            for name in ("tokens", "content", "tokens_evaluated"):
                assert mine[name] == other[name]


def test_what_is_missing_or_wrong_is_refused(model: Path) -> None:
    with served(loader(model), n_ctx_slot=512) as (url, _):
        asked = {"input_prefix": "Once", "input_suffix": "end", "n_predict": 2}
        assert httpx.post(f"{url}/infill", json=asked).json()["tokens_predicted"] == 2
        bad: list[dict[str, Any]] = [{"input_prefix": "a"}, {"input_suffix": "a"}]
        wrong: list[Any] = ["a", [3], [{}], [{"text": "a", "filename": 1}]]
        bad += [{**asked, "prompt": 3}, *({**asked, "input_extra": extra} for extra in wrong)]
        for body in bad:
            assert httpx.post(f"{url}/infill", json=body).status_code == 400, body


def test_a_model_without_its_tokens(client: httpx.Client) -> None:
    reply = client.post("/infill", json=BODIES[0])
    told = "prefix token is missing. suffix token is missing. middle token is missing. "
    assert reply.status_code == 501
    assert reply.json()["error"]["message"] == f"Infill is not supported by this model: {told}"
