"""Compressed prefixes in tiers: they are read once more but once, also for another process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines import ids_of, open_context
from support.soak import F32

import pykvgraph as kvg
from pykvgraph.context.repetition import Repetition
from pykvgraph.engine.compressed import CompressedPrefixes
from pykvgraph.engine.compressed_records import CompressedRecords
from pykvgraph.tiers.disk import DiskTier
from pykvgraph.tiers.loader import ToMemory
from pykvgraph.tiers.record import Name, Record, pack
from pykvgraph.tiers.store import Store

N = 555  # no whole blocks
BRIEF = kvg.SamplingParams(max_tokens=3)


@pytest.fixture
def asked(small: kvg.Model) -> list[list[int]]:
    """They begin alike."""
    return [[*ids_of(small, N, 1), *ids_of(small, 20, 2 + i)] for i in range(5)]


@pytest.fixture
def n_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each part of a second reading had."""
    sizes: list[int] = []
    read = Repetition.read

    def counted(self: Repetition, n: int) -> None:
        sizes.append(n)
        read(self, n)

    monkeypatch.setattr(Repetition, "read", counted)
    return sizes


def engine_of(model: kvg.Model, tiers: kvg.Tiers, **options: Any) -> kvg.Engine:
    given = {"n_ctx": 2048, "n_seq_max": 2, "prefix_compress": 0.5, "pin_cells": 1000, **F32, **options}
    return kvg.Engine(model, background=False, tiers=tiers, **given)


def on_disk(folder: Path) -> kvg.Tiers:
    return kvg.Tiers(ram="64M", disk="64M", path=folder)


def compress(engine: kvg.Engine, prompt: list[int], n: int = N, **options: Any) -> None:
    """The first n tokens of it."""
    engine.submit(prompt, BRIEF, pins=[kvg.Pin(n, 60)], **options).result()
    while engine.step():
        pass
    assert kept_of(engine).n_kept


def kept_of(engine: kvg.Engine) -> CompressedPrefixes:
    kept = engine._loop.stepper._compressed
    assert kept is not None
    return kept


def compressed(folder: Path, model: kvg.Model, prompt: list[int], n: int = N, **options: Any) -> None:
    """The directory has it, by an engine that is closed."""
    with engine_of(model, on_disk(folder), **options) as engine:
        compress(engine, prompt, n)


def probabilities(engine: kvg.Engine, prompt: list[int], **options: Any) -> tuple[Any, kvg.Completion]:
    """Of the token behind it, as logarithms; and the answer."""
    n_vocab = engine.context.model.n_vocab
    request = engine.submit(prompt, kvg.SamplingParams(max_tokens=1, top_logprobs=n_vocab), **options)
    (piece,) = request
    top = dict(piece.top)
    return np.array([top[token] for token in range(n_vocab)]), request.result()


