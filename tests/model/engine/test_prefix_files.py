"""Prefixes in files: what was saved is found again, in another engine, and a damaged file changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import where
from support.architectures import ArchSpec
from support.engines import ids_of
from support.kinds import KINDS
from support.soak import F32, are_likeliest

import pykvgraph as kvg

TALK = kvg.SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def dense(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(KINDS[0]), device=where.device) as model:
        yield model


def engine_of(model: kvg.Model, n_ctx: int = 1024, **options: Any) -> kvg.Engine:
    return kvg.Engine(model, n_ctx=n_ctx, n_seq_max=2, **F32, **options)


@pytest.mark.parametrize("background", [True, False])
def test_a_text_is_gone_on_with_in_another_engine(model: kvg.Model, tmp_path: Path, background: bool) -> None:
    prompt, file = ids_of(model, 100, 1), tmp_path / "a"
    with engine_of(model, background=background) as engine:
        first = engine.submit(prompt, TALK).result()
        text = [*prompt, *first.tokens]
        n = engine.save_prefix(file, text)
        assert n == len(text) - 1  # the last token was never decoded
    with engine_of(model, background=background) as engine:
        assert engine.load_prefix(file) == text[:n]
        assert engine.stats().n_running == 0
        again = engine.submit(text, TALK).result()
        assert again.n_cached == n
        assert engine.submit(text, TALK, salt="other").result().n_cached == 0
    assert are_likeliest(model, text, again.tokens)
    assert are_likeliest(model, prompt, first.tokens)


def test_a_text_that_runs_can_be_saved(dense: kvg.Model, tmp_path: Path) -> None:
    prompt, file = ids_of(dense, 64, 2), tmp_path / "a"
    with engine_of(dense, background=False) as engine:
        running = engine.submit(prompt, kvg.SamplingParams(max_tokens=100))
        for _ in range(8):
            engine.step()
        assert engine.save_prefix(file, prompt) == 64
        assert are_likeliest(dense, prompt, running.result().tokens)


def test_a_salt_keeps_its_texts(dense: kvg.Model, tmp_path: Path) -> None:
    prompt, file = ids_of(dense, 64, 3), tmp_path / "a"
    with engine_of(dense) as engine:
        engine.submit(prompt, TALK, salt="mine").result()
        assert engine.save_prefix(file, prompt) == 0
        assert not file.exists()
        assert engine.save_prefix(file, prompt, salt="mine") == 64
        engine.load_prefix(file, salt="yours")
        assert engine.submit(prompt, TALK, salt="yours").result().n_cached == 63
        assert engine.submit(prompt, TALK).result().n_cached == 0


def test_a_damaged_file_changes_nothing(dense: kvg.Model, tmp_path: Path) -> None:
    """Each byte of the head and the tokens, and some of the cells, once flipped; and lengths in steps."""
    prompt, file = ids_of(dense, 40, 4), tmp_path / "a"
    with engine_of(dense) as engine:
        engine.submit(prompt, TALK).result()
        engine.save_prefix(file, prompt)
    data = file.read_bytes()
    with engine_of(dense) as engine:
        bad = [data[:n] for n in range(0, len(data), max(len(data) // 40, 1))]
        places = [*range(16 + 4 * 40), *range(180, len(data), max(len(data) // 40, 1))]
        bad += [data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :] for at in places]
        for broken in bad:
            file.write_bytes(broken)
            with pytest.raises(kvg.StateError):
                engine.load_prefix(file)
        assert engine.context.kv.n_used == 0
        assert engine.submit(prompt, TALK).result().n_cached == 0
        file.write_bytes(data)
        engine.load_prefix(file)
        assert engine.submit(prompt, TALK).result().n_cached == 39


def test_tokens_without_their_cells_are_refused(dense: kvg.Model, tmp_path: Path) -> None:
    """A head with other tokens than cells, with the right checksums."""
    from pykvgraph.prefix.prefix_file import SavedPrefix, pack, unpack

    prompt, file = ids_of(dense, 40, 5), tmp_path / "a"
    with engine_of(dense) as engine:
        engine.submit(prompt, TALK).result()
        engine.save_prefix(file, prompt)
        saved = unpack(file.read_bytes(), dense.n_vocab)
        used = engine.context.kv.n_used
        for ids in (saved.ids[:-1], saved.ids + saved.ids):
            file.write_bytes(pack(SavedPrefix(ids, saved.cells)))
            with pytest.raises(kvg.StateError, match="not those of the saved tokens"):
                engine.load_prefix(file, salt="other")
        assert engine.context.kv.n_used == used
        too_high = saved.ids[:]
        too_high[3] = dense.n_vocab
        file.write_bytes(pack(SavedPrefix(too_high, saved.cells)))
        with pytest.raises(kvg.StateError, match="vocabulary"):
            engine.load_prefix(file)


def test_no_room_is_an_error_and_running_texts_go_on(dense: kvg.Model, tmp_path: Path) -> None:
    prompt, file = ids_of(dense, 200, 6), tmp_path / "a"
    with engine_of(dense) as engine:
        engine.submit(prompt, TALK).result()
        assert engine.save_prefix(file, prompt) == 200
    with engine_of(dense, 256, background=False) as engine:
        other = ids_of(dense, 100, 7)
        running = engine.submit(other, kvg.SamplingParams(max_tokens=20))
        for _ in range(3):
            engine.step()
        with pytest.raises(kvg.CacheFullError, match="200 tokens"):
            engine.load_prefix(file)
        assert are_likeliest(dense, other, running.result().tokens)
        assert len(engine.load_prefix(file)) == 200  # its cells may go now


def test_a_text_is_forgotten_but_for_what_others_begin_with(model: kvg.Model) -> None:
    shared = ids_of(model, 64, 8)
    one, two = shared + ids_of(model, 50, 9), shared + ids_of(model, 40, 10)
    with engine_of(model) as engine:
        engine.submit(two, TALK).result()
        used = engine.context.kv.groups[0].n_used
        said = engine.submit(one, TALK).result().tokens
        assert engine.forget_prefix(one, salt="other") == 0
        assert engine.forget_prefix([*one, *said]) == 50 + 11  # the 64 are the other's, too
        assert engine.forget_prefix([*one, *said]) == 0
        assert engine.context.kv.groups[0].n_used == used
        assert engine.submit(two, TALK).result().n_cached == len(two) - 1
        assert are_likeliest(model, one, engine.submit(one, TALK).result().tokens)


def test_a_closed_engine_and_no_file(dense: kvg.Model, tmp_path: Path) -> None:
    with engine_of(dense) as engine:
        with pytest.raises(FileNotFoundError):
            engine.load_prefix(tmp_path / "none")
        with pytest.raises(IsADirectoryError):
            engine.load_prefix(tmp_path)
        engine.submit([1, 2, 3], TALK).result()
        with pytest.raises(FileNotFoundError):
            engine.save_prefix(tmp_path / "none" / "a", [1, 2, 3])
    with pytest.raises(kvg.InvalidArgumentError, match="closed"):
        engine.save_prefix(tmp_path / "a", [1])
