"""seq_add and seq_div on shared cells: the sequence goes on with copies, the others see what they saw."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import where
from support.apart import Apart, SharingScenario, judge_sharing
from support.engines import Logits, OurEngine, Token, decode, open_context, random_ids, run_of
from support.judge import nmse
from support.kv_rows import allowed_drift, cells_at, contents, fresh_k, same_cells
from support.kv_types import KV_TYPES
from support.models import N_VOCAB, SMALL, ModelSpec

import pykvgraph as kvg

pytestmark = pytest.mark.any_device

N_PREFIX, N_OWN = 40, 10
Sharing = Apart | OurEngine
Holder = Callable[[tuple[str, str]], kvg.Model]
ModelFile = Callable[[ModelSpec], Path]


def share(engine: Sharing, seqs: tuple[int, ...]) -> None:
    """Forty tokens that all see, then ten of each one's own: cells N_PREFIX + N_OWN * len(seqs)."""
    engine.decode(run_of(random_ids(N_PREFIX, N_VOCAB), 0, seqs))
    for seq in seqs:
        engine.decode(run_of(random_ids(N_OWN, N_VOCAB, 1 + seq), N_PREFIX, (seq,)))


def go_on(engine: Sharing, starts: dict[int, int], n: int = 20) -> Logits:
    """n more tokens of each sequence from where it stands, in common batches."""
    ids = {seq: random_ids(n, N_VOCAB, 100 + seq) for seq in starts}
    rows = [engine.decode([Token(ids[s][i], starts[s] + i, (s,)) for s in starts]) for i in range(n)]
    return np.concatenate(rows)


def add_to_part(engine: Sharing) -> Logits:
    """Past the first eight everything of sequence 1 moves away."""
    share(engine, (0, 1))
    engine.seq_add(1, 8, -1, 20)
    return go_on(engine, {0: 50, 1: 70})


def add_in_the_middle(engine: Sharing) -> Logits:
    """A range of the shared ones moves behind everything; what lies around it stays shared."""
    share(engine, (0, 1))
    engine.seq_add(0, 10, 25, 40)
    return go_on(engine, {0: 65, 1: 50})


def context_shift(engine: Sharing) -> Logits:
    """Sequence 1 gives up sixteen of the shared ones, as a full context does."""
    share(engine, (0, 1))
    engine.seq_rm(1, 8, 24)
    engine.seq_add(1, 24, -1, -16)
    return go_on(engine, {0: 50, 1: 34})


def below_zero(engine: Sharing) -> Logits:
    """What would come below 0 is only lost to the sequence that moves: 30 copies, not 40."""
    share(engine, (0, 1))
    engine.seq_add(1, 0, -1, -10)
    return go_on(engine, {0: 50, 1: 40})


def copy_of_a_pending_shift(engine: Sharing) -> Logits:
    """Cells that wait for a rotation become shared, then move on: a copy takes the rotation along."""
    engine.decode(run_of(random_ids(N_PREFIX, N_VOCAB)))
    engine.seq_add(0, 5, -1, 7)
    engine.seq_cp(0, 1, 0, -1)
    engine.seq_add(1, 20, -1, 30)
    return go_on(engine, {0: 47, 1: 77})


def several_sharers(engine: Sharing) -> Logits:
    """Each moves by its own amount; when it's the last one's turn, nobody shares any more."""
    share(engine, (0, 1, 2))
    for seq, delta in ((2, 30), (0, -5), (1, 11)):
        engine.seq_add(seq, 6, -1, delta)
    return go_on(engine, {0: 45, 1: 61, 2: 80})


def far_ids(engine: Sharing) -> Logits:
    """The two ids lie in different words of the set."""
    share(engine, (0, 64))
    engine.seq_add(64, 8, -1, 20)
    return go_on(engine, {0: 50, 64: 70})


BOTH = N_PREFIX + 2 * N_OWN + 2 * 20
LIBLLAMA_TOO = [
    (add_to_part, (0, 1), BOTH + 32),
    (add_in_the_middle, (0, 1), BOTH + 15),
    (context_shift, (0, 1), BOTH + 16),
    (below_zero, (0, 1), BOTH + 30),
    (copy_of_a_pending_shift, (0, 1), N_PREFIX + 2 * 20 + 27),
    (several_sharers, (0, 1, 2), N_PREFIX + 3 * N_OWN + 3 * 20 + 2 * 34),
    (far_ids, (0, 64), BOTH + 32),
]


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize(
    ("scenario", "seqs", "n_used"), LIBLLAMA_TOO, ids=[scenario.__name__ for scenario, _, _ in LIBLLAMA_TOO]
)
def test_logits_are_those_of_separate_caches(
    model_file: ModelFile, scenario: SharingScenario, seqs: tuple[int, ...], n_used: int, kv_type: str
) -> None:
    judge_sharing(model_file(SMALL), scenario, seqs, kv_type=kv_type, n_used=n_used)


