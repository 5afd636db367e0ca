"""Prefixes that leave the cells and come back: from memory, from the disk, in another engine."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from support import chance, engines
from support.soak import F32, are_likeliest

import pykvgraph as kvg
from pykvgraph.engine import fetches
from pykvgraph.tiers import rows
from pykvgraph.tiers.disk import DiskTier
from pykvgraph.tiers.record import Record

pytestmark = pytest.mark.usefixtures("decoding_is_slow")
TALK = kvg.SamplingParams(max_tokens=12, temperature=0)


def ids_of(model: kvg.Model, n: int, seed: int) -> list[int]:
    rng = random.Random(chance.seed(seed))
    return [rng.randrange(model.n_vocab) for _ in range(n)]


def engine_of(model: kvg.Model, tiers: kvg.Tiers, n_ctx: int = 256, **options: Any) -> kvg.Engine:
    return kvg.Engine(model, n_ctx=n_ctx, n_seq_max=2, tiers=tiers, **F32, **options)


def push_out(engine: kvg.Engine, seed: int) -> None:
    """Texts that take all cells."""
    for each in range(3):
        engine.submit(ids_of(engine.model, 200, 1000 * seed + each), TALK).result()


@pytest.mark.parametrize("background", [True, False])
def test_a_text_comes_back_from_memory(model: kvg.Model, background: bool) -> None:
    prompt = ids_of(model, 150, 1)
    with engine_of(model, kvg.Tiers("64M"), background=background) as engine:
        first = engine.submit(prompt, TALK).result()
        push_out(engine, 1)
        text = [*prompt, *first.tokens]
        again = engine.submit(text, TALK).result()
        stats = engine.stats()
        assert stats.tiers is not None
        assert again.n_cached == len(text) - 1, stats.tiers
        assert stats.tiers.loaded_tokens >= 100
        assert not any(stats.tiers.misses.values())
    assert are_likeliest(model, prompt, first.tokens)
    assert are_likeliest(model, text, again.tokens)


def test_a_text_comes_back_in_another_engine(model: kvg.Model, tmp_path: Path) -> None:
    prompt, tiers = ids_of(model, 150, 2), kvg.Tiers("64M", "64M", tmp_path)
    with engine_of(model, tiers) as engine:
        first = engine.submit(prompt, TALK).result()
    text = [*prompt, *first.tokens, *ids_of(model, 20, 3)]
    with engine_of(model, tiers) as engine:
        again = engine.submit(text, TALK).result()
        assert again.n_cached == len(prompt) + 11, engine.stats().tiers
        assert engine.submit(text, TALK, salt="other").result().n_cached == 0
    assert are_likeliest(model, text, again.tokens)


MANY = (200, 20) if chance.THOROUGH else (60, 6)


@pytest.mark.parametrize(("n", "n_fit"), [(10, 2), pytest.param(*MANY, marks=pytest.mark.slow)])
def test_conversations_come_back(model: kvg.Model, n: int, n_fit: int) -> None:
    """Five turns of each, one after the other, with cells for some: what was said is not decoded again."""
    new, rng = 24, random.Random(chance.seed(6))
    texts: list[list[int]] = [[] for _ in range(n)]
    old = cached = 0
    with engine_of(model, kvg.Tiers("256M"), n_ctx=n_fit * 5 * (new + 12)) as engine:
        for _ in range(5):
            for text in texts:
                n_old = max(len(text) - 1, 0)  # the last token was said, and not decoded
                text += [rng.randrange(model.n_vocab) for _ in range(new)]
                said = engine.submit(text, TALK).result()
                old, cached = old + n_old, cached + min(said.n_cached, n_old)
                text += said.tokens
        stats = engine.stats().tiers
        assert stats is not None
        assert stats.dropped == sum(stats.misses.values()) == 0
    assert cached >= 0.9 * old
    assert stats.loaded_tokens > 0.5 * old


def test_a_disk_that_fails_costs_no_answer(
    model: kvg.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = ids_of(model, 150, 7)
    real = os.read

    def fails(file: int, n: int) -> bytes:
        if "tiers" in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, n)

    tiers = kvg.Tiers("64M", "64M", tmp_path / "tiers")
    with engine_of(model, tiers) as engine:
        first = engine.submit(prompt, TALK).result()
    with engine_of(model, tiers) as engine:
        monkeypatch.setattr(os, "read", fails)
        again = engine.submit(prompt, TALK).result()
        stats = engine.stats().tiers
        assert stats is not None
        assert (again.n_cached, stats.misses["unreadable"]) == (0, 1)
        shutil.rmtree(tmp_path / "tiers")
        push_out(engine, 7)
    assert again.tokens == first.tokens


def test_a_disk_that_hangs_is_not_waited_for(
    model: kvg.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request is decoded, and those behind it don't wait at all."""
    monkeypatch.setattr(fetches, "decode_seconds", lambda ctx: lambda first, end: 0.1)
    monkeypatch.setattr(fetches, "_LEAST_PATIENCE", 0.05)
    prompts, tiers = [ids_of(model, 100, seed) for seed in (8, 9)], kvg.Tiers("64M", "64M", tmp_path)
    with engine_of(model, tiers) as engine:
        first = [engine.submit(prompt, TALK).result() for prompt in prompts]
    hangs, real = threading.Event(), DiskTier.read

    def read(disk: DiskTier, key: bytes) -> Record:
        hangs.wait(10)
        return real(disk, key)

    with engine_of(model, tiers) as engine, monkeypatch.context() as patch:
        patch.setattr(DiskTier, "read", read)
        again = [engine.submit(prompt, TALK).result() for prompt in prompts]
        stats = engine.stats().tiers
        assert stats is not None
        assert stats.misses["late"] == sum(stats.misses.values()) == 1
        hangs.set()
    assert [each.n_cached for each in again] == [0, 0]
    assert [each.tokens for each in again] == [each.tokens for each in first]


