"""Grammars that libllama never comes to an end with: their clients hear so, and the others are answered."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.served import events
from support.slow_grammars import BRANCHES, LOOP, PATTERN

PROMPT = "Once upon a time"


@pytest.fixture
def gaps(address: str) -> Iterator[list[float]]:
    """Seconds between the events of an endless stream of answers, beside whatever the test does."""
    found: list[float] = []
    ends = threading.Event()

    def talk() -> None:
        with httpx.Client(base_url=address, timeout=120) as client:
            while not ends.is_set():
                body = {"prompt": PROMPT, "n_predict": 200, "stream": True, "ignore_eos": True}
                with client.stream("POST", "/completion", json=body) as reply:
                    last = time.monotonic()
                    for line in reply.iter_lines():
                        if line:
                            found.append(time.monotonic() - last)
                            last = time.monotonic()

    talker = threading.Thread(target=talk)
    talker.start()
    try:
        yield found
    finally:
        ends.set()
        talker.join(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [{"grammar": BRANCHES}, {"grammar": LOOP}, {"json_schema": json.loads(PATTERN)}], ids=str
)
def test_the_others_are_answered(client: httpx.Client, gaps: list[float], asked: dict[str, Any]) -> None:
    # letters, as (a|b)* reads them
    letters = {"logit_bias": [["a", 50], ["b", 50]]} if "json_schema" in asked else {}
    body = {"prompt": PROMPT, "n_predict": 60, "temperature": 1.5, "seed": 3, **letters, **asked}
    reply = client.post("/completion", json=body)
    if "grammar" in asked:
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert "1 s of processor time" in error["message"] and "make it smaller" in error["message"]
    time.sleep(0.2)
    assert len(gaps) > 20
    assert max(gaps) < 2.0


@pytest.mark.slow
def test_a_stream_ends_with_an_error(client: httpx.Client) -> None:
    """What was said before it stays."""
    body = {"prompt": PROMPT, "n_predict": 60, "stream": True, "grammar": BRANCHES}
    said = events(client.post("/completion", json=body).text)
    assert said[0]["content"]
    assert "1 s of processor time" in said[-1]["error"]["message"]


@pytest.mark.slow
def test_a_field_whose_name_is_written_with_escapes(address: str) -> None:
    """Its grammar, too, is read by a thread: whoever asks meanwhile is answered."""
    body = json.dumps({"prompt": PROMPT, "grammar": LOOP}).replace("grammar", "gramm\\u0061r")
    replies: list[httpx.Response] = []

    def ask() -> None:
        replies.append(httpx.post(f"{address}/completion", content=body, timeout=60))

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    time.sleep(0.2)
    begin, waits = time.monotonic(), []
    while any(asker.is_alive() for asker in askers):
        waits.append(-time.monotonic())
        httpx.get(f"{address}/health", timeout=60)
        waits[-1] += time.monotonic()
    assert [reply.status_code for reply in replies] == [400] * 4
    assert max(waits) < (time.monotonic() - begin) / 4


@pytest.mark.slow
def test_it_stands_back_within_its_call(address: str) -> None:
    """It has the lowest priority long before its second is over: nobody else's step waits for a processor."""
    asker = threading.Thread(
        target=httpx.post,
        args=(f"{address}/completion",),
        kwargs={"json": {"prompt": PROMPT, "grammar": LOOP}, "timeout": 60},
    )
    asker.start()
    found: set[int] = set()
    while asker.is_alive():
        found |= set(priorities_of_children(os.getpid()))
        time.sleep(0.01)
    assert 19 in found


def priorities_of_children(pid: int) -> Iterator[int]:
    """The niceness of each process that this one has started, and that they have."""
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in tasks.read_text().split():
            with contextlib.suppress(OSError):  # it has ended
                yield os.getpriority(os.PRIO_PROCESS, int(child))
                yield from priorities_of_children(int(child))
