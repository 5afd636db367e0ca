"""Defrag "sort": one run of cells per distinct set of sequences, every byte where its position is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import where
from support.apart import Apart, judge_sharing
from support.engines import Logits, OurEngine, Token, decode, open_context, random_ids, run_of
from support.judge import nmse
from support.kv_rows import contents, same_cells, seqs_of
from support.kv_types import KV_TYPES
from support.models import N_VOCAB, SMALL, ModelSpec

import pykvgraph as kvg

pytestmark = pytest.mark.any_device

Holder = Callable[[tuple[str, str]], kvg.Model]
ModelFile = Callable[[ModelSpec], Path]
Shape = tuple[tuple[int, ...], int]  # a set of sequences, a position


def layout(kv: kvg.KVCache) -> list[Shape | None]:
    """What each cell holds, None where it is empty."""
    cells = kv.cells()
    return [(seqs_of(cells, i), int(pos)) if pos >= 0 else None for i, pos in enumerate(cells.pos)]


def promised(before: list[Shape | None]) -> list[Shape | None]:
    """The documented order: larger sets, then lower ids, then positions; behind them nothing."""
    used = sorted((cell for cell in before if cell), key=lambda cell: (-len(cell[0]), cell[0], cell[1]))
    return [*used, *[None] * (len(before) - len(used))]


def check_runs(kv: kvg.KVCache) -> None:
    """One run per distinct set, exactly, and no hole."""
    used = [cell for cell in layout(kv) if cell]
    runs = Counter(seqs for seqs, _ in groupby(cell[0] for cell in used))
    assert runs == Counter({cell[0]: 1 for cell in used})
    assert kv.n_kv == kv.n_used == len(used)


def fill(ctx: kvg.Context, n_seq: int, n_tokens: int) -> None:
    """Sixteen tokens that all see, then the sequences in turn, token by token."""
    ids = random_ids(n_tokens, N_VOCAB)
    decode(ctx, run_of(ids[:16], 0, tuple(range(n_seq))))
    decode(ctx, [Token(ids[i], 16 + i // n_seq, (i % n_seq,), logits=False) for i in range(n_tokens)])


@settings(max_examples=where.examples(60))
@given(
    n_seq=st.integers(1, 5),
    n_tokens=st.integers(1, 120),
    kv_types=st.sampled_from(KV_TYPES),
    copies=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 60), st.integers(1, 30)), max_size=6
    ),
    holes=st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 60), st.integers(1, 12)), max_size=6),
)
def test_runs_order_bytes_and_logits(
    holder: Holder,
    n_seq: int,
    n_tokens: int,
    kv_types: tuple[str, str],
    copies: list[tuple[int, int, int, int]],
    holes: list[tuple[int, int, int]],
) -> None:
    """With default attention: ggml's flash adds up F16 values in the order of the cells."""
    model = holder(kv_types)
    options: dict[str, int | str] = {"n_ctx": 256, "n_seq_max": 5, "defrag_threshold": -1}
    options |= dict(zip(("type_k", "type_v"), kv_types, strict=True))
    with open_context(model, **options) as ctx, open_context(model, **options) as untouched:
        for each in (ctx, untouched):
            fill(each, n_seq, n_tokens)
            for src, dst, p0, n in copies:
                each.kv.seq_cp(src, dst, p0, p0 + n)
            for seq, p0, n in holes:
                each.kv.seq_rm(seq, p0, p0 + n)
        kv = ctx.kv
        held = [contents(kv, seq) for seq in range(5)]
        before = layout(kv)
        kv.defrag("sort")
        assert layout(kv) == before  # not before the update
        stats = kv.update()
        assert layout(kv) == promised(before)
        check_runs(kv)
        assert [contents(kv, seq) for seq in range(5)] == held
        assert stats.moved_cells >= sum(a != b for a, b in zip(before, layout(kv), strict=True) if b)
        kv.defrag("sort")
        assert (kv.update().moved_cells, kv.update().graphs) == (0, 0)  # sorted already
        following = [Token(7 + seq, kv.seq_pos_max(seq) + 1, (seq,)) for seq in range(5)]
        assert nmse(decode(ctx, following), decode(untouched, following)) <= where.limit(1e-6)