def test_cells_and_index_are_in_order(model: kvg.Model) -> None:
    """Many texts at once, cancelled at random, in cells for two of them."""
    rng, salts = random.Random(chance.seed(10)), (b"", b"a")
    begins = [ids_of(model, 130, seed) for seed in range(20, 24)]
    with engine_of(model, kvg.Tiers("8M"), overcommit=True, background=False) as engine:
        requests = []
        for each in range(60):
            prompt = rng.choice(begins)[: rng.randrange(40, 130)] + ids_of(model, rng.randrange(1, 40), each)
            requests.append((prompt, engine.submit(prompt, TALK, salt=rng.choice(salts))))
            for _ in range(rng.randrange(12)):
                engine.step()
            if rng.random() < 0.2:
                requests.pop()[1].cancel()
        while engine.step():
            pass
        stats = engine.stats()
        assert stats.tiers is not None
        assert stats.tiers.loaded_tokens > 500, stats
        for prompt, request in requests:
            assert are_likeliest(model, prompt, request.result().tokens)
        index = engine._loop.stepper._running_set.index
        index.clear()
        while index.drop_point():
            pass
        assert [group.n_used for group in engine.context.kv.groups if group.kind != "state"] == [
            0 for group in engine.context.kv.groups if group.kind != "state"
        ]


def test_a_parked_text_comes_back_by_copying(model: kvg.Model) -> None:
    prompt, params = ids_of(model, 150, 12), kvg.SamplingParams(max_tokens=40, temperature=0)
    with engine_of(model, kvg.Tiers("64M"), background=False) as engine:
        expected = engine.submit(prompt, params, salt="other").result()
        push_out(engine, 12)
        request = engine.submit(prompt, params)
        while engine.look().running == () or engine.look().running[0].n_said < 10:
            engine.step()
        assert engine.park(request)
        assert not engine.park(request)
        assert engine.stats().n_parked == 1
        assert not engine.step()  # there is nothing to do
        push_out(engine, 13)
        before = engine.stats()
        assert engine.resume(request)
        assert not engine.resume(request)
        assert request.result().tokens == expected.tokens
        after = engine.stats()
        assert after.decoded_tokens - before.decoded_tokens == 30
        assert after.n_parked == 0
        assert not engine.park(request)
        parked = [engine.submit(prompt, params) for _ in range(2)]
        assert [engine.park(each) for each in parked] == [True, True]
        parked[0].cancel()
        engine.step()
        assert parked[0].result().finish_reason == "cancelled"
    assert parked[1].result().finish_reason == "cancelled"  # as whatever runs when the engine is closed


