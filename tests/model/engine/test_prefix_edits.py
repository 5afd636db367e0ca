"""Engine.edit_prefix: the engine goes on from an edited text as one sequence of a context does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engines import ids_of
from support.soak import F32

import pykvgraph as kvg

READ = kvg.SamplingParams(max_tokens=1)
SPANS = [(70, 90), (20, 33)]
N = 140


@pytest.mark.parametrize("repair", [0, 5, 200])
def test_it_says_what_an_edited_sequence_says(small: kvg.Model, repair: int) -> None:
    ids, behind = ids_of(small, N, 1), ids_of(small, 8, 2)
    left = [*ids[:20], *ids[33:70], *ids[90:]]
    with kvg.Context(small, n_ctx=512, n_batch=256, **F32) as ctx:
        text = kvg.Sequence(ctx)
        text.set(ids)
        for begin, end in SPANS:
            text.remove(begin, end, repair=0)
        text.repair([(20, min(20 + repair, len(left))), (57, min(57 + repair, len(left)))])
        n_exact = text.approximate_from
        said = [piece.token for piece in kvg.generate(ctx, behind, max_tokens=12)]
    with kvg.Engine(small, n_ctx=512, n_seq_max=2, n_batch=512, **F32) as engine:
        engine.submit([*ids, 1], READ).result(60)
        found = engine.edit_prefix(ids, SPANS, repair=repair, into=b"edited")
        assert found == (left, len(left), len(left) if n_exact is None else n_exact)
        assert engine.find_prefix(ids) == N, "the old text has lost its cells"
        own = len(left) if n_exact is None else 20
        assert engine.find_prefix([*left, *behind]) == own
        salt = b"" if n_exact is None else b"edited"
        done = engine.submit([*left, *behind], kvg.SamplingParams(max_tokens=12), salt=salt).result(60)
        assert done.n_cached == len(left)
        assert list(done.tokens) == said[: len(done.tokens)] and done.tokens
        if n_exact is not None:  # an edited copy is another text, which stays until it is named
            engine.forget_prefix([*ids, 1])
            assert engine.find_prefix(ids) == 0
            assert engine.find_prefix(left, salt=b"edited") == len(left)
            engine.forget_prefix([*left, *behind, *done.tokens], salt=b"edited")
            assert engine.find_prefix(left, salt=b"edited") == 0


def test_what_an_edit_left_is_edited_again(small: kvg.Model) -> None:
    """What was approximate stays so, whatever is repaired behind it, and has the new salt."""
    ids = ids_of(small, N, 9)
    with kvg.Engine(small, n_ctx=512, n_seq_max=2, n_batch=512, **F32) as engine:
        engine.submit([*ids, 1], READ).result(60)
        left = engine.edit_prefix(ids, [(20, 33)], repair=5, into=b"a").ids
        for spans, repair in (([(70, 90)], 200), ([(70, len(left))], 0)):
            found = engine.edit_prefix(left, spans, repair=repair, into=b"b", salt=b"a")
            assert found.ids == [*left[:70], *left[spans[0][1] :]]
            assert (found.n_cached, found.n_exact) == (len(found.ids), 25)
            assert engine.find_prefix(found.ids, salt=b"b") == len(found.ids)
        again = engine.edit_prefix(left, [(70, 90)], repair=0, into=b"c", salt=b"a")
        assert again.n_exact == 25
        whole = engine.edit_prefix(left, [(10, 15)], repair=200, into=b"c", salt=b"a")
        assert whole.n_exact == whole.n_cached == len(whole.ids)  # all that was approximate is repaired


def test_a_tail_a_part_and_what_is_not_there(small: kvg.Model) -> None:
    ids = ids_of(small, N, 3)
    with kvg.Engine(small, n_ctx=512, n_seq_max=1) as engine:
        assert engine.edit_prefix(ids, [(3, 9)], into=b"a") == (ids[:3] + ids[9:], 0, 0)
        engine.submit(ids[:64], READ).result(60)
        assert engine.find_prefix(ids) == 64
        assert engine.edit_prefix(ids, [(80, 90)], into=b"a")[1:] == (64, 64)  # nothing of it is in the cache
        assert engine.edit_prefix(ids, [(40, 90)], into=b"a")[1:] == (40, 40)
        assert engine.edit_prefix(ids, [(0, 139)], into=b"a") == (ids[139:], 0, 0)
        n_used = engine.stats().cells_used
        wrong: list[Any] = [[], [(3, 3)], [(3, 9), (8, 10)], [(-1, 3)], [(3, N + 1)], [(0, N)]]
        wrong += [None, [3, 9], [(3,)], [(3, 9, 1)], [("3", "9")], [(3.0, 9.0)]]
        for spans in wrong:
            with pytest.raises(kvg.InvalidArgumentError, match="spans"):
                engine.edit_prefix(ids, spans, into=b"a")
        with pytest.raises(kvg.InvalidArgumentError, match="repair"):
            engine.edit_prefix(ids, [(3, 9), (10, 12)], repair=engine.context.n_batch // 2 + 1, into=b"a")
        assert engine.stats().cells_used == n_used


def test_what_an_edit_of_an_edit_says_of_what_is_exact(small: kvg.Model) -> None:
    """No token behind one that isn't exact is, wherever the second cut is; `into` has all that is left."""
    ids = ids_of(small, N, 9)
    with kvg.Engine(small, n_ctx=512, n_seq_max=2, **F32) as engine:
        engine.submit([*ids, 1], READ).result(60)
        first = engine.edit_prefix(ids, [(20, 40)], repair=5, into=b"a")
        assert first[1:] == (120, 25)
        wanted = {(22, 30): (112, 27), (80, 90): (110, 25), (100, 120): (100, 25)}  # the last is the end
        for span, (n, n_exact) in wanted.items():
            second = engine.edit_prefix(first.ids, [span], repair=5, salt=b"a", into=b"b%d" % span[0])
            assert second[1:] == (n, n_exact)
            told = engine.submit([*second.ids, 1, 2], READ, salt=b"b%d" % span[0]).result(60)
            assert told.cache[:4] == (n_exact, 0, 0, n - n_exact)


