"""Grammars that libllama never comes to an end with: an error within seconds, and nothing is left behind."""

from __future__ import annotations

import contextvars
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import ctrl_c
from support.slow_grammars import BRANCHES, LOOP, TREE, grammar_processes

import pykvgraph as kvg
from pykvgraph._native.abandoned import AbandonedError, Wanted, begin
from pykvgraph.engine import postprocess
from pykvgraph.sampling import grammar as module

OPENING = "Once upon a time"
MOST_SECONDS = 20.0  # a second of processor time, on a busy machine


@pytest.fixture(scope="module")
def model(stories: Path) -> Iterator[kvg.Model]:
    with kvg.Model(stories, device="cpu") as model:
        yield model


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def no_process_soon() -> bool:
    """Whether the processes of grammars that nobody has any more have ended."""
    for _ in range(100):
        if not grammar_processes():
            return True
        time.sleep(0.05)
    return False


def by_generate(model: kvg.Model, grammar: str) -> None:
    with kvg.Context(model, n_ctx=128, n_threads=1) as ctx:
        try:
            list(kvg.generate(ctx, OPENING, max_tokens=40, grammar=grammar))
        finally:
            assert len(list(kvg.generate(ctx, OPENING, max_tokens=3, grammar="root ::= [a-z ]+"))) == 3


def by_engine(model: kvg.Model, grammar: str) -> None:
    engine = kvg.Engine(model, n_ctx=256, n_seq_max=2)
    try:
        request = engine.submit(OPENING, kvg.SamplingParams(max_tokens=40, grammar=grammar))
        request.result(60)
    finally:
        assert engine.submit(OPENING, kvg.SamplingParams(max_tokens=3)).result(60).n_said == 3
        engine._loop.close()


def by_llama(model: kvg.Model, grammar: str) -> None:
    from pykvgraph.llama import Llama

    llama = Llama(str(model.path), n_ctx=128, verbose=False)
    try:
        llama.create_completion(OPENING, max_tokens=40, grammar=grammar)
    finally:
        llama.close()


@pytest.mark.slow
@pytest.mark.parametrize("say", [by_generate, by_engine, by_llama])
@pytest.mark.parametrize("grammar", [BRANCHES, LOOP, TREE], ids=["branches", "loop", "tree"])
def test_an_error_within_seconds(
    model: kvg.Model, say: Callable[[kvg.Model, str], None], grammar: str
) -> None:
    before, begin = rss(), time.monotonic()
    with pytest.raises(kvg.InvalidArgumentError, match="more than 1 s of processor time, or 256 MiB"):
        say(model, grammar)
    assert time.monotonic() - begin < MOST_SECONDS
    assert rss() - before < 100 << 20
    assert no_process_soon()


