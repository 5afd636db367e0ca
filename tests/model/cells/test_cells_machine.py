"""Every operation in any order on several sequences, against cells in plain Python; K and V too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support import where
from support.engines import Token, decode, open_context, run_of
from support.kv_rows import ROUNDING, Rows, allowed_drift, fresh_k
from support.models import N_VOCAB, TWO_GROUPS, ModelSpec
from support.naive_cells import Cell, NaiveCells, Refusals

import pykvgraph as kvg

N_CELLS, N_SEQ, N_BATCH = 24, 4, 9
TOKENS = range(3, 11)
MAX_POS = 400  # far enough: angles at larger positions are test_shift's business
MAX_RUNS, STEPS_PER_RUN, MIN_STEPS = 460, 75, 20_000

# mostly what does something: of ranges drawn evenly, few would meet a cell
seqs = st.integers(0, N_SEQ - 1)
any_seqs = st.sampled_from([*range(N_SEQ)] * 4 + [-1, N_SEQ])
firsts = st.sampled_from([0, 0, 0, -1, 1, 2, 3, 4, 5, 6, 8, 10, 13, 17, 25, 40])
ends = st.sampled_from([-1, -1, -1, 0, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 60])


class CellsMachine(RuleBasedStateMachine):
    """A context and its model in Python, which must never differ."""

    model: ClassVar[kvg.Model]
    fresh: ClassVar[kvg.Context]  # for K and V of tokens decoded where they stand
    k_rows: ClassVar[dict[tuple[str, int, int], Any]] = {}
    v_rows: ClassVar[dict[str, Any]] = {}
    counts: ClassVar[Counter[str]] = Counter()

    @initialize(
        threshold=st.sampled_from([-1.0, 0.1, 0.5]),
        kv_type=st.sampled_from(["f32", "f16"]),
        n_shared=st.integers(0, N_BATCH),
        lengths=st.lists(st.integers(0, N_BATCH), min_size=1, max_size=N_SEQ),
    )
    def open(self, threshold: float, kv_type: str, n_shared: int, lengths: list[int]) -> None:
        """A context, with some tokens in it: hypothesis leaves rules out, decode too, for whole runs."""
        self.kv_type = kv_type
        self.threshold = threshold
        self.ctx = open_context(
            self.model,
            n_ctx=N_CELLS,
            n_batch=N_BATCH,
            n_ubatch=4,
            n_seq_max=N_SEQ,
            type_k=kv_type,
            type_v=kv_type,
            defrag_threshold=threshold,
        )
        self.naive = NaiveCells(N_CELLS, N_SEQ)
        self.holds: list[kvg.Hold] = []  # released ones too; the naive cells know them by index
        self.pending: str | None = None  # the defrag that was asked for
        ids = [TOKENS[i % len(TOKENS)] for i in range(N_BATCH)]
        self.try_decode(run_of(ids[:n_shared], 0, tuple(range(len(lengths)))))
        for seq, length in enumerate(lengths):
            self.try_decode(run_of(ids[:length], n_shared, (seq,)))
        if n_shared + lengths[0] > 0:
            self.try_hold(0, 0, max(n_shared, 1))
            self.try_hold(0, max(n_shared, 1), -1)
        self.counts["steps"] -= 1  # the invariant counts this as one

    def teardown(self) -> None:
        if hasattr(self, "ctx"):
            self.look_at_k_and_v()
            self.ctx.close()

    def call(self, refusals: Refusals, function: Callable[..., object], *arguments: object) -> None:
        """Calls ours, which must refuse just when the naive one did."""
        if refusals:
            with pytest.raises(refusals):
                function(*arguments)
            self.counts[f"{function.__name__} {refusals[0].__name__}"] += 1
        else:
            function(*arguments)

    @rule(
        seq=seqs,
        tokens=st.lists(st.sampled_from(TOKENS), min_size=1, max_size=N_BATCH),
        gap=st.integers(0, 3),
    )
    def append(self, seq: int, tokens: list[int], gap: int) -> None:
        """What every program does: the sequence goes on."""
        self.try_decode([*run_of(tokens, self.naive.pos_max(seq) + 1 + gap, (seq,))])

    @rule(
        groups=st.lists(st.sets(any_seqs, min_size=1, max_size=3), min_size=1, max_size=2),
        steps=st.lists(
            st.tuples(st.sampled_from(TOKENS), st.integers(0, 1), st.integers(0, 4)), max_size=N_BATCH + 1
        ),
        stale=st.sampled_from([0] * 9 + [1]),
    )
    def decode(self, groups: list[set[int]], steps: list[tuple[int, int, int]], stale: int) -> None:
        """One or two groups of sequences in turn, with gaps; a stale batch starts one position too early."""
        tokens: list[Token] = []
        ends = [max((self.naive.pos_max(seq) for seq in group), default=-1) - stale for group in groups]
        for token, which, gap in steps:
            which %= len(groups)
            ends[which] += 1 + gap
            tokens.append(Token(token, ends[which], tuple(sorted(groups[which]))))
        self.try_decode(tokens)

    def try_decode(self, tokens: list[Token]) -> None:
        refusals = self.naive.check_batch(tokens, N_BATCH, N_VOCAB)
        if refusals:
            with pytest.raises(refusals):
                decode(self.ctx, tokens)
            return
        n_kv, holes = self.naive.n_kv, self.naive.n_kv - len(self.naive.used)
        fragmented = self.threshold >= 0 and holes > np.float32(self.threshold) * n_kv
        self.counts["shared decodes"] += any(len(token.seq_ids) > 1 for token in tokens)
        logits = decode(self.ctx, tokens)
        assert logits.shape == (len(tokens), N_VOCAB)
        assert np.isfinite(logits).all()
        self.naive.rotate()
        self.compact(self.pending or ("fill" if fragmented else None))
        self.naive.put(tokens)

    def compact(self, policy: str | None) -> int:
        """What defrag does to the naive cells; how many of them it moves."""
        if policy is None:
            return 0
        self.pending = None
        n_sets = len({cell.seqs for cell in self.naive.used})
        n_moved = self.naive.fill() if policy == "fill" else self.naive.sort()
        self.counts[policy] += n_moved > 0
        self.counts["sorts of many sets"] += policy == "sort" and n_moved > 0 and n_sets > 3
        return n_moved

    @rule(seq=any_seqs, p0=firsts, p1=ends)
    @precondition(lambda self: len(self.naive.used) > N_CELLS // 2)
    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        self.call(self.naive.seq_rm(seq, p0, p1), self.ctx.kv.seq_rm, seq, p0, p1)

    @rule(src=any_seqs, dst=any_seqs, p0=firsts, p1=ends)
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        self.call(self.naive.seq_cp(src, dst, p0, p1), self.ctx.kv.seq_cp, src, dst, p0, p1)

    @rule(index=st.integers(0, N_CELLS - 1), length=st.integers(1, 3), every=st.booleans())
    @precondition(lambda self: self.naive.used)
    def punch(self, index: int, length: int, every: bool) -> None:
        """A small hole where a cell is: the ranges above empty most of a sequence."""
        cell = self.naive.used[index % len(self.naive.used)]
        arguments = (-1 if every else min(cell.seqs, default=0), cell.pos, cell.pos + length)
        self.call(self.naive.seq_rm(*arguments), self.ctx.kv.seq_rm, *arguments)

    @rule(seq=any_seqs)
    @precondition(lambda self: len(self.naive.used) > N_CELLS * 3 // 4)
    def seq_keep(self, seq: int) -> None:
        self.call(self.naive.seq_keep(seq), self.ctx.kv.seq_keep, seq)

    @rule(seq=any_seqs, p0=firsts, p1=ends, delta=st.integers(-12, 20))
    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        if self.naive.pos_max(seq) < MAX_POS:
            self.reposition(self.naive.seq_add, self.ctx.kv.seq_add, seq, p0, p1, delta)

    @rule(seq=any_seqs, p0=firsts, p1=ends, divisor=st.integers(0, 4))
    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        self.reposition(self.naive.seq_div, self.ctx.kv.seq_div, seq, p0, p1, divisor)

    @rule(
        index=st.integers(0, N_CELLS - 1),
        delta=st.integers(-3, 9),
        to_the_end=st.booleans(),
        divides=st.sampled_from([False, False, True]),
    )
    @precondition(lambda self: any(len(cell.seqs) > 1 for cell in self.naive.used))
    def part(self, index: int, delta: int, to_the_end: bool, divides: bool) -> None:
        """One of the sequences that see a cell moves it, and perhaps all that comes after it."""
        shared = [cell for cell in self.naive.used if len(cell.seqs) > 1]
        cell = shared[index % len(shared)]
        seq = sorted(cell.seqs)[index % len(cell.seqs)]
        p1 = -1 if to_the_end else cell.pos + 1
        if divides:
            self.reposition(self.naive.seq_div, self.ctx.kv.seq_div, seq, cell.pos, p1, 2)
        elif self.naive.pos_max(seq) < MAX_POS:
            arguments = (seq, cell.pos, p1, delta)
            self.reposition(self.naive.seq_add, self.ctx.kv.seq_add, *arguments)

    def reposition(
        self, naive: Callable[..., Refusals], function: Callable[..., None], *arguments: int
    ) -> None:
        n_used, n_free = len(self.naive.used), N_CELLS - len(self.naive.used)
        self.call(naive(*arguments), function, *arguments)
        self.counts["copies"] += len(self.naive.used) > n_used
        self.counts["copies that take the last cell"] += len(self.naive.used) == n_used + n_free > n_used

    @rule(seq=any_seqs, p0=firsts, p1=ends)
    def hold(self, seq: int, p0: int, p1: int) -> None:
        self.try_hold(seq, p0, p1)

    @rule(index=st.integers(0, N_CELLS - 1), length=st.integers(1, 5))
    @precondition(lambda self: any(cell.seqs for cell in self.naive.used))
    def hold_from_a_cell(self, index: int, length: int) -> None:
        """What can nearly always be held: ranges drawn evenly mostly have gaps."""
        seen = [cell for cell in self.naive.used if cell.seqs]
        cell = seen[index % len(seen)]
        self.try_hold(min(cell.seqs), cell.pos, cell.pos + length)

    @rule(hold=st.integers(0, 1000), seq=seqs)
    @precondition(lambda self: self.naive.held)
    def hold_what_comes_after(self, hold: int, seq: int) -> None:
        """So that there are holds that adjoin."""
        _, p1 = list(self.naive.held.values())[hold % len(self.naive.held)]
        self.try_hold(seq, p1, -1)

    def try_hold(self, seq: int, p0: int, p1: int) -> None:
        refusals = self.naive.hold(len(self.holds), seq, p0, p1)
        self.counts["holds"] += not refusals
        if refusals:
            with pytest.raises(refusals):
                self.ctx.kv.hold(seq, p0, p1)
            return
        hold = self.ctx.kv.hold(seq, p0, p1)
        assert (hold.p0, hold.p1) == self.naive.held[len(self.holds)]
        self.holds.append(hold)

    @rule(hold=st.integers(0, 1000), seq=any_seqs, fits=st.sampled_from([True, True, True, False]))
    @precondition(lambda self: self.naive.held)
    def attach(self, hold: int, seq: int, fits: bool) -> None:
        """To any sequence, or to one that the hold fits if there is one."""
        name = list(self.naive.held)[hold % len(self.naive.held)]
        where = [s for s in range(N_SEQ) if fits and self.naive.pos_max(s) + 1 == self.naive.held[name][0]]
        seq = where[seq % len(where)] if where else seq
        refusals = self.naive.attach(name, seq)
        self.counts["attached"] += not refusals
        self.counts["attached at an end"] += not refusals and self.naive.held[name][0] > 0
        self.call(refusals, self.ctx.kv.attach, self.holds[name], seq)

    @rule(hold=st.integers(0, 1000), collected=st.booleans())
    @precondition(lambda self: self.holds)
    def release(self, hold: int, collected: bool) -> None:
        """By hand, or by the garbage collector; a released one too."""
        name = hold % len(self.holds)
        refusals = self.naive.release(name)
        self.counts["released"] += not refusals
        if collected and not refusals:
            last = self.holds[name]
            self.holds[name] = kvg.Hold(last._handle, 0, last.p0, last.p1)  # what stays is a released one
            del last  # the last reference
        else:
            self.call(refusals, self.holds[name].release)

    @rule(data=st.booleans())
    @precondition(lambda self: len(self.naive.used) > N_CELLS * 7 // 8)
    def clear(self, data: bool) -> None:
        self.ctx.kv.clear(data)
        self.naive.clear()
        self.pending = None

    @rule(policy=st.sampled_from(["fill", "sort"]))
    def defrag(self, policy: Literal["fill", "sort"]) -> None:
        self.ctx.kv.defrag(policy)
        self.pending = policy

    @rule()
    def update(self) -> None:
        asked = self.pending is not None
        stats = self.ctx.kv.update()
        n_groups = len(self.ctx.kv.groups)  # each does the same
        assert stats.shifted_cells == n_groups * self.naive.rotate()
        assert stats.moved_cells == n_groups * self.compact(self.pending)
        assert (stats.graphs > 0) == (stats.shifted_cells + stats.moved_cells > 0)
        assert not asked or self.ctx.kv.n_kv == self.ctx.kv.n_used

    @rule()
    def look(self) -> None:
        self.look_at_k_and_v()

    def look_at_k_and_v(self) -> None:
        """Every cell holds its own token's V, and K as if decoded where it now stands."""
        places = [i for i, cell in enumerate(self.naive.cells) if cell]
        if not places:
            return
        k = self.ctx.kv.read_k(0)[places]  # rotates what is pending
        self.naive.rotate()
        cells = self.naive.used
        assert self.tokens_by_v(places) == [cell.token for cell in cells]
        expected = [self.fresh_row(cell.token, cell.pos) for cell in cells]
        drifts = [
            allowed_drift(row, self.kv_type, cell.top, max(1, cell.rotations))
            for row, cell in zip(expected, cells, strict=True)
        ]
        assert (np.abs(k - np.stack(expected)).max(axis=(1, 2)) <= drifts).all()
        self.counts["looks"] += 1

    def tokens_by_v(self, places: list[int]) -> list[int]:
        """For each of these cells the token whose value it holds."""
        if self.kv_type not in self.v_rows:
            self.fresh.kv.clear()
            decode(self.fresh, [Token(token, i, (0,)) for i, token in enumerate(TOKENS)])
            self.v_rows[self.kv_type] = self.fresh.kv.read_v(0)[: len(TOKENS)].reshape(len(TOKENS), -1)
        known = self.v_rows[self.kv_type]
        rows = self.ctx.kv.read_v(0)[places].reshape(len(places), -1)
        distances = np.abs(rows[:, None] - known[None]).max(axis=2)  # (n_places, n_tokens)
        assert (distances.min(axis=1) <= ROUNDING["f16"] * np.abs(known).max()).all()
        return [TOKENS[i] for i in distances.argmin(axis=1)]

    def fresh_row(self, token: int, pos: int) -> Rows:
        key = (self.kv_type, token, pos)
        if key not in self.k_rows:
            self.k_rows[key] = fresh_k(self.fresh, [Token(token, pos)])[0]
        row: Rows = self.k_rows[key]
        return row

    @invariant()
    def same_cells(self) -> None:
        if not hasattr(self, "ctx"):
            return
        self.counts["steps"] += 1
        kv = self.ctx.kv
        for group in range(len(kv.groups)):
            self.same_cells_in(group)
        self.counts["cells only held"] += any(cell and not cell.seqs for cell in self.naive.cells)
        assert (kv.n_cells, kv.n_used, kv.n_kv) == (N_CELLS, len(self.naive.used), self.naive.n_kv)
        for seq in range(N_SEQ):
            assert kv.seq_pos_min(seq) == self.naive.pos_min(seq)
            assert kv.seq_pos_max(seq) == self.naive.pos_max(seq)
        bounds = kv.seq_bounds()
        assert bounds.pos_min.tolist() == [self.naive.pos_min(seq) for seq in range(N_SEQ)]
        assert bounds.pos_max.tolist() == [self.naive.pos_max(seq) for seq in range(N_SEQ)]
        assert bounds.n_cells.tolist() == [len(self.naive.of(seq)) for seq in range(N_SEQ)]

    def same_cells_in(self, group: int) -> None:
        cells = self.ctx.kv.cells(group)
        expected = [cell or Cell(0, -1, frozenset()) for cell in self.naive.cells]
        assert cells.pos.tolist() == [cell.pos for cell in expected]
        assert cells.shift.tolist() == [cell.shift for cell in expected]
        assert cells.dither.tolist() == [cell.dither for cell in expected]
        masks = cells.seq @ (1 << np.arange(N_SEQ))
        assert cells.held.tolist() == [len(cell.holds) for cell in expected]
        assert masks.tolist() == [sum(1 << seq for seq in cell.seqs) for cell in expected]


