"""Every operation in any order on a full group and one with a window, against both in plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal

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
from support.faults import fault
from support.models import N_VOCAB, SMALL, ModelSpec
from support.naive_cells import NaiveCells, Refusals
from support.naive_windows import NaivePair

import pykvgraph as kvg

N_CELLS, N_SEQ, N_BATCH, W = 60, 3, 7, 5
N_WINDOW = N_SEQ * W + N_BATCH
RUNS, STEPS_PER_RUN = 420, 60

seqs = st.integers(0, N_SEQ - 1)
any_seqs = st.sampled_from([*range(N_SEQ)] * 5 + [-1, N_SEQ])
positions = st.sampled_from([0, 0, 1, 3, 5, 8, 11, 14, 18, 23, 30, 40, -1])
ends = st.sampled_from([-1, -1, -1, 2, 4, 7, 10, 15, 20, 28, 50])
gaps = st.sampled_from([0, 0, 0, 0, 1, 3, 9])


class WindowsMachine(RuleBasedStateMachine):
    """A context with both groups, and their model, which must never differ."""

    model: ClassVar[kvg.Model]
    counts: ClassVar[Counter[str]] = Counter()

    @initialize(
        lengths=st.lists(st.integers(0, 25), min_size=1, max_size=N_SEQ),
        n_more=st.sampled_from([0, W, 3 * W]),
    )
    def open(self, lengths: list[int], n_more: int) -> None:
        """n_more: cells for checkpoints."""
        self.ctx = open_context(
            self.model,
            n_ctx=N_CELLS,
            n_batch=N_BATCH,
            n_ubatch=4,
            n_seq_max=N_SEQ,
            checkpoint_cells=n_more,
            defrag_threshold=-1,
        )
        self.pair = NaivePair(N_CELLS, N_WINDOW + n_more, N_SEQ, W)
        self.holds: list[kvg.Hold] = []
        self.pending: str | None = None
        for seq, length in enumerate(lengths):
            for begin in range(0, length, N_BATCH):
                self.try_decode(run_of([5] * min(N_BATCH, length - begin), begin, (seq,)))

    def teardown(self) -> None:
        if hasattr(self, "ctx"):
            self.ctx.close()

    def call(self, refusals: Refusals, function: Callable[..., object], *arguments: object) -> None:
        if refusals:
            with pytest.raises(refusals):
                function(*arguments)
        else:
            function(*arguments)
        self.counts[f"{function.__name__} {refusals[0].__name__ if refusals else 'done'}"] += 1

    @rule(seq=seqs, n=st.integers(1, N_BATCH), gap=gaps)
    def append(self, seq: int, n: int, gap: int) -> None:
        self.try_decode(run_of([5] * n, self.pair.full.pos_max(seq) + 1 + gap, (seq,)))

    @rule(group=st.sets(seqs, min_size=1), n=st.integers(1, N_BATCH))
    def append_together(self, group: set[int], n: int) -> None:
        last = max(self.pair.full.pos_max(seq) for seq in group)
        self.try_decode(run_of([5] * n, last + 1, tuple(sorted(group))))

    def try_decode(self, tokens: list[Token]) -> None:
        refusals = self.pair.check_batch(tokens, N_BATCH, N_VOCAB)
        self.counts[f"decode {refusals[0].__name__ if refusals else 'done'}"] += 1
        if refusals:
            with pytest.raises(refusals):
                decode(self.ctx, tokens)
            return
        decode(self.ctx, tokens)
        self.settle()
        self.pair.put(tokens)

    def settle(self) -> None:
        for group in self.groups():
            if self.pending == "fill":
                group.fill()
            elif self.pending == "sort":
                group.sort()
            group.rotate()
        self.pending = None

    def groups(self) -> list[NaiveCells]:
        return [self.pair.full, self.pair.window]

    @rule(seq=any_seqs, p0=positions, p1=ends)
    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        self.call(self.pair.seq_rm(seq, p0, p1), self.ctx.kv.seq_rm, seq, p0, p1)

    @rule(seq=seqs, back=st.integers(1, 12))
    def go_back(self, seq: int, back: int) -> None:
        p0 = max(0, self.pair.full.pos_max(seq) + 1 - back)
        self.call(self.pair.seq_rm(seq, p0, -1), self.ctx.kv.seq_rm, seq, p0, -1)

    @rule(src=any_seqs, dst=any_seqs, p0=positions, p1=ends)
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        self.call(self.pair.seq_cp(src, dst, p0, p1), self.ctx.kv.seq_cp, src, dst, p0, p1)

    @rule(src=seqs, dst=seqs)
    def fork(self, src: int, dst: int) -> None:
        """What programs do: a sequence becomes a copy of another."""
        if src != dst:
            self.call(self.pair.seq_rm(dst, 0, -1), self.ctx.kv.seq_rm, dst, 0, -1)
            self.call(self.pair.seq_cp(src, dst, 0, -1), self.ctx.kv.seq_cp, src, dst, 0, -1)

    @rule(seq=any_seqs)
    @precondition(lambda self: len(self.pair.full.used) > N_CELLS * 3 // 4)
    def seq_keep(self, seq: int) -> None:
        self.call(self.pair.seq_keep(seq), self.ctx.kv.seq_keep, seq)

    @rule(seq=any_seqs, p0=positions, p1=ends, delta=st.integers(-12, 12))
    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        if self.pair.full.pos_max(seq) < 300:
            self.seq_add_checked(seq, p0, p1, delta)

    @rule(seq=any_seqs, p0=positions, p1=ends, d=st.integers(0, 3))
    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        self.call(self.pair.seq_div(seq, p0, p1, d), self.ctx.kv.seq_div, seq, p0, p1, d)

    @rule(seq=seqs, n_keep=st.integers(0, 4), n_discard=st.integers(1, 20))
    def shift(self, seq: int, n_keep: int, n_discard: int) -> None:
        """Old positions go and the later ones move down."""
        end = n_keep + n_discard
        if self.pair.full.pos_max(seq) >= end:
            refusals = self.pair.seq_rm(seq, n_keep, end)
            self.call(refusals, self.ctx.kv.seq_rm, seq, n_keep, end)
            if not refusals:
                self.seq_add_checked(seq, end, -1, -n_discard)

    def seq_add_checked(self, *arguments: int) -> None:
        before = {c.name: c.p for c in self.pair.checkpoints}
        self.call(self.pair.seq_add(*arguments), self.ctx.kv.seq_add, *arguments)
        self.counts["checkpoints moved"] += any(c.p != before[c.name] for c in self.pair.checkpoints)

    @rule(seq=any_seqs, p0=positions, p1=ends)
    def hold(self, seq: int, p0: int, p1: int) -> None:
        refusals = self.pair.hold(len(self.holds), seq, p0, p1)
        if refusals:
            with pytest.raises(refusals):
                self.ctx.kv.hold(seq, p0, p1)
        else:
            self.holds.append(self.ctx.kv.hold(seq, p0, p1))

    @rule(hold=st.integers(0, 100), seq=any_seqs)
    @precondition(lambda self: self.holds)
    def attach(self, hold: int, seq: int) -> None:
        hold %= len(self.holds)
        self.call(self.pair.attach(hold, seq), self.ctx.kv.attach, self.holds[hold], seq)

    @rule(hold=st.integers(0, 100))
    @precondition(lambda self: self.holds)
    def release(self, hold: int) -> None:
        hold %= len(self.holds)
        self.call(self.pair.release(hold), self.holds[hold].release)

    @rule(seq=any_seqs)
    def checkpoint(self, seq: int) -> None:
        self.call(self.pair.checkpoint(seq), self.ctx.kv.checkpoint, seq)

    @rule(seq=seqs, n=st.integers(1, N_BATCH))
    def checkpoint_and_go_on(self, seq: int, n: int) -> None:
        """So that most of what it holds is held by nothing else soon."""
        self.checkpoint(seq)
        for _ in range(3):
            self.append(seq, n, 0)

    @rule(seq=seqs, back=st.integers(0, 40))
    def rewind(self, seq: int, back: int) -> None:
        p = self.pair.pos_max(seq) + 1 - back
        assert self.ctx.kv.rewind(seq, p) == self.pair.rewind(seq, p)

    @rule(which=st.integers(0, 100), less=st.integers(0, 2), rewinds=st.booleans())
    @precondition(lambda self: self.pair.checkpoints)
    def go_back_to_a_checkpoint(self, which: int, less: int, rewinds: bool) -> None:
        known = self.pair.checkpoints[which % len(self.pair.checkpoints)]
        seq, p = known.seq, max(1, known.p - less)
        far = not self.pair.window.can_go_on(seq, p)
        if rewinds:
            there = self.pair.rewind(seq, p)
            assert self.ctx.kv.rewind(seq, p) == there
        else:
            refusals = self.pair.seq_rm(seq, p, -1)
            self.call(refusals, self.ctx.kv.seq_rm, seq, p, -1)
            there = -1 if refusals else p
        self.counts["back to a checkpoint"] += far and there == p

    @rule(seq=any_seqs)
    def resume_point(self, seq: int) -> None:
        refusals = self.pair.resume_point(len(self.holds), seq)
        if refusals:
            with pytest.raises(refusals):
                self.ctx.kv.resume_point(seq)
        else:
            self.holds.append(self.ctx.kv.resume_point(seq))

    @rule(seq=seqs, delta=st.integers(-12, 12))
    def seq_add_lately(self, seq: int, delta: int) -> None:
        """What the window still has moves, and nothing before it."""
        self.seq_add_checked(seq, max(0, self.pair.pos_min(seq)), -1, delta)

    @rule(policy=st.sampled_from(["fill", "sort"]))
    def defrag(self, policy: Literal["fill", "sort"]) -> None:
        self.ctx.kv.defrag(policy)
        self.pending = policy

    @rule()
    def update(self) -> None:
        self.ctx.kv.update()
        self.settle()

    @rule(seq=seqs, to=seqs)
    def save_and_load(self, seq: int, to: int) -> None:
        """Into the same sequence: all is as it was, in other cells perhaps, so what is compared is sorted."""
        blob = self.ctx.kv.save(seq)
        options = {"n_ctx": N_CELLS, "n_batch": N_BATCH, "n_seq_max": N_SEQ, "checkpoint_cells": 3 * W}
        with open_context(self.model, **options) as other:
            other.kv.load(blob, to)
            for index, group in enumerate(self.groups()):
                view = other.kv.cells(index)
                assert sorted(view.pos[view.seq[:, to]]) == sorted(cell.pos for cell in group.of(seq))
            assert other.kv._lost(1, to) == self.pair.window.lost_of(seq)
            assert other.kv.seq_pos_min(to) == self.pair.pos_min(seq)
        for group in self.groups():
            group.rotate()
        self.counts["loads"] += 1

    @rule()
    @precondition(lambda self: len(self.pair.full.used) > N_CELLS * 9 // 10)
    def clear(self) -> None:
        self.ctx.kv.clear()
        self.pair.clear()
        self.pending = None

    @invariant()
    def same_cells(self) -> None:
        if not hasattr(self, "ctx"):
            return
        self.counts["steps"] += 1
        kv = self.ctx.kv
        for index, group in enumerate(self.groups()):
            view = kv.cells(index)
            assert view.pos.tolist() == [cell.pos if cell else -1 for cell in group.cells]
            assert view.shift.tolist() == [cell.shift if cell else 0 for cell in group.cells]
            assert view.held.tolist() == [len(cell.holds) if cell else 0 for cell in group.cells]
            masks = view.seq @ (1 << np.arange(N_SEQ))
            assert masks.tolist() == [sum(1 << s for s in cell.seqs) if cell else 0 for cell in group.cells]
        for seq in range(N_SEQ):
            lost = self.pair.window.lost_of(seq)
            assert kv._lost(1, seq) == lost
            assert self.pair.window.lost.get(seq, set()) == {
                cell.pos for cell in self.pair.full.of(seq) if cell.pos <= lost
            }
            assert kv.checkpoints(seq) == self.pair.positions(seq)
            assert kv.seq_pos_max(seq) == self.pair.full.pos_max(seq)
            assert kv.seq_pos_min(seq) == self.pair.pos_min(seq)
            last = self.pair.full.pos_max(seq)
            wanted = {c.pos for c in self.pair.full.of(seq) if c.pos > last + 1 - W}
            if self.pair.window.can_go_on(seq, last + 1):  # what the next token attends to is there
                assert wanted == {c.pos for c in self.pair.window.of(seq) if c.pos > last + 1 - W}
        assert kv.n_free == N_CELLS - len(self.pair.full.used)
        self.counts["checkpoints"] += bool(self.pair.checkpoints)
        self.counts["lost"] += any(self.pair.window.lost.values())


@pytest.mark.slow
def test_a_window_against_the_naive_one(model_file: Callable[[ModelSpec], Path]) -> None:
    WindowsMachine.counts.clear()
    limits = settings(max_examples=RUNS, stateful_step_count=STEPS_PER_RUN)
    with (
        fault("window", W),
        kvg.Model(model_file(SMALL), device=where.device) as WindowsMachine.model,
    ):
        run_state_machine_as_test(WindowsMachine, settings=limits)
    counts = WindowsMachine.counts
    assert counts["steps"] >= 20_000
    assert counts["lost"] >= counts["steps"] // 4
    assert min(counts["seq_rm InvalidArgumentError"], counts["seq_add UnsupportedError"]) >= 50
    assert min(counts["back to a checkpoint"], counts["checkpoints moved"]) >= 40
    assert min(counts["decode done"], counts["seq_add done"], counts["seq_div done"], counts["loads"]) >= 100