def by_hand(model: kvg.Model, prompt: list[int]) -> Any:
    """Half of the first N tokens are forgotten."""
    with open_context(model, n_ctx=1400, **F32) as ctx:
        text = kvg.Sequence(ctx)
        text.set(prompt[:N])
        assert text.forget(N - N // 2, "kvzip").n_left == N // 2
        row = text.set(prompt).last.logits.astype(np.float64)
    return row - np.logaddexp.reduce(row)


def test_it_comes_back_when_its_cells_were_needed(
    small: kvg.Model, asked: list[list[int]], n_read: list[int]
) -> None:
    with engine_of(small, kvg.Tiers(ram="64M", disk=0)) as engine:
        compress(engine, asked[0])
        first, _ = probabilities(engine, asked[3], compressed=True)
        expected = by_hand(small, asked[3])
        whole = ids_of(small, 1900, 9)
        engine.submit(whole, kvg.SamplingParams(max_tokens=100)).result()
        assert not kept_of(engine).n_kept
        n_read.clear()
        again, answer = probabilities(engine, asked[3], compressed=True)
        assert again == pytest.approx(first, abs=1e-5)
        assert again == pytest.approx(expected, abs=1e-4)
        assert answer.cache.edited + answer.cache.cells == N
        assert engine.submit(asked[4], BRIEF).result().cache.edited == 0
        while engine.step():
            pass
        assert not n_read


def test_another_process_gets_it(
    small: kvg.Model, asked: list[list[int]], tmp_path: Path, n_read: list[int]
) -> None:
    """Who doesn't ask gets the whole, which is in the tiers, too."""
    compressed(tmp_path, small, asked[0])
    expected = by_hand(small, asked[3])
    n_read.clear()
    with engine_of(small, on_disk(tmp_path)) as engine:
        got, answer = probabilities(engine, asked[3], compressed=True)
        assert got == pytest.approx(expected, abs=1e-4)
        assert answer.cache.edited + answer.cache.cells == N
        tiers = engine.stats().tiers
        assert tiers is not None
        assert tiers.loaded_tokens == N // 2
        assert engine.stats().cells_used[0] <= N // 2 + 32 + 24
        assert engine.submit(asked[4], BRIEF).result().cache.edited == 0
    assert not n_read


@pytest.mark.parametrize("n", [512, 513, 543, 544, 545])
def test_every_length(small: kvg.Model, asked: list[list[int]], tmp_path: Path, n: int) -> None:
    """The text needs one token more than the prefix has."""
    compressed(tmp_path, small, asked[0], n)
    for n_text, got in ((n, False), (n + 1, True)):
        with engine_of(small, on_disk(tmp_path)) as engine:
            use = engine.submit(asked[0][:n_text], BRIEF, compressed=True).result().cache
            assert (use.edited > 0) == got


def test_the_longest_is_taken(small: kvg.Model, asked: list[list[int]], tmp_path: Path) -> None:
    compressed(tmp_path, small, asked[0], 520)
    compressed(tmp_path, small, asked[0], 550)
    with engine_of(small, on_disk(tmp_path)) as engine:
        use = engine.submit(asked[0], BRIEF, compressed=True).result().cache
        assert use.edited + use.cells == 550


@pytest.mark.parametrize(
    ("options", "request_options"),
    [({"prefix_compress": 0.25}, {}), ({}, {"salt": "other"}), ({}, {"compressed": False})],
)
def test_who_does_not_get_it(
    small: kvg.Model,
    asked: list[list[int]],
    tmp_path: Path,
    options: dict[str, Any],
    request_options: dict[str, Any],
) -> None:
    compressed(tmp_path, small, asked[0])
    with engine_of(small, on_disk(tmp_path), **options) as engine:
        given = {"compressed": True, **request_options}
        assert engine.submit(asked[3], BRIEF, **given).result().cache.edited == 0


def states(model: kvg.Model) -> dict[str, bytes]:
    """What a record of the prefix can't be: cells beyond it, without the first one, twice at a position, of
    two sequences; and no state at all."""
    found = {"nothing": b"", "junk": b"x" * 5000}
    with open_context(model, n_ctx=1400, n_seq_max=2, **F32) as ctx:
        batch = kvg.Batch()
        batch.extend(ids_of(model, 500, 1), 0)
        ctx.decode(batch)
        batch.clear()
        batch.extend(ids_of(model, N + 1 - 500, 2), 500)
        ctx.decode(batch)
        ctx.kv.seq_rm(0, 100, N)  # as many cells as there is room for
        found["beyond"] = ctx.kv.save(0)
        ctx.kv.seq_cp(0, 1, -1, -1)
        found["two"] = ctx.kv.save()
        ctx.kv.seq_rm(0, 0, 1)
        found["later"] = ctx.kv.save(0)
        ctx.kv.seq_rm(0, N, -1)
        ctx.kv.seq_add(0, 50, -1, -20)
        found["again"] = ctx.kv.save(0)
        ctx.kv.seq_rm(0, -1, -1)
        found["empty"] = ctx.kv.save(0)
    return found


def test_records_of_something_else_are_misses(
    small: kvg.Model, asked: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (what, state) in enumerate(states(small).items()):
        folder = tmp_path / what
        with monkeypatch.context() as patch:
            patch.setattr("pykvgraph.tiers.rows.pack", lambda name, rows, state=state: pack(name, state))
            with engine_of(small, on_disk(folder)) as engine:
                compress(engine, asked[0])
        with engine_of(small, on_disk(folder)) as engine:
            answer = engine.submit(asked[3], BRIEF, compressed=True).result()
            tiers = engine.stats().tiers
            assert tiers is not None
            assert (answer.cache.edited, tiers.misses["other"]) == (0, 1), (number, what)
            assert answer.tokens == engine.submit(asked[3], BRIEF).result().tokens


def test_damaged_files_are_misses(small: kvg.Model, asked: list[list[int]], tmp_path: Path) -> None:
    compressed(tmp_path, small, asked[0])
    path = max(tmp_path.glob("*.end"), key=lambda each: each.stat().st_size)  # others have a few tokens
    whole = path.read_bytes()
    for i, damaged in enumerate((whole[:-1], whole[:70], whole[:3000] + b"\1" + whole[3001:], whole + b"\0")):
        path.write_bytes(damaged)
        with engine_of(small, on_disk(tmp_path)) as engine:
            assert engine.submit(asked[3], BRIEF, compressed=True).result().cache.edited == 0, i
            tiers = engine.stats().tiers
            assert tiers is not None
            assert tiers.misses["damaged"] == 1


def test_a_disk_that_is_slow(
    small: kvg.Model, asked: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for longer than decoding takes; others run meanwhile."""
    compressed(tmp_path, small, asked[0])
    read: Callable[[DiskTier, bytes], Record] = DiskTier.read
    may_read = threading.Event()

    def slowly(self: DiskTier, key: bytes) -> Record:
        may_read.wait(60)
        return read(self, key)

    monkeypatch.setattr(DiskTier, "read", slowly)
    with engine_of(small, on_disk(tmp_path), n_ctx=4096) as engine:
        request = engine.submit(asked[3], BRIEF, compressed=True)
        other = engine.submit(ids_of(small, 40, 9), BRIEF)
        while not other.done:
            engine.step()
        assert not request.done
        assert request.result().cache.edited == 0
        may_read.set()
        tiers = engine.stats().tiers
        assert tiers is not None
        assert tiers.misses["late"] == 1


def test_steps_that_were_not_measured(small: kvg.Model, asked: list[list[int]], tmp_path: Path) -> None:
    """It isn't loaded once more where the cells have it, and the text, too."""
    compressed(tmp_path, small, asked[0])
    longer = [*asked[0], *ids_of(small, 600, 9)]
    with engine_of(small, on_disk(tmp_path), n_ctx=4096, n_ubatch=8) as engine:
        kept = kept_of(engine)
        n_free = len(kept._free)
        assert engine.submit(asked[0], BRIEF, compressed=True).result().cache.edited > 0
        engine.submit(longer, BRIEF).result()
        loaded = engine.stats().tiers
        answer = engine.submit(longer, BRIEF, compressed=True).result()
        assert (answer.cache.cells, answer.cache.edited) == (len(longer) - 1, 0)
        now = engine.stats().tiers
        assert loaded is not None and now is not None
        assert now.loaded_tokens == loaded.loaded_tokens > 0
        assert len(kept._free) == n_free - 1


def test_no_memory_to_read_it(
    small: kvg.Model, asked: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A miss; what comes next is loaded as ever."""
    compressed(tmp_path, small, asked[0])

    def lacks(self: DiskTier, key: bytes) -> Record:
        raise MemoryError

    with engine_of(small, on_disk(tmp_path), n_ctx=4096) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(DiskTier, "read", lacks)
            assert engine.submit(asked[3], BRIEF, compressed=True).result().cache.edited == 0
        tiers = engine.stats().tiers
        assert tiers is not None
        assert (tiers.misses["no-room"], tiers.misses["late"]) == (1, 0)


def test_nobody_waits_any_more(small: kvg.Model, asked: list[list[int]], tmp_path: Path) -> None:
    """A record whose turn comes when it is late is not read."""
    with engine_of(small, on_disk(tmp_path)) as engine:
        compress(engine, asked[0])
        (kept,), records = kept_of(engine)._kept.values(), kept_of(engine)._records
        assert records is not None
        name, geometry = records._name(kept.prefix.ids, kept.prefix.salt), engine.context.kv._geometry
    store = Store(on_disk(tmp_path))
    for is_cancelled in (True, False):
        job = ToMemory(name)
        job.is_cancelled = is_cancelled
        job.fill(store, geometry, swa_full=False)
        assert job.reason is None
        assert store.size_of(name.key)[1] == is_cancelled  # it is on the disk alone
    store.close()


def test_cells_that_are_not_there(small: kvg.Model, asked: list[list[int]], tmp_path: Path) -> None:
    """Others run in them: it enters when it can, and has its prefix then."""
    compressed(tmp_path, small, asked[0])
    with engine_of(small, on_disk(tmp_path), n_ctx=1024) as engine:
        other = engine.submit(ids_of(small, 600, 9), kvg.SamplingParams(max_tokens=300))
        engine.step()
        request = engine.submit(asked[3], BRIEF, compressed=True)
        for _ in range(20):
            engine.step()
        assert not request.done
        other.cancel()
        assert request.result().cache.edited > 0


def test_a_load_that_fails(
    small: kvg.Model, asked: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It isn't tried again, and its sequence is free."""
    compressed(tmp_path, small, asked[0])
    tried: list[Name] = []
    load = CompressedRecords.load

    def counted(self: CompressedRecords, name: Name, seq: int) -> int | None:
        tried.append(name)
        return load(self, name, seq)

    monkeypatch.setattr(CompressedRecords, "load", counted)
    with engine_of(small, on_disk(tmp_path)) as engine:
        kept = kept_of(engine)
        n_free = len(kept._free)
        with monkeypatch.context() as patch:
            patch.setattr(type(engine.context.kv), "_load", refuse)
            for prompt in asked[1:4]:
                assert engine.submit(prompt, BRIEF, compressed=True).result().cache.edited == 0
        assert (len(tried), len(kept._free)) == (1, n_free)
        compress(engine, asked[0])  # read once more, as it can't be had
        assert engine.submit(asked[4], BRIEF, compressed=True).result().cache.edited > 0


def refuse(*_: object) -> None:
    raise kvg.DeviceError("no memory")


def test_forgotten_cells_stay_in_tiers(small: kvg.Model, asked: list[list[int]]) -> None:
    """As Engine.forget_prefix says of any text."""
    with engine_of(small, kvg.Tiers(ram="64M", disk=0)) as engine:
        # the third finds what the second found
        texts = [[*prompt, *engine.submit(prompt, BRIEF).result().tokens] for prompt in asked[:3]]
        while engine.step():
            pass
        for text in texts:
            engine.forget_prefix(text)
        assert not kept_of(engine).n_kept
        assert engine.submit(asked[3], BRIEF, compressed=True).result().cache.edited > 0
