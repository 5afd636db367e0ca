"""Every operation of a cache in any order, beside naive cells: what all state machines share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, Protocol

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import pykvgraph as kvg
from pykvgraph.context.forgetting import runs_of
from support.engines import Token, decode, repair, run_of
from support.models import N_VOCAB
from support.naive_cells import Cell, NaiveCells, Refusals

TOKENS = range(3, 11)

# mostly what does something: of ranges drawn evenly, few would meet a cell
SEQS = st.runner().flatmap(lambda machine: st.integers(0, machine.n_seq - 1))
ANY_SEQS = st.runner().flatmap(
    lambda machine: st.sampled_from([*range(machine.n_seq)] * 4 + [-1, machine.n_seq])
)
FIRSTS = st.sampled_from([0, 0, 0, -1, 1, 2, 3, 4, 5, 6, 8, 10, 13, 17, 25, 40])
ENDS = st.sampled_from([-1, -1, -1, 0, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 60])
GAPS = st.sampled_from([0, 0, 0, 0, 1, 3, 9])
TEXTS = st.runner().flatmap(
    lambda machine: st.lists(st.sampled_from(TOKENS), min_size=1, max_size=machine.n_batch)
)


class Naive(Protocol):
    """What is told to the naive cells as it is to ours. Names of holds are their indices in `holds`."""

    @property
    def used(self) -> list[Cell]: ...
    def pos_min(self, seq: int) -> int: ...
    def pos_max(self, seq: int) -> int: ...
    def check_batch(self, tokens: Sequence[Token], n_batch: int, n_vocab: int) -> Refusals: ...
    def put(self, tokens: Sequence[Token]) -> None: ...
    def check_repair(self, tokens: Sequence[Token]) -> Refusals: ...
    def seq_rm(self, seq: int, p0: int, p1: int) -> Refusals: ...
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> Refusals: ...
    def seq_keep(self, seq: int) -> Refusals: ...
    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> Refusals: ...
    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> Refusals: ...
    def hold(self, name: int, seq: int, p0: int, p1: int) -> Refusals: ...
    def held_at(self, name: int) -> tuple[int, int] | None: ...
    def attach(self, name: int, seq: int) -> Refusals: ...
    def release(self, name: int) -> Refusals: ...
    def clear(self) -> None: ...


class CacheMachine(RuleBasedStateMachine):
    """A context and its naive cells, which must never differ. A subclass opens both."""

    model: ClassVar[kvg.Model]
    counts: ClassVar[Counter[str]]  # each subclass has its own
    n_cells: ClassVar[int]
    n_batch: ClassVar[int]
    n_seq: ClassVar[int]
    max_pos: ClassVar[int]  # beyond it nothing is moved up
    # how much of the cache must be used before what may empty most of it is tried
    share_for_rm: ClassVar[float]
    share_for_keep: ClassVar[float] = 3 / 4
    share_for_clear: ClassVar[float] = 7 / 8

    ctx: kvg.Context
    naive: Naive
    holds: list[kvg.Hold]  # released ones too
    pending: str | None  # the defrag that was asked for

    def groups(self) -> list[NaiveCells]:
        """The naive cells of each group; of one where all groups have the same."""
        raise NotImplementedError

    def start(self, ctx: kvg.Context, naive: Naive) -> None:
        self.ctx, self.naive = ctx, naive
        self.holds, self.pending = [], None

    def teardown(self) -> None:
        if hasattr(self, "ctx"):
            self.ctx.close()

    def uses(self, share: float) -> bool:
        return len(self.naive.used) >= share * self.n_cells

    def call(self, refusals: Refusals, function: Callable[..., object], *arguments: object) -> None:
        """Calls ours, which must refuse just when the naive one did."""
        if refusals:
            with pytest.raises(refusals):
                function(*arguments)
        else:
            function(*arguments)
        self.counts[f"{function.__name__} {refusals[0].__name__ if refusals else 'done'}"] += 1

    def change(self, op: str, *arguments: int) -> bool:
        """An operation on sequences, on the naive cells and on ours. Whether it was done."""
        refusals: Refusals = getattr(self.naive, op)(*arguments)
        self.call(refusals, getattr(self.ctx.kv, op), *arguments)
        return not refusals

    def reposition(self, op: str, *arguments: int) -> None:
        self.change(op, *arguments)

    @rule(seq=SEQS, ids=TEXTS, gap=GAPS)
    def append(self, seq: int, ids: list[int], gap: int) -> None:
        """What every program does: the sequence goes on."""
        self.try_decode(run_of(ids, self.naive.pos_max(seq) + 1 + gap, (seq,)))

    def try_decode(self, tokens: list[Token]) -> None:
        refusals = self.naive.check_batch(tokens, self.n_batch, N_VOCAB)
        policy = self.policy_of_decode()
        self.call(refusals, decode, self.ctx, tokens)
        if not refusals:
            self.counts["shared decodes"] += any(len(token.seq_ids) > 1 for token in tokens)
            logits = self.ctx.logits()
            assert logits.shape == (len(tokens), N_VOCAB)
            assert np.isfinite(logits).all()
            self.settle(policy)
            self.naive.put(tokens)

    @rule(
        seq=SEQS, ids=TEXTS, first=st.integers(0, 60), step=st.sampled_from([1, 1, 2]), by_all=st.booleans()
    )
    def repair(self, seq: int, ids: list[int], first: int, step: int, by_all: bool) -> None:
        """Tokens in the middle of a text; by_all: of all texts that share the first cell."""
        shared = [cell for cell in self.naive.used if seq in cell.seqs and len(cell.seqs) > 1]
        seqs: tuple[int, ...] = (seq,)
        if by_all and shared:
            cell = shared[first % len(shared)]
            first, seqs = cell.pos, tuple(sorted(cell.seqs))
        else:
            first %= self.naive.pos_max(seq) + 2
        tokens = [Token(token, first + step * i, seqs) for i, token in enumerate(ids)]
        refusals = self.naive.check_repair(tokens)
        policy = self.policy_of_decode()
        self.call(refusals, repair, self.ctx, tokens)
        if not refusals:
            assert np.isfinite(self.ctx.logits()).all()
            self.settle(policy)
            self.put_again(tokens)
            self.counts["repaired by several"] += len(seqs) > 1

    def put_again(self, tokens: list[Token]) -> None:
        """What was repaired, on the naive cells."""
        self.naive.put(tokens)

    def policy_of_decode(self) -> str | None:
        """The defrag that a decode would begin with."""
        return self.pending

    def settle(self, policy: str | None) -> tuple[int, int]:
        """What defrag and K-shift do to the naive cells: how many cells are moved, and how many rotated."""
        if policy:
            self.pending = None
        n_moved = sum(self.compact(group, policy) for group in self.groups())
        return n_moved, sum(group.rotate() for group in self.groups())

    def compact(self, group: NaiveCells, policy: str | None) -> int:
        if policy is None:
            return 0
        n_sets = len({cell.seqs for cell in group.used})
        n_moved = group.fill() if policy == "fill" else group.sort()
        self.counts[policy] += n_moved > 0
        self.counts["sorts of many sets"] += policy == "sort" and n_moved > 0 and n_sets > 3
        return n_moved

    @rule(seq=ANY_SEQS, p0=FIRSTS, p1=ENDS, singly=st.sampled_from([False, False, False, True]))
    @precondition(lambda self: self.uses(self.share_for_rm))
    def seq_rm(self, seq: int, p0: int, p1: int, singly: bool) -> None:
        """singly: some positions of the range, each without its neighbours, all at once."""
        places = np.arange(max(p0, 0), p1 if p1 >= 0 else self.naive.pos_max(seq), 2)[:3]
        if not singly or not 0 <= seq < self.n_seq or not len(places):
            self.change("seq_rm", seq, p0, p1)
            return
        refusals: Refusals = ()
        if places[-1] >= self.naive.pos_max(seq):
            refusals = (kvg.InvalidArgumentError,)
        else:
            for run in runs_of(places):
                assert not self.naive.seq_rm(seq, run.start, run.stop)
        self.call(refusals, self.ctx.kv._seq_rm_at, seq, places)

    @rule(src=ANY_SEQS, dst=ANY_SEQS, p0=FIRSTS, p1=ENDS)
    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        self.change("seq_cp", src, dst, p0, p1)

    @rule(seq=ANY_SEQS)
    @precondition(lambda self: self.uses(self.share_for_keep))
    def seq_keep(self, seq: int) -> None:
        self.change("seq_keep", seq)

    @rule(seq=ANY_SEQS, p0=FIRSTS, p1=ENDS, delta=st.integers(-12, 20))
    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        if self.naive.pos_max(seq) < self.max_pos:
            self.reposition("seq_add", seq, p0, p1, delta)

    @rule(seq=ANY_SEQS, p0=FIRSTS, p1=ENDS, divisor=st.integers(0, 4))
    def seq_div(self, seq: int, p0: int, p1: int, divisor: int) -> None:
        self.reposition("seq_div", seq, p0, p1, divisor)

    @rule(seq=ANY_SEQS, p0=FIRSTS, p1=ENDS)
    def hold(self, seq: int, p0: int, p1: int) -> None:
        self.try_hold(seq, p0, p1)

    def try_hold(self, seq: int, p0: int, p1: int) -> None:
        self.take(self.naive.hold(len(self.holds), seq, p0, p1), self.ctx.kv.hold, seq, p0, p1)

    def take(self, refusals: Refusals, function: Callable[..., kvg.Hold], *arguments: int) -> None:
        """A hold, or a resume point."""
        self.counts["holds"] += not refusals
        if refusals:
            with pytest.raises(refusals):
                function(*arguments)
        else:
            hold = function(*arguments)
            assert (hold.p0, hold.p1) == self.naive.held_at(len(self.holds))
            self.holds.append(hold)

    @rule(hold=st.integers(0, 1000), seq=ANY_SEQS, fits=st.sampled_from([True, True, True, False]))
    @precondition(lambda self: self.holds)
    def attach(self, hold: int, seq: int, fits: bool) -> None:
        """To any sequence; or one that wasn't released, to a sequence that it fits if there is one."""
        names = [name for name in range(len(self.holds)) if fits and self.naive.held_at(name)]
        name = names[hold % len(names)] if names else hold % len(self.holds)
        p0 = self.holds[name].p0
        where = [s for s in range(self.n_seq) if fits and self.naive.pos_max(s) + 1 == p0]
        seq = where[seq % len(where)] if where else seq
        if not self.may_attach(name, seq):
            return
        refusals = self.naive.attach(name, seq)
        self.counts["attached"] += not refusals
        self.counts["attached at an end"] += not refusals and p0 > 0
        self.call(refusals, self.ctx.kv.attach, self.holds[name], seq)

    def may_attach(self, name: int, seq: int) -> bool:
        """False where nothing is promised of what comes of it."""
        return True

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
    @precondition(lambda self: self.uses(self.share_for_clear))
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
        n_alike = len(self.ctx.kv.groups) // len(self.groups())
        n_moved, n_rotated = self.settle(self.pending)
        assert (stats.moved_cells, stats.shifted_cells) == (n_alike * n_moved, n_alike * n_rotated)
        assert (stats.graphs > 0) == (n_moved + n_rotated > 0)
        assert not asked or all(group.n_kv == group.n_used for group in self.ctx.kv.groups)

    @invariant()
    def same_cells(self) -> None:
        if not hasattr(self, "ctx"):
            return
        self.counts["steps"] += 1
        kv, groups, seqs = self.ctx.kv, self.groups(), range(self.n_seq)
        for index in range(len(kv.groups)):
            self.same_cells_in(index, groups[min(index, len(groups) - 1)])
        self.counts["cells only held"] += any(not cell.seqs for group in groups for cell in group.used)
        assert (kv.n_cells, kv.n_used, kv.n_kv) == (self.n_cells, len(groups[0].used), groups[0].n_kv)
        assert kv.n_free == self.n_cells - kv.n_used
        bounds = kv.seq_bounds()
        for known, pos, naive in (
            (bounds.pos_min, kv.seq_pos_min, self.naive.pos_min),
            (bounds.pos_max, kv.seq_pos_max, self.naive.pos_max),
        ):
            assert known.tolist() == [pos(seq) for seq in seqs] == [naive(seq) for seq in seqs]
        assert bounds.n_cells.tolist() == [len(groups[0].of(seq)) for seq in seqs]

    def same_cells_in(self, index: int, group: NaiveCells) -> None:
        """index: of the group of ours."""
        view = self.ctx.kv.cells(index)
        expected = [cell or Cell(0, -1, frozenset()) for cell in group.cells]
        assert view.pos.tolist() == [cell.pos for cell in expected]
        assert view.shift.tolist() == [cell.shift for cell in expected]
        assert view.dither.tolist() == [cell.dither for cell in expected]
        assert view.held.tolist() == [len(cell.holds) for cell in expected]
        masks = view.seq @ (1 << np.arange(self.n_seq))
        assert masks.tolist() == [sum(1 << seq for seq in cell.seqs) for cell in expected]