@pytest.mark.slow
def test_two_groups_against_the_same_naive_ones(model_file: Callable[[ModelSpec], Path]) -> None:
    """Whatever is done, both groups have the cells of the naive model; K and V of the first are looked at."""
    CellsMachine.k_rows, CellsMachine.v_rows = {}, {}  # of this model
    CellsMachine.counts.clear()
    limits = settings(max_examples=MAX_RUNS // 8, stateful_step_count=STEPS_PER_RUN)
    with (
        kvg.Model(model_file(TWO_GROUPS), device=where.device) as CellsMachine.model,
        open_context(CellsMachine.model, n_ctx=16, type_k="f32", type_v="f32") as CellsMachine.fresh,
    ):
        run_state_machine_as_test(CellsMachine, settings=limits)
    assert CellsMachine.counts["steps"] >= MIN_STEPS // 10
    assert CellsMachine.counts["looks"] >= 50


@pytest.mark.slow
def test_cells_against_the_naive_ones(tiny: kvg.Model) -> None:
    CellsMachine.model = tiny
    CellsMachine.k_rows, CellsMachine.v_rows = {}, {}  # of this model
    CellsMachine.counts.clear()
    limits = settings(max_examples=MAX_RUNS, stateful_step_count=STEPS_PER_RUN)
    with open_context(tiny, n_ctx=16, type_k="f32", type_v="f32") as CellsMachine.fresh:
        run_state_machine_as_test(CellsMachine, settings=limits)
    counts = CellsMachine.counts
    assert counts["steps"] >= MIN_STEPS
    # else the machine idles, and proves nothing
    assert counts["looks"] >= 500
    assert min(counts["holds"], counts["attached"], counts["released"], counts["cells only held"]) >= 200
    assert counts["attached at an end"] >= 20
    assert min(counts["fill"], counts["sort"]) >= 50
    assert counts["sorts of many sets"] >= 10
    assert counts["shared decodes"] >= 50
    assert counts["copies"] >= 80
    assert counts["copies that take the last cell"] >= 10
    assert min(counts["seq_add CacheFullError"], counts["seq_div CacheFullError"]) >= 10