def test_order_of_sets(small: kvg.Model) -> None:
    """Sets of equal size go by their lowest id, then the next: beyond 64 ids too."""
    sets = [(64,), (3, 64), (0, 1), (2,), (63, 64), (0, 2), (0, 64), (0,), (1, 2), (0, 1, 2)]
    wanted = [(0, 1, 2), (0, 1), (0, 2), (0, 64), (1, 2), (3, 64), (63, 64), (0,), (2,), (64,)]
    with open_context(small, n_ctx=64, n_seq_max=65, defrag_threshold=-1) as ctx:
        for i, seqs in enumerate(sets * 2):
            decode(ctx, [Token(5 + i, i, seqs[:1])])
            for seq in seqs[1:]:
                ctx.kv.seq_cp(seqs[0], seq, i, i + 1)
        ctx.kv.defrag("sort")
        ctx.kv.update()
        expected = [(seqs, sets.index(seqs) + turn * len(sets)) for seqs in wanted for turn in range(2)]
        assert layout(ctx.kv)[: len(expected)] == expected


def test_positions_that_occur_twice(small: kvg.Model) -> None:
    """Equal cells keep their order: which of two is first must not depend on chance."""
    with open_context(small, n_ctx=64, defrag_threshold=-1) as ctx:
        decode(ctx, run_of(random_ids(40, N_VOCAB)))
        ctx.kv.seq_add(0, 20, -1, 1000)
        ctx.kv.seq_div(0, 0, 20, 7)
        ctx.kv.seq_rm(0, 1, 2)
        ctx.kv.update()
        held = contents(ctx.kv, 0)
        v = ctx.kv.read_v(1)
        ctx.kv.defrag("sort")
        ctx.kv.update()
        places = [*range(7), *range(14, 40)]  # in the order in which they lay
        assert np.array_equal(ctx.kv.read_v(1)[: len(places)], v[places])
        assert contents(ctx.kv, 0) == held


def test_shift_and_sort_in_one_update(small: kvg.Model) -> None:
    """Each cell takes its own rotated K along, and is sorted by where it now stands."""
    options = {"n_ctx": 128, "n_seq_max": 2, "type_k": "f32"}
    with open_context(small, **options) as ctx, open_context(small, **options) as apart:
        for each in (ctx, apart):
            fill(each, 2, 80)
            each.kv.seq_add(1, 20, 30, 300)
        apart.kv.update()
        expected = [contents(apart.kv, seq) for seq in range(2)]
        before = layout(ctx.kv)
        ctx.kv.defrag("sort")
        stats = ctx.kv.update()
        assert stats.shifted_cells == 10
        assert stats.moved_cells > 0
        assert layout(ctx.kv) == promised(before)
        assert [contents(ctx.kv, seq) for seq in range(2)] == expected


def test_sort_at_the_next_decode_and_once(small: kvg.Model) -> None:
    with open_context(small, n_ctx=128, n_seq_max=2, defrag_threshold=-1) as ctx:
        fill(ctx, 2, 60)
        before = layout(ctx.kv)
        ctx.kv.defrag("sort")
        decode(ctx, [Token(5, 46, (0,))])
        assert layout(ctx.kv) == [*promised(before)[:76], ((0,), 46), *[None] * 51]
        decode(ctx, [Token(5, 46, (1,)), Token(6, 47, (0,))])
        assert layout(ctx.kv)[76:79] == [((0,), 46), ((1,), 46), ((0,), 47)]
        stats = ctx.kv.take_stats()
        assert stats.moved_cells > 0
        assert ctx.kv.take_stats().moved_cells == 0


def test_the_last_policy_asked_for_is_done(small: kvg.Model) -> None:
    with open_context(small, n_ctx=128, n_seq_max=2, defrag_threshold=-1) as ctx:
        fill(ctx, 2, 60)
        before = ctx.kv.cells()
        ctx.kv.defrag("sort")
        ctx.kv.defrag("fill")
        ctx.kv.update()
        assert same_cells(ctx.kv.cells(), before)  # there was no hole


