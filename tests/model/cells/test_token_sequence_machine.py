"""A TokenSequence against two lists: its tokens, and their positions. Hypothesis chooses what is done."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support import chance, where
from support.architectures import ArchSpec
from support.engines import open_context
from support.judge import nmse
from support.soak import F32

import pykvgraph as kvg
from pykvgraph.sequence.sequence import TokenSequence

N_CELLS = 96
TOKENS = st.lists(st.integers(3, 40), min_size=1, max_size=20)
SHARE = st.floats(0, 1)  # of what there is to choose among


class Lists(RuleBasedStateMachine):
    """n_true: the first so many tokens have seen all that is before them, and nothing else."""

    model: kvg.Model

    def __init__(self) -> None:
        super().__init__()
        self.ctx = open_context(self.model, n_ctx=N_CELLS, n_batch=16, **F32)
        self.text = TokenSequence(self.ctx)
        self.ids: list[int] = []
        self.pos: list[int] = []
        self.n_true = math.inf

    def teardown(self) -> None:
        self.ctx.close()

    def follow(self, ids: list[int]) -> None:
        """These come behind the others."""
        begin = self.pos[-1] + 1 if self.pos else 0
        self.ids += ids
        self.pos += range(begin, begin + len(ids))

    def stay(self, n: int) -> None:
        """The first n stay; tokens on one position go together."""
        while 0 < n < len(self.pos) and self.pos[n - 1] == self.pos[n]:
            n -= 1
        del self.ids[n:], self.pos[n:]
        if n <= self.n_true:
            self.n_true = math.inf

    def check(self, last: kvg.context.context.LastOutput) -> None:
        """The logits are those of a context that reads this text alone, where such a context exists."""
        if self.n_true == math.inf:
            with open_context(self.model, n_ctx=N_CELLS, **F32) as alone:
                batch = kvg.Batch()
                batch.extend(self.ids, 0)
                assert nmse(last.logits, alone.decode_last(batch)) <= 1e-6

    @rule(share=SHARE, more=TOKENS)
    def set(self, share: float, more: list[int]) -> None:
        n = round(share * len(self.ids))
        wanted = [*self.ids[:n], *more][:N_CELLS]
        n_common = 0
        while n_common < min(len(wanted), len(self.ids)) and wanted[n_common] == self.ids[n_common]:
            n_common += 1
        change = self.text.set(wanted)
        self.stay(min(n_common, len(wanted) - 1))
        n_kept = len(self.ids)
        self.follow(wanted[n_kept:])
        assert (change.n_common, change.n_kept, change.n_decoded) == (n_common, n_kept, len(wanted) - n_kept)
        self.check(change.last)

    @precondition(lambda self: len(self.ids) < N_CELLS)
    @rule(token=st.integers(3, 40))
    def append(self, token: int) -> None:
        last = self.text.append(token)
        self.follow([token])
        self.check(last)

    @rule(more=TOKENS)
    def something_else_appends(self, more: list[int]) -> None:
        more = more[: min(16, N_CELLS - len(self.ids))]
        if more:
            batch = kvg.Batch()
            batch.extend(more, self.ctx.kv.seq_pos_max(0) + 1)
            self.ctx.decode(batch)
            self.text.record(more)
            self.follow(more)

    @precondition(lambda self: len(self.ids) > 2)
    @rule(first=SHARE, second=SHARE)
    def discard(self, first: float, second: float) -> None:
        begin = round(first * (len(self.ids) - 2))
        end = begin + 1 + round(second * (len(self.ids) - 2 - begin))
        if any(n and self.pos[n] == self.pos[n - 1] for n in (begin, end)):
            with pytest.raises(kvg.InvalidArgumentError, match="share the position"):
                self.text.discard(begin, end)
            return
        self.text.discard(begin, end)
        distance = self.pos[end] - self.pos[begin]
        self.pos[begin:] = [position - distance for position in self.pos[end:]]
        del self.ids[begin:end]
        self.n_true = min(self.n_true, begin)

    @precondition(lambda self: len(self.ids) > 4)
    @rule(first=SHARE, second=SHARE, n_grp=st.integers(2, 4))
    def group(self, first: float, second: float, n_grp: int) -> None:
        shared = [n for n in range(1, len(self.pos)) if self.pos[n] == self.pos[n - 1]]
        least = shared[-1] + 1 if shared else 0
        if least >= len(self.ids) - 1:
            return
        begin = least + round(first * (len(self.ids) - 2 - least))
        end = begin + 1 + round(second * (len(self.ids) - 1 - begin))
        self.text.group(begin, end, n_grp)
        before = self.pos[begin]
        self.pos[begin:end] = [before + j // n_grp for j in range(end - begin)]
        n_behind = len(self.pos) - end
        self.pos[end:] = [self.pos[end - 1] + 1 + j for j in range(n_behind)]
        self.n_true = min(self.n_true, begin)

    @rule(share=SHARE)
    def go_back(self, share: float) -> None:
        n = round(share * len(self.ids))
        n_left = self.text.go_back(n)
        self.stay(n)
        assert n_left == len(self.ids)

    @precondition(lambda self: self.ids)
    @rule(more=TOKENS)
    def somebody_clears_the_cache(self, more: list[int]) -> None:
        """All of it is decoded again."""
        self.ctx.kv.clear()
        change = self.text.set(more)
        self.ids, self.pos, self.n_true = [], [], math.inf
        self.follow(more)
        assert change.n_kept == 0
        self.check(change.last)

    @rule()
    def what_can_not_be_changes_nothing(self) -> None:
        with pytest.raises(kvg.InvalidArgumentError):
            self.text.set([])
        with pytest.raises(kvg.CacheFullError):
            self.text.set([5] * (N_CELLS + 1))
        with pytest.raises(kvg.InvalidArgumentError):
            self.text.discard(0, len(self.ids) + 1)

    @invariant()
    def is_as_the_lists(self) -> None:
        assert self.text.ids.tolist() == self.ids
        assert [self.text.positions.of(n) for n in range(len(self.ids))] == self.pos
        view = self.ctx.kv.cells()
        assert sorted(view.pos[view.seq[:, 0]].tolist()) == self.pos
        assert self.ctx.kv.n_used == len(self.ids)


@pytest.fixture(scope="module")
def model(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(ArchSpec("llama", 2, 32, 2, 1, 16, 32)), device=where.device) as model:
        yield model


def test_against_two_lists(model: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lists, "model", model, raising=False)
    n = 300 // chance.SHARE
    run_state_machine_as_test(Lists, settings=settings(max_examples=n, stateful_step_count=40))