def test_into_the_salt_of_the_old_text_is_refused(small: kvg.Model) -> None:
    """Whoever sends what is left there would get cells that aren't those of its tokens."""
    ids = ids_of(small, N, 10)
    with kvg.Engine(small, n_ctx=512, n_seq_max=2, **F32) as engine:
        for salt in (b"", b"a"):
            engine.submit([*ids, 1], READ, salt=salt).result(60)
            with pytest.raises(kvg.InvalidArgumentError, match="into"):
                engine.edit_prefix(ids, [(20, 40)], salt=salt, into=salt)
            told = engine.submit([*ids[:20], *ids[40:]], READ, salt=salt).result(60)
            assert told.cache[:4] == (20, 0, 0, 0)


def test_a_file_has_the_exact_beginning_of_an_edited_text(small: kvg.Model, tmp_path: Path) -> None:
    """Who reads it gets cells under any salt, as those of its tokens."""
    ids, path = ids_of(small, N, 11), tmp_path / "prefix"
    with kvg.Engine(small, n_ctx=512, n_seq_max=2, **F32) as engine:
        engine.submit([*ids, 1], READ).result(60)
        left = engine.edit_prefix(ids, [(20, 40)], repair=5, into=b"a").ids
        assert engine.save_prefix(path, left, salt=b"a") == 25
        assert engine.edit_prefix(ids, [(0, 40)], repair=0, into=b"b").n_exact == 0
        assert engine.save_prefix(tmp_path / "none", ids[40:], salt=b"b") == 0
        assert not (tmp_path / "none").exists()
        assert engine.load_prefix(path, salt=b"c") == left[:25]
        asked = kvg.SamplingParams(max_tokens=6)
        said = [engine.submit(left, asked, salt=salt).result(60) for salt in (b"c", b"d")]
    assert (said[0].n_cached, said[1].n_cached) == (25, 0)
    assert said[0].tokens == said[1].tokens


def test_without_room_for_copies_nothing_is_changed(small: kvg.Model) -> None:
    ids = ids_of(small, 100, 4)
    with kvg.Engine(small, n_ctx=128, n_seq_max=2) as engine:
        engine.submit([*ids, 1], READ, pins=[kvg.Pin(96, 60.0)]).result(60)
        with pytest.raises(kvg.CacheFullError):
            engine.edit_prefix(ids, [(8, 16)], into=b"edited")
        assert engine.find_prefix(ids) >= 96
        assert engine.submit([*ids, 2], READ).result(60).n_cached >= 96


def test_layers_with_windows_and_states_are_refused(model: kvg.Model) -> None:
    ids = ids_of(model, 40, 5)
    with kvg.Engine(model, n_ctx=256, n_seq_max=1) as engine:
        engine.submit(ids, READ).result(60)
        if engine.can_shift:
            assert engine.edit_prefix(ids, [(3, 9)], into=b"a").n_exact == 34
        else:
            with pytest.raises(kvg.UnsupportedError, match="can't be shifted"):
                engine.edit_prefix(ids, [(3, 9)], into=b"a")


def test_tiers_get_nothing_of_what_is_approximate(small: kvg.Model, decoding_is_slow: None) -> None:
    """What an edit left is told as edited, goes with its cells, and its exact copy comes back."""
    ids, behind = ids_of(small, 300, 6), ids_of(small, 40, 7)
    left = [*ids[:64], *ids[104:]]
    with kvg.Engine(small, n_ctx=768, n_seq_max=2, tiers=kvg.Tiers("64M"), **F32) as engine:
        engine.submit([*ids, 1], READ).result(60)
        assert engine.edit_prefix(ids, [(64, 104)], repair=8, into=b"edited") == (left, 260, 72)
        told = engine.submit([*left, *behind], READ, salt=b"edited").result(60)
        assert told.cache is not None
        assert told.cache[:4] == (72, 0, 0, 260 - 72)
        engine.submit(ids_of(small, 760, 8), READ).result(60)
        assert engine.submit([*left, *behind], READ, salt=b"edited").result(60).n_cached == 0
        stats = engine.stats().tiers
    assert stats is not None
    assert not any(stats.misses.values())