def test_a_request_of_another_engine_is_not_parked(model: kvg.Model) -> None:
    with engine_of(model, kvg.Tiers("1M")) as one, engine_of(model, kvg.Tiers("1M")) as other:
        request = one.submit(ids_of(model, 50, 16), TALK)
        for ask in (other.park, other.resume):
            with pytest.raises(kvg.InvalidArgumentError, match="another engine's"):
                ask(request)
        assert len(request.result().tokens) == TALK.max_tokens
        assert not one.park(request)


def test_a_text_that_is_set_aside_comes_back_by_copying(model: kvg.Model) -> None:
    """With cells for one of two: the younger one is set aside, and none of its tokens is decoded again."""
    params = kvg.SamplingParams(max_tokens=100, temperature=0)
    prompts = [engines.ids_of(model, 100, seed) for seed in (14, 15)]  # whose answers nothing ends early
    with engine_of(model, kvg.Tiers("64M"), overcommit=True) as engine:
        requests = [engine.submit(each, params) for each in prompts]
        said = [each.result().tokens for each in requests]
        stats = engine.stats()
        assert stats.n_preempted >= 1
        assert stats.tiers is not None
        assert stats.tiers.loaded_tokens > 50  # the cells still have the rest
        assert stats.decoded_tokens == 2 * (100 + 99)
    for prompt, tokens in zip(prompts, said, strict=True):
        assert are_likeliest(model, prompt, tokens)


def test_without_a_gain_nothing_is_loaded(model: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches, "decode_seconds", lambda ctx: lambda first, end: 1e-6 * (end - first))
    prompt = ids_of(model, 150, 11)
    with engine_of(model, kvg.Tiers("64M")) as engine:
        first = engine.submit(prompt, TALK).result()
        push_out(engine, 11)
        again = engine.submit(prompt, TALK).result()
        stats = engine.stats().tiers
        assert stats is not None
        assert stats.saved > 4
        assert (again.n_cached, stats.loaded_tokens, again.tokens) == (0, 0, first.tokens)


def test_many_salts_take_no_memory(model: kvg.Model) -> None:
    with engine_of(model, kvg.Tiers(ram="1M")) as engine:
        saver = engine._loop.stepper.saver
        assert saver is not None
        keys = [saver.root_key(bytes([n % 256, n // 256])) for n in range(3000)]
        assert len(set(keys)) == 3000
        assert saver.root_key(b"\0\0") == keys[0]
        assert len(saver._roots) < 1100


def test_tiers_that_cannot_be(model: kvg.Model, tmp_path: Path) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match="prefix_cache"):
        engine_of(model, kvg.Tiers("1M"), prefix_cache=False)
    with pytest.raises(kvg.InvalidArgumentError, match=r"must be pykvgraph\.Tiers"):
        engine_of(model, 4)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        engine_of(model, kvg.Tiers("1M", "1M", tmp_path / "file"))
    with pytest.raises(OSError, match="name another"):
        engine_of(model, kvg.Tiers("1M", "1M", "/proc/none"))


def test_an_engine_that_cannot_be_leaves_no_thread(
    model: kvg.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers, before = kvg.Tiers("1M", "1M", tmp_path), set(threading.enumerate())
    with pytest.raises(kvg.InvalidArgumentError, match="background"):
        engine_of(model, tiers, background=4)

    def fails(model: kvg.Model) -> bytes:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), model.path)

    monkeypatch.setattr(rows, "file_digest", fails)
    with pytest.raises(FileNotFoundError):
        engine_of(model, tiers)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), thread