def divide(engine: Sharing) -> Logits:
    """Self-extend of one of two: only position 0 stays, so 39 of the shared ones are copied."""
    share(engine, (0, 1))
    engine.seq_div(1, 0, -1, 2)
    return go_on(engine, {0: 50, 1: 25})


def add_then_divide(engine: Sharing) -> Logits:
    """The second operation finds private cells, and a shift that waits."""
    share(engine, (0, 1))
    engine.seq_add(1, 16, -1, 16)
    engine.seq_div(1, 32, -1, 4)
    return go_on(engine, {0: 50, 1: 25})


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize(("scenario", "n_copies"), [(divide, 39), (add_then_divide, 24)])
def test_division_gives_the_logits_of_separate_caches(
    model_file: ModelFile, scenario: SharingScenario, n_copies: int, kv_type: str
) -> None:
    """Ours are the separate ones: libllama rotates K in the wrong direction."""
    path = model_file(SMALL)
    judge_sharing(path, scenario, (0, 1), libllama=False, kv_type=kv_type, n_used=BOTH + n_copies)


@settings(max_examples=where.examples(60))
@given(
    holes=st.lists(st.tuples(st.integers(0, 79), st.integers(1, 12)), max_size=10),
    shared=st.lists(st.tuples(st.integers(0, 79), st.integers(1, 40)), min_size=1, max_size=4),
    kv_types=st.sampled_from(KV_TYPES),
    waits=st.booleans(),
)
def test_copies_are_exact(
    holder: Holder,
    holes: list[tuple[int, int]],
    shared: list[tuple[int, int]],
    kv_types: tuple[str, str],
    waits: bool,
) -> None:
    """There and back again is no rotation, so the copies' bytes must be the originals', in every layer."""
    model = holder(kv_types)
    options = dict(zip(("type_k", "type_v"), kv_types, strict=True))
    with open_context(model, n_ctx=170, n_seq_max=2, defrag_threshold=-1, **options) as ctx:
        decode(ctx, run_of(random_ids(80, N_VOCAB)))
        for p0, n in holes:
            ctx.kv.seq_rm(0, p0, p0 + n)
        for p0, n in shared:
            ctx.kv.seq_cp(0, 1, p0, p0 + n)
        before = [contents(ctx.kv, seq) for seq in range(2)]
        if waits:
            ctx.kv.seq_add(0, 0, -1, 9)  # copies too: now it is 1 that has the originals
        n_used = ctx.kv.n_used
        n_shared = int((ctx.kv.cells().seq.sum(axis=1) > 1).sum())
        ctx.kv.seq_add(1, 0, -1, 500)
        assert ctx.kv.n_used == n_used + n_shared
        ctx.kv.seq_add(1, 0, -1, -500)
        if waits:
            ctx.kv.seq_add(0, 0, -1, -9)
        assert ctx.kv.n_used == n_used + n_shared
        assert ctx.kv.update().shifted_cells == 0
        assert [contents(ctx.kv, seq) for seq in range(2)] == before


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_k_of_the_copy_is_fresh_and_the_original_untouched(small: kvg.Model, kv_type: str) -> None:
    tokens = run_of(random_ids(40, N_VOCAB))
    with open_context(small, n_ctx=128, n_seq_max=2, type_k=kv_type) as ctx:
        fresh = fresh_k(ctx, [token._replace(pos=token.pos + 60) for token in tokens[10:30]])
        ctx.reset()
        decode(ctx, [token._replace(seq_ids=(0, 1)) for token in tokens])
        before = contents(ctx.kv, 0)
        ctx.kv.seq_add(1, 10, 30, 60)
        assert ctx.kv.update().shifted_cells == 20
        assert contents(ctx.kv, 0) == before
        k = ctx.kv.read_k(0)[cells_at(ctx.kv, range(70, 90))]
    assert np.abs(k - fresh).max() <= allowed_drift(fresh, kv_type, 100)


def test_no_room_for_copies(small: kvg.Model) -> None:
    """One cell too few: refused, and nothing is changed; one more, and all of them are used."""
    with open_context(small, n_ctx=64, n_seq_max=2, defrag_threshold=-1) as ctx:
        decode(ctx, run_of(random_ids(24, N_VOCAB), 0, (0, 1)))
        decode(ctx, run_of(random_ids(20, N_VOCAB, 1), 24))
        decode(ctx, run_of(random_ids(2, N_VOCAB, 2), 24, (1,)))
        ctx.kv.seq_add(0, 24, -1, 3)  # private cells that wait for their rotation
        before = ctx.kv.cells()
        for change in (ctx.kv.seq_add, ctx.kv.seq_div):
            with pytest.raises(kvg.CacheFullError, match="19 cells and 18 of 64"):
                change(0, 5, -1, 2)
            assert same_cells(ctx.kv.cells(), before)
        held = [contents(ctx.kv, seq) for seq in range(2)]
        ctx.kv.seq_add(0, 6, -1, 1)
        assert ctx.kv.n_used == 64
        assert contents(ctx.kv, 1) == held[1]
        with pytest.raises(kvg.CacheFullError):
            ctx.kv.seq_add(1, 5, 6, 1)
        ctx.kv.seq_add(1, 6, -1, 1)  # all its own by now: no copies
        assert ctx.kv.n_used == 64