def test_a_sorted_cache_is_attended_in_part(small: kvg.Model) -> None:
    """A sequence attends its own run, and not those of the others."""
    if not where.is_cpu():
        pytest.skip("spans are wider on devices")
    n_seq, n_each = 4, 128
    with open_context(small, n_ctx=n_seq * n_each + n_seq, n_seq_max=n_seq, defrag_threshold=-1) as ctx:
        for i in range(n_each):
            decode(ctx, [Token(3 + i, i, (seq,), logits=False) for seq in range(n_seq)])
        decode(ctx, [Token(5, n_each, (0,))])
        assert ctx.kv.n_attended > (n_seq - 1) * n_each
        ctx.kv.seq_rm(0, n_each, -1)
        ctx.kv.defrag("sort")
        ctx.kv.update()
        ctx.kv.seq_rm(3, n_each - 1, -1)  # the next token goes right behind the last run
        decode(ctx, [Token(5, n_each - 1, (3,))])
        assert ctx.kv.n_attended <= n_each + 32  # 32: the CPU's alignment


def test_sort_in_several_steps(wide: kvg.Model) -> None:
    """More rows than the scratch holds at once: cells on their way to their places may move twice."""
    n, n_seq = 400, 3
    with open_context(wide, n_ctx=n, n_batch=n, n_seq_max=n_seq, type_k="f32", type_v="f32") as ctx:
        rng = np.random.default_rng(7)
        ends = [0] * n_seq
        tokens = []
        for seq, token in zip(rng.integers(0, n_seq, n - 20), random_ids(n - 20, N_VOCAB), strict=True):
            tokens.append(Token(token, ends[seq], (int(seq),), logits=False))
            ends[seq] += 1
        decode(ctx, tokens)
        ctx.kv.seq_rm(1, 30, 60)
        held = [contents(ctx.kv, seq) for seq in range(n_seq)]
        before = layout(ctx.kv)
        ctx.kv.defrag("sort")
        stats = ctx.kv.update()
        assert stats.graphs >= 3
        assert layout(ctx.kv) == promised(before)
        assert [contents(ctx.kv, seq) for seq in range(n_seq)] == held


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_eight_sequences_that_go_their_own_ways(model_file: ModelFile, kv_type: str) -> None:
    """A shared prefix, each sequence shifted by its own amount, round by round, compacted in turns."""
    n_seq, n_prefix, n_rounds = 8, 32, 20 if where.is_cpu() else 6
    everyone = range(n_seq)

    def scenario(engine: Apart | OurEngine) -> Logits:
        engine.decode(run_of(random_ids(n_prefix, N_VOCAB), 0, tuple(everyone)))
        ends = [n_prefix] * n_seq
        rows = []
        for turn in range(n_rounds):
            ids = random_ids(4 * n_seq, N_VOCAB, 1 + turn)
            rows.append(
                engine.decode(
                    [Token(ids[4 * seq + i], ends[seq] + i, (seq,)) for i in range(4) for seq in everyone]
                )
            )
            for seq in everyone:
                n_gone = 1 + (seq + turn) % 4
                p0 = 4 + seq
                engine.seq_rm(seq, p0, p0 + n_gone)
                engine.seq_add(seq, p0 + n_gone, -1, -n_gone)
                ends[seq] += 4 - n_gone
            if isinstance(engine, OurEngine):
                engine.ctx.kv.defrag("fill" if turn % 2 else "sort")
                engine.ctx.kv.update()
                check_compact(engine.ctx.kv, "fill" if turn % 2 else "sort")
        return np.concatenate(rows)

    judge_sharing(model_file(SMALL), scenario, everyone, kv_type=kv_type, repeated=True)


def check_compact(kv: kvg.KVCache, policy: str) -> None:
    if policy == "sort":
        check_runs(kv)
    assert kv.n_kv == kv.n_used
