"""Every operation in any order on several sequences, against cells in plain Python; K and V too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

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
from support.engines import Token, decode, open_context, run_of
from support.kv_rows import ROUNDING, allowed_drift, fresh_k, seqs_of
from support.models import N_VOCAB
from support.naive_cells import Cell, NaiveCells, Refusals

import pykvgraph as kvg

N_CELLS, N_SEQ, N_BATCH = 24, 4, 9
TOKENS = range(3, 11)
MAX_POS = 400  # far enough: angles at larger positions are test_shift's business

seqs = st.integers(0, N_SEQ - 1)
any_seqs = st.integers(-2, N_SEQ)
bounds = st.integers(-2, 60)


class CellsMachine(RuleBasedStateMachine):
    """A context and its model in Python, which must never differ."""

    model: ClassVar[kvg.Model]
    fresh: ClassVar[kvg.Context]  # for K and V of tokens decoded where they stand
    k_rows: ClassVar[dict[tuple[str, int, int], Any]] = {}
    v_rows: ClassVar[dict[str, Any]] = {}
    n_steps: ClassVar[int] = 0
    n_looks: ClassVar[int] = 0
    n_moves: ClassVar[int] = 0

    @initialize(
        threshold=st.sampled_from([-1.0, 0.1, 0.5]),
        kv_type=st.sampled_from(["f32", "f16"]),
        lengths=st.lists(st.integers(0, N_BATCH), min_size=1, max_size=N_SEQ),
    )
    def open(self, threshold: float, kv_type: str, lengths: list[int]) -> None:
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
        self.defrag_pending = False
        for seq, length in enumerate(lengths):
            self.try_decode([Token(TOKENS[i % len(TOKENS)], i, (seq,)) for i in range(length)])

    def teardown(self) -> None:
        if hasattr(self, "ctx"):
            self.ctx.close()

    def call(self, refusals: Refusals, function: Callable[..., object], *arguments: object) -> None:
        """Calls ours, which must refuse just when the naive one did."""
        if refusals:
            with pytest.raises(refusals):
                function(*arguments)
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
        compacts = self.defrag_pending or (self.threshold >= 0 and holes > np.float32(self.threshold) * n_kv)
        logits = decode(self.ctx, tokens)
        assert logits.shape == (len(tokens), N_VOCAB)
        assert np.isfinite(logits).all()
        self.naive.rotate()
        if compacts:
            self.defrag_pending = False
            self.adopt_moves()
        self.adopt_tokens(tokens)

    def adopt_tokens(self, tokens: list[Token]) -> None:
        """Where ours put them is its own affair, as long as the cells were empty."""
        cells = self.ctx.kv.cells()
        taken = [i for i, cell in enumerate(self.naive.cells) if cell is None and cells.pos[i] >= 0]
        places = {(int(cells.pos[i]), seqs_of(cells, i)): i for i in taken}
        assert places.keys() == {(token.pos, token.seq_ids) for token in tokens}
        for token in tokens:
            i = places[token.pos, token.seq_ids]
            self.naive.cells[i] = Cell(token.id, token.pos, frozenset(token.seq_ids), top=token.pos)

    def adopt_moves(self) -> None:
        """Used cells beyond n_used must now be in the holes before it; which of them where, V tells."""
        n_used = len(self.naive.used)
        homeless = [cell for cell in self.naive.cells[n_used:] if cell]
        self.naive.cells[n_used:] = [None] * (N_CELLS - n_used)
        if homeless:
            type(self).n_moves += 1
            cells = self.ctx.kv.cells()
            tokens = self.tokens_by_v()
            for hole in [i for i in range(n_used) if self.naive.cells[i] is None]:
                key = (int(cells.pos[hole]), seqs_of(cells, hole), tokens[hole])
                found = next((c for c in homeless if (c.pos, tuple(sorted(c.seqs)), c.token) == key), None)
                assert found is not None, f"cell {hole} holds {key}, which no moved cell did"
                homeless.remove(found)
                self.naive.cells[hole] = found

    def tokens_by_v(self) -> list[int]:
        """For each cell the token whose value it holds (nonsense where it is empty)."""
        if self.kv_type not in self.v_rows:
            self.fresh.kv.clear()
            decode(self.fresh, [Token(token, i, (0,)) for i, token in enumerate(TOKENS)])
            self.v_rows[self.kv_type] = self.fresh.kv.read_v(0)[: len(TOKENS)].reshape(len(TOKENS), -1)
        known = self.v_rows[self.kv_type]
        rows = self.ctx.kv.read_v(0).reshape(N_CELLS, -1)
        distances = np.abs(rows[:, None] - known[None]).max(axis=2)  # (n_cells, n_tokens)
        nearest = distances.argmin(axis=1)
        used = [i for i, cell in enumerate(self.ctx.kv.cells().pos) if cell >= 0]
        assert (distances.min(axis=1)[used] <= ROUNDING["f16"] * np.abs(known).max()).all()
        return [TOKENS[i] for i in nearest]

    @rule(seq=any_seqs, p0=bounds, p1=bounds)
    @precondition(lambda self: len(self.naive.used) > N_CELLS // 2)
    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        self.call(self.naive.seq_rm(seq, p0, p1), self.ctx.kv.seq_rm, seq, p0, p1)

    @rule(src=any_seqs, dst=any_seqs, p0=bounds, p1=bounds)
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        self.call(self.naive.seq_cp(src, dst, p0, p1), self.ctx.kv.seq_cp, src, dst, p0, p1)

    @rule(index=st.integers(0, N_CELLS - 1), length=st.integers(1, 3), every=st.booleans())
    @precondition(lambda self: self.naive.used)
    def punch(self, index: int, length: int, every: bool) -> None:
        """A small hole where a cell is: the ranges above empty most of a sequence."""
        cell = self.naive.used[index % len(self.naive.used)]
        arguments = (-1 if every else min(cell.seqs), cell.pos, cell.pos + length)
        self.call(self.naive.seq_rm(*arguments), self.ctx.kv.seq_rm, *arguments)

    @rule(seq=any_seqs)
    @precondition(lambda self: len(self.naive.used) > N_CELLS // 2)
    def seq_keep(self, seq: int) -> None:
        self.call(self.naive.seq_keep(seq), self.ctx.kv.seq_keep, seq)

    @rule(seq=any_seqs, p0=bounds, p1=bounds, delta=st.integers(-12, 20))
    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        if self.naive.pos_max(seq) < MAX_POS:
            self.call(self.naive.seq_add(seq, p0, p1, delta), self.ctx.kv.seq_add, seq, p0, p1, delta)

    @rule(seq=any_seqs, p0=bounds, p1=bounds, divisor=st.integers(0, 4))
    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        self.call(self.naive.seq_div(seq, p0, p1, divisor), self.ctx.kv.seq_div, seq, p0, p1, divisor)

    @rule(data=st.booleans())
    @precondition(lambda self: len(self.naive.used) > N_CELLS * 3 // 4)
    def clear(self, data: bool) -> None:
        self.ctx.kv.clear(data)
        self.naive.clear()
        self.defrag_pending = False

    @rule()
    def defrag(self) -> None:
        self.ctx.kv.defrag("fill")
        self.defrag_pending = True

    @rule()
    def sort(self) -> None:
        with pytest.raises(kvg.UnsupportedError):
            self.ctx.kv.defrag("sort")

    @rule()
    def update(self) -> None:
        misplaced = self.naive.n_misplaced if self.defrag_pending else 0
        stats = self.ctx.kv.update()
        assert stats.shifted_cells == self.naive.rotate()
        assert stats.moved_cells == misplaced
        assert (stats.graphs > 0) == (stats.shifted_cells + stats.moved_cells > 0)
        if self.defrag_pending:
            self.defrag_pending = False
            self.adopt_moves()
            assert self.ctx.kv.n_kv == self.ctx.kv.n_used

    @rule()
    @precondition(lambda self: self.naive.used)
    def look(self) -> None:
        """Every cell holds its own token's V, and K as if decoded where it now stands."""
        type(self).n_looks += 1
        k = self.ctx.kv.read_k(0)  # rotates what is pending
        self.naive.rotate()
        tokens = self.tokens_by_v()
        for i, cell in enumerate(self.naive.cells):
            if cell:
                assert tokens[i] == cell.token
                expected = self.fresh_row(cell.token, cell.pos)
                drift = allowed_drift(expected, self.kv_type, cell.top, max(1, cell.rotations))
                assert np.abs(k[i] - expected).max() <= drift

    def fresh_row(self, token: int, pos: int) -> Any:
        key = (self.kv_type, token, pos)
        if key not in self.k_rows:
            self.k_rows[key] = fresh_k(self.fresh, [Token(token, pos)])[0]
        return self.k_rows[key]

    @invariant()
    def same_cells(self) -> None:
        if not hasattr(self, "ctx"):
            return
        type(self).n_steps += 1
        kv = self.ctx.kv
        cells = kv.cells()
        expected = [cell or Cell(0, -1, frozenset()) for cell in self.naive.cells]
        assert cells.pos.tolist() == [cell.pos for cell in expected]
        assert cells.shift.tolist() == [cell.shift for cell in expected]
        assert [set(seqs_of(cells, i)) for i in range(N_CELLS)] == [cell.seqs for cell in expected]
        assert (kv.n_cells, kv.n_used, kv.n_kv) == (N_CELLS, len(self.naive.used), self.naive.n_kv)
        for seq in range(N_SEQ):
            assert kv.seq_pos_min(seq) == self.naive.pos_min(seq)
            assert kv.seq_pos_max(seq) == self.naive.pos_max(seq)


def test_cells_against_the_naive_ones(tiny: kvg.Model) -> None:
    CellsMachine.model = tiny
    with open_context(tiny, n_ctx=16, type_k="f32", type_v="f32") as CellsMachine.fresh:
        run_state_machine_as_test(CellsMachine, settings=settings(max_examples=320, stateful_step_count=50))
    # else the machine idles, and proves nothing
    assert CellsMachine.n_steps >= 10_000
    assert CellsMachine.n_looks >= 300
    assert CellsMachine.n_moves >= 100