def test_a_full_cache_still_moves_what_is_not_shared(small: kvg.Model) -> None:
    with open_context(small, n_ctx=32, n_seq_max=2) as ctx:
        decode(ctx, run_of(random_ids(32, N_VOCAB)))
        ctx.kv.seq_cp(0, 1, 0, 8)
        ctx.kv.seq_add(0, 8, -1, 5)
        ctx.kv.seq_add(1, 0, -1, -8)  # all below 0: its sight is lost, nothing is copied
        assert ctx.kv.seq_pos_max(1) == -1
        assert ctx.kv.n_used == 32


@pytest.mark.parametrize(
    "change",
    [
        lambda kv: kv.seq_add(1, 0, -1, 0),
        lambda kv: kv.seq_div(1, 0, -1, 1),
        lambda kv: kv.seq_div(1, 0, 1, 4),  # position 0 stays 0
        lambda kv: kv.seq_add(1, 40, -1, 5),  # out of its range
        lambda kv: kv.seq_add(2, 0, -1, 5),  # no sharer
    ],
)
def test_what_moves_nothing_copies_nothing(small: kvg.Model, change: Callable[[kvg.KVCache], None]) -> None:
    with open_context(small, n_ctx=64, n_seq_max=3) as ctx:
        decode(ctx, run_of(random_ids(40, N_VOCAB), 0, (0, 1)))
        before = ctx.kv.cells()
        change(ctx.kv)
        assert same_cells(ctx.kv.cells(), before)


def test_a_position_too_large_is_refused_before_anything_is_copied(small: kvg.Model) -> None:
    with open_context(small, n_ctx=64, n_seq_max=2) as ctx:
        decode(ctx, run_of(random_ids(20, N_VOCAB), 0, (0, 1)))
        before = ctx.kv.cells()
        with pytest.raises(kvg.InvalidArgumentError):
            ctx.kv.seq_add(1, 0, -1, 2**31 - 10)
        assert same_cells(ctx.kv.cells(), before)


def test_sixty_five_sharers(small: kvg.Model) -> None:
    """Each moves away; the last one finds the cells its own. All see the bytes they saw, rotated back."""
    n_seq, n = 65, 6
    everyone = tuple(range(n_seq))
    with open_context(small, n_ctx=n_seq * n, n_seq_max=n_seq) as ctx:
        decode(ctx, run_of(random_ids(n, N_VOCAB), 0, everyone))
        before = contents(ctx.kv, 0)
        for seq in reversed(everyone):
            assert ctx.kv.n_used == n * min(n_seq - seq, n_seq)
            ctx.kv.seq_add(seq, 0, -1, 10 + seq)
        assert ctx.kv.n_used == n_seq * n
        assert [ctx.kv.seq_pos_min(seq) for seq in everyone] == [10 + seq for seq in everyone]
        for seq in everyone:
            ctx.kv.seq_add(seq, 0, -1, -10 - seq)
        assert ctx.kv.update().shifted_cells == 0
        assert all(contents(ctx.kv, seq) == before for seq in (0, 1, 31, 63, 64))


def test_context_shift_of_one_sharer(small: kvg.Model) -> None:
    """The policy in a shared cache: refused as a whole, or one is shifted and the other doesn't notice."""
    options = {"flash_attn": "off", "n_seq_max": 2}
    with open_context(small, n_ctx=64, **options) as ctx, open_context(small, n_ctx=64, **options) as alone:
        decode(ctx, run_of(random_ids(40, N_VOCAB), 0, (0, 1)))
        decode(alone, run_of(random_ids(40, N_VOCAB), 0, (1,)))
        before = ctx.kv.cells()
        with pytest.raises(kvg.CacheFullError, match="32 cells of sequence 1"):
            kvg.ContextShift(n_keep=4, n_discard=4).apply(ctx.kv, 1)
        assert same_cells(ctx.kv.cells(), before)
        held = contents(ctx.kv, 0)
        reports = [kvg.ContextShift(n_keep=4, n_discard=16).apply(each.kv, 1) for each in (ctx, alone)]
        assert [report.n_past for report in reports] == [24, 24]
        assert ctx.kv.n_used == 40 + 20
        assert contents(ctx.kv, 0) == held
        tokens = run_of(random_ids(4, N_VOCAB, 1), 24, (1,))
        assert nmse(decode(ctx, tokens), decode(alone, tokens)) <= where.limit(1e-6)
