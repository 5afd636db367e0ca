"""`serve --workers` with roles: some workers only read prompts; what one has of a text, a second one gets."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from support.models import ModelSpec, write_model
from support.served import events, said_by, served_alone

from pykvgraph.cli import main

from .conftest import STORIES
from .test_workers import Served, children_of, said, until, values_of, worker_of

OPTIONS = ("-c", "4096", "-np", "2", "-t", "1", "--metrics")
STORY = " played in the park all day. They saw a big dog and a little bird, and they were very happy." * 13
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "n_predict": 24}


def prompt_of(name: str) -> str:
    """About 400 tokens."""
    return f"Once there was {name}. {name}{STORY}"


@pytest.fixture(scope="module")
def alone() -> Iterator[str]:
    with served_alone(STORIES, *OPTIONS) as (url, _):
        yield url


@pytest.fixture(scope="module")
def reading() -> Iterator[Served]:
    """Workers 0 and 1 answer, worker 2 reads."""
    with served_alone(STORIES, *OPTIONS, "--workers", "3", "--prefill-workers", "1") as found:
        yield found


def ask(url: str, prompt: str, **fields: Any) -> dict[str, Any]:
    reply = httpx.post(f"{url}/completion", json={"prompt": prompt, **GREEDY, **fields}, timeout=60)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def test_long_prompts_are_read_by_another_worker(alone: str, reading: Served) -> None:
    """What it has read is loaded where that is faster than to decode it: on a busy machine not always."""
    url, _ = reading
    n_loaded = 0
    for name in ("Tom", "Lily", "Ben", "Mia"):
        before, read = values_of(url, "tier_loaded_tokens_total"), values_of(url, "prompt_tokens_total")[2]
        answer = ask(url, prompt_of(name))
        loaded = values_of(url, "tier_loaded_tokens_total")
        n_prompt = answer["tokens_evaluated"]
        assert answer["content"] == ask(alone, prompt_of(name))["content"]
        assert answer["id_slot"] < 4
        assert values_of(url, "prompt_tokens_total")[2] - read >= n_prompt - 64
        assert loaded[2] == before[2]
        # the answering worker has decoded no more than its last tokens
        is_loaded = sum(loaded.values()) - sum(before.values()) >= n_prompt - 64
        assert is_loaded == (answer["timings"]["prompt_n"] < 64), answer["timings"]
        n_loaded += is_loaded
    assert n_loaded > 0


def test_short_prompts_and_wanted_slots_are_read_where_they_are_answered(reading: Served) -> None:
    url, _ = reading
    before = values_of(url, "prompt_tokens_total")[2]
    ask(url, "Once upon a time")
    assert ask(url, prompt_of("Sue"), id_slot=1)["timings"]["prompt_n"] > 300
    assert values_of(url, "prompt_tokens_total")[2] == before


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/chat/completions", "messages"), ("/v1/messages", "messages"), ("/v1/completions", "prompt")],
)
def test_other_forms_too(alone: str, reading: Served, path: str, field: str) -> None:
    text = prompt_of(path)
    body = {
        "max_tokens": 16,
        "temperature": 0,
        field: text if field == "prompt" else [{"role": "user", "content": text}],
    }
    before = values_of(reading[0], "prompt_tokens_total")[2]
    one, several = (httpx.post(f"{url}{path}", json=body, timeout=60) for url in (alone, reading[0]))
    assert values_of(reading[0], "prompt_tokens_total")[2] > before
    assert said(one) == said(several)


def test_a_bad_request_is_refused_once(reading: Served) -> None:
    body = {"prompt": prompt_of("Bad"), "temperature": "hot"}
    reply = httpx.post(f"{reading[0]}/completion", json=body, timeout=60)
    assert reply.status_code == 400


def test_who_reads_may_die(alone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its sockets nothing is left."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with served_alone(STORIES, *OPTIONS, "--workers", "2", "--prefill-workers", "1") as (url, process):
        os.kill(worker_of(process, 1), signal.SIGKILL)
        answer = ask(url, prompt_of("Zoe"))
        assert answer["content"] == ask(alone, prompt_of("Zoe"))["content"]
        until(lambda: len(children_of(process.pid)) == 2 and len(httpx.get(f"{url}/slots").json()) == 4)
        sockets = sorted(path.name for path in tmp_path.glob("kvgraph-*/*"))
        assert sockets == ["0.0", "0.0.copies", "1.1", "1.1.copies"]


def test_who_reads_may_be_stopped(alone: str) -> None:
    """It doesn't even say that it lives: the other worker reads, and answers."""
    with served_alone(STORIES, *OPTIONS, "--workers", "2", "--prefill-workers", "1") as (url, process):
        stopped = worker_of(process, 1)
        os.kill(stopped, signal.SIGSTOP)
        try:
            answer = ask(url, prompt_of("Max"))
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert answer["content"] == ask(alone, prompt_of("Max"))["content"]
        assert "says nothing" in said_by(process)
        before = values_of(url, "prompt_tokens_total")[1]
        ask(url, prompt_of("Tim"))
        assert values_of(url, "prompt_tokens_total")[1] > before


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes a second for an answer of some hundred tokens."""
    spec = ModelSpec(n_layer=6, n_embd=512, n_head=8, n_head_kv=4, n_ff=2048)
    return write_model(spec, tmp_path_factory.mktemp("slow"))


N_BEFORE = 150  # events before the worker is killed


def killed_amid(url: str, process: subprocess.Popen[str], body: dict[str, Any]) -> tuple[list[Any], int]:
    """The events of a stream, and which worker was killed with SIGKILL while it answered."""
    text, killed = "", -1
    with httpx.stream("POST", f"{url}/completion", json=body | {"stream": True}, timeout=60) as reply:
        for part in reply.iter_text():
            text += part
            if text.count("data: ") > N_BEFORE and killed < 0:
                slots = httpx.get(f"{url}/slots").json()
                killed = next(slot["worker"] for slot in slots if slot["is_processing"])
                os.kill(worker_of(process, killed), signal.SIGKILL)
    return events(text), killed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_second_worker_goes_on_where_the_first_was(slow: Path, temperature: float) -> None:
    """It decodes neither the prompt nor what was said; what is drawn goes on too."""
    rng = random.Random(1)
    prompt = [rng.randrange(10, 250) for _ in range(600)]
    asked = {"prompt": prompt, "ignore_eos": True, "temperature": temperature, "n_predict": 300}
    with served_alone(slow, *OPTIONS, "--workers", "2", "--replicate") as (url, process):
        found, killed = killed_amid(url, process, asked)
        assert (found[-1]["stop"], found[-1]["tokens_predicted"]) == (True, 300), found[-1]
        assert found[-1]["timings"]["prompt_n"] < 32, found[-1]["timings"]
        other = 1 - killed
        assert values_of(url, "tier_loaded_tokens_total")[other] >= 599
        assert values_of(url, "n_decode_total")[other] <= 300 - N_BEFORE + 5
    if temperature == 0:
        with served_alone(slow, *OPTIONS) as (url, _):
            wanted = httpx.post(f"{url}/completion", json=asked, timeout=60).json()
        assert "".join(event["content"] for event in found) == wanted["content"]


def test_without_a_second_worker_what_was_said_is_read_with_the_prompt(slow: Path) -> None:
    asked = {"prompt": "Once", "ignore_eos": True, "temperature": 1.0, "n_predict": 300}
    with served_alone(slow, *OPTIONS, "--workers", "2") as (url, process):
        found, killed = killed_amid(url, process, asked)
        assert (found[-1]["stop"], found[-1]["tokens_predicted"]) == (True, 300), found[-1]
        assert values_of(url, "n_decode_total")[1 - killed] <= 300 - N_BEFORE + 5


def test_the_demo() -> None:
    """A worker is killed amid six answers: all end, each once."""
    example = Path(__file__).parents[3] / "examples" / "cluster.py"
    done = subprocess.run(
        [sys.executable, str(example), "-m", str(STORIES)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kill -9" in done.stdout
    told = [line for line in done.stdout.splitlines() if line.startswith("client")]
    assert sorted(line.split(",")[0] for line in told) == [f"client {i}: 120 tokens" for i in range(6)]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--prefill-workers", "1"), "add --workers"),
        (("--workers", "1", "--prefill-workers", "1"), "at least one must answer"),
        (("--replicate",), "add --workers"),
        (("--workers", "100000"), "workers at most"),
        (("--workers", "2", "--prefill-workers", "2"), "at least one"),
        (("--workers", "2", "--prefill-workers", "1", "--replicate"), "at least two"),
        (("--workers", "2", "--replicate", "--cache-ram", "0"), "--cache-ram"),
    ],
)
def test_roles_that_cannot_be(options: tuple[str, ...], what: str) -> None:
    done = CliRunner().invoke(main, ["serve", "-m", str(STORIES), "--port", "0", *options])
    assert done.exit_code == 2
    assert what in done.output