def test_the_engine_says_the_same_when_no_grammar_is_ready(
    model: kvg.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """generate() waits for each token; here all texts go on without those that wait."""
    monkeypatch.setattr(postprocess, "_GRAMMAR_PATIENCE", -60.0)
    sampling: dict[str, Any] = {
        "max_tokens": 24,
        "temperature": 0.9,
        "seed": 5,
        "grammar": "root ::= [a-m ]+",
    }
    prompts = [OPENING, "Lily had a", "The dog ran and ran and ran and"]
    expected = []
    with kvg.Context(model, n_ctx=128, n_threads=1) as ctx:
        for prompt in prompts:
            ctx.kv.clear()
            expected.append([piece.token for piece in kvg.generate(ctx, prompt, **sampling)])
    for draft in (None, "ngram"):
        engine = kvg.Engine(model, n_ctx=512, n_seq_max=3, draft=draft)
        asked = [engine.submit(prompt, kvg.SamplingParams(**sampling)) for prompt in prompts]
        free = engine.submit(OPENING, kvg.SamplingParams(max_tokens=30))
        assert [list(each.result(60).tokens) for each in asked] == expected
        assert free.result(60).n_said == 30


def test_a_copy_and_a_fork_go_on_as_the_sampler_does(model: kvg.Model) -> None:
    """Each has a process of its own, which is told what has come."""
    rows = np.random.default_rng(3).standard_normal((12, model.n_vocab)).astype(np.float32)
    sampler = kvg.Sampler(temperature=0, grammar='root ::= ("ab" | [c-h] " ")+', tokenizer=model.tokenizer)
    for row in rows[:6]:
        sampler.sample(row)
    copy = sampler.copy()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, repr([sampler.sample(row) for row in rows[6:]]).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    expected = [sampler.sample(row) for row in rows[6:]]
    assert [copy.sample(row) for row in rows[6:]] == expected
    assert said == repr(expected)


def test_ctrl_c_while_a_grammar_is_awaited(model: kvg.Model) -> None:
    """The wait ends at once; the sampler goes on as if nothing had been."""
    rows = np.random.default_rng(4).standard_normal((4, model.n_vocab)).astype(np.float32)
    arguments: dict[str, Any] = {"grammar": "root ::= [a-z ]+", "tokenizer": model.tokenizer}
    whole, sampler = (kvg.Sampler(temperature=0, **arguments) for _ in range(2))
    expected = [whole.sample(row) for row in rows]
    del whole
    assert no_process_soon()
    assert [sampler.sample(row) for row in rows[:2]] == expected[:2]
    (pid,) = grammar_processes()
    os.kill(pid, signal.SIGSTOP)
    if sampler.ready(0.1):  # it was quicker
        assert sampler.sample(rows[2]) == expected[2]
        rows, expected = rows[1:], expected[1:]
    with ctrl_c.heard():
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            sampler.sample(rows[2])
    os.kill(pid, signal.SIGKILL)
    assert sampler.sample(rows[2]) == expected[2]


def test_an_answer_that_is_read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text waited for cells meanwhile; the socket has had room for a part of the answer."""
    monkeypatch.setattr(module, "_MOST_WAITED", 0.05)
    ours, theirs = socket.socketpair()
    with theirs:
        link = module._Link(ours, 4, module.GrammarKind.GBNF)
        link.ask(None, [1])
        theirs.send(b"\0\1")
        time.sleep(0.1)
        assert link.answer(0) is None
        theirs.send(b"\1\0")
        allowed = link.answer(1)
        assert allowed is not None and allowed.tolist() == [True, False, False, True]


def test_a_grammar_that_nobody_waits_for_any_more(model: kvg.Model) -> None:
    sampler = kvg.Sampler(temperature=0, grammar="root ::= [a-z ]+", tokenizer=model.tokenizer)
    row = np.zeros(model.n_vocab, np.float32)
    row[model.tokenizer.eos] = -9.0
    sampler.sample(row)
    sampler.sample(row)
    (pid,) = grammar_processes()
    os.kill(pid, signal.SIGSTOP)
    context, wanted = contextvars.copy_context(), Wanted()
    context.run(begin, wanted)
    wanted.abandon()
    try:
        with pytest.raises(AbandonedError):
            for _ in range(3):  # it may have been quicker once
                context.run(sampler.sample, row)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_process_that_gets_no_time(model: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is stopped: the same error, after the longest wait."""
    monkeypatch.setattr(module, "_MOST_WAITED", 0.2)
    sampler = kvg.Sampler(temperature=0, grammar="root ::= [a-z ]+", tokenizer=model.tokenizer)
    row = np.zeros(model.n_vocab, np.float32)
    row[model.tokenizer.eos] = -9.0  # which asks for nothing more
    sampler.sample(row)
    sampler.sample(row)
    (pid,) = grammar_processes()
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(kvg.InvalidArgumentError, match="more than 1 s of processor time"):
            for _ in range(3):  # it may have been quicker once
                sampler.sample(row)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_grammar_that_was_given_up_leaves_no_connection(
    model: kvg.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so no process, however long somebody keeps the error, whose traceback has all that there was."""
    with kvg.Context(model, n_ctx=128, n_threads=1) as ctx:
        list(kvg.generate(ctx, OPENING, max_tokens=3, grammar="root ::= [a-z ]+"))
        n_open = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(module, "_MOST_WAITED", -1.0)
        monkeypatch.setattr(module, "_LOOKS", 0.0)
        with pytest.raises(kvg.InvalidArgumentError) as kept:
            list(kvg.generate(ctx, OPENING, max_tokens=3, grammar=LOOP))
        assert len(os.listdir("/proc/self/fd")) == n_open
    assert "processor time" in str(kept.value)
