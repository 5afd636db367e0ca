"""Every operation in any order on several sequences, against cells in plain Python; K and V too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test
from support import where
from support.cache_machine import ANY_SEQS, SEQS, TOKENS, CacheMachine
from support.chance import SHARE
from support.engines import Token, decode, open_context, run_of
from support.kv_rows import ROUNDING, Rows, allowed_drift, fresh_k
from support.models import TWO_GROUPS, ModelSpec
from support.naive_cells import NaiveCells

import pykvgraph as kvg

N_CELLS, N_SEQ, N_BATCH = 24, 4, 9
MAX_RUNS, STEPS_PER_RUN, MIN_STEPS = 460 // SHARE, 75, 20_000 // SHARE


class CellsMachine(CacheMachine):
    """Every group of the context has the same cells, and what is in them is looked at."""

    counts: ClassVar[Counter[str]] = Counter()
    n_cells, n_seq, n_batch = N_CELLS, N_SEQ, N_BATCH
    max_pos = 400  # far enough: angles at larger positions are test_shift's business
    share_for_rm = 1 / 2

    naive: NaiveCells
    fresh: ClassVar[kvg.Context]  # for K and V of tokens decoded where they stand
    k_rows: ClassVar[dict[tuple[str, int, int], Any]] = {}
    v_rows: ClassVar[dict[str, Any]] = {}

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
        ctx = open_context(
            self.model,
            n_ctx=N_CELLS,
            n_batch=N_BATCH,
            n_ubatch=4,
            n_seq_max=N_SEQ,
            type_k=kv_type,
            type_v=kv_type,
            defrag_threshold=threshold,
        )
        self.start(ctx, NaiveCells(N_CELLS, N_SEQ))
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
        super().teardown()

    def groups(self) -> list[NaiveCells]:
        return [self.naive]

    def policy_of_decode(self) -> str | None:
        n_kv, holes = self.naive.n_kv, self.naive.n_kv - len(self.naive.used)
        fragmented = self.threshold >= 0 and holes > np.float32(self.threshold) * n_kv
        return self.pending or ("fill" if fragmented else None)

    @rule(
        groups=st.lists(st.sets(ANY_SEQS, min_size=1, max_size=3), min_size=1, max_size=2),
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

    @rule(index=st.integers(0, N_CELLS - 1), length=st.integers(1, 3), every=st.booleans())
    @precondition(lambda self: self.naive.used)
    def punch(self, index: int, length: int, every: bool) -> None:
        """A small hole where a cell is: the ranges above empty most of a sequence."""
        cell = self.naive.used[index % len(self.naive.used)]
        self.change("seq_rm", -1 if every else min(cell.seqs, default=0), cell.pos, cell.pos + length)

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
            self.reposition("seq_div", seq, cell.pos, p1, 2)
        elif self.naive.pos_max(seq) < self.max_pos:
            self.reposition("seq_add", seq, cell.pos, p1, delta)

    def reposition(self, op: str, *arguments: int) -> None:
        n_used, n_free = len(self.naive.used), N_CELLS - len(self.naive.used)
        super().reposition(op, *arguments)
        self.counts["copies"] += len(self.naive.used) > n_used
        self.counts["copies that take the last cell"] += len(self.naive.used) == n_used + n_free > n_used

    @rule(index=st.integers(0, N_CELLS - 1), length=st.integers(1, 5))
    @precondition(lambda self: any(cell.seqs for cell in self.naive.used))
    def hold_from_a_cell(self, index: int, length: int) -> None:
        """What can nearly always be held: ranges drawn evenly mostly have gaps."""
        seen = [cell for cell in self.naive.used if cell.seqs]
        cell = seen[index % len(seen)]
        self.try_hold(min(cell.seqs), cell.pos, cell.pos + length)

    @rule(hold=st.integers(0, 1000), seq=SEQS)
    @precondition(lambda self: self.naive.held)
    def hold_what_comes_after(self, hold: int, seq: int) -> None:
        """So that there are holds that adjoin."""
        _, p1 = list(self.naive.held.values())[hold % len(self.naive.held)]
        self.try_hold(seq, p1, -1)

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


@pytest.mark.slow
def test_two_groups_against_the_same_naive_ones(model_file: Callable[[ModelSpec], Path]) -> None:
    """Whatever is done, both groups have the cells of the naive model; K and V of the first are looked at."""
    CellsMachine.k_rows, CellsMachine.v_rows = {}, {}  # of this model
    CellsMachine.counts.clear()
    limits = settings(max_examples=MAX_RUNS // 4, stateful_step_count=STEPS_PER_RUN)
    with (
        kvg.Model(model_file(TWO_GROUPS), device=where.device) as CellsMachine.model,
        open_context(CellsMachine.model, n_ctx=16, type_k="f32", type_v="f32") as CellsMachine.fresh,
    ):
        run_state_machine_as_test(CellsMachine, settings=limits)
    assert CellsMachine.counts["steps"] >= MIN_STEPS // 5
    assert CellsMachine.counts["looks"] >= 100 // SHARE


@pytest.mark.slow
def test_cells_against_the_naive_ones(tiny: kvg.Model) -> None:
    CellsMachine.model = tiny
    CellsMachine.k_rows, CellsMachine.v_rows = {}, {}  # of this model
    CellsMachine.counts.clear()
    limits = settings(max_examples=MAX_RUNS, stateful_step_count=STEPS_PER_RUN)
    with open_context(tiny, n_ctx=16, type_k="f32", type_v="f32") as CellsMachine.fresh:
        run_state_machine_as_test(CellsMachine, settings=limits)
    counts = Counter({name: n * SHARE for name, n in CellsMachine.counts.items()})
    assert counts["steps"] >= MIN_STEPS * SHARE
    # else the machine idles, and proves nothing
    assert counts["looks"] >= 500
    least = 100 if SHARE == 1 else 10  # in few runs
    assert min(counts["holds"], counts["attached"], counts["released"], counts["cells only held"]) >= least
    assert min(counts["shared decodes"], counts["copies"]) >= 50
    assert counts["repair done"] >= 100
    if SHARE > 1:
        return
    # what is rare is a tenth as often by some seeds as by others
    assert min(counts["fill"], counts["sort"]) >= 1
    assert min(counts["attached at an end"], counts["sorts of many sets"]) >= 1
    assert min(counts["copies that take the last cell"], counts["seq_add CacheFullError"]) >= 1
    assert min(counts["seq_div CacheFullError"], counts["repaired by several"]) >= 1
