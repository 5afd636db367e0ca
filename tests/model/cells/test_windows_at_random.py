"""Random operations on one layer with a window: its logits are those of the tokens in the window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support import chance, where
from support.engines import Token, decode, open_context
from support.faults import fault
from support.judge import nmse
from support.models import N_VOCAB, ModelSpec

import pykvgraph as kvg

pytestmark = pytest.mark.any_device

W, N_BATCH, N_SEQ, N_STEPS = 8, 9, 3, 250
F32 = {"type_k": "f32", "type_v": "f32"}


class Seen(NamedTuple):
    """A token where it stands now."""

    id: int
    pos: int


class Runner:
    """A context, and for each sequence the tokens that it has. What is refused changes nothing."""

    def __init__(self, ctx: kvg.Context, fresh: kvg.Context, rng: np.random.Generator) -> None:
        self.ctx, self.fresh, self.rng = ctx, fresh, rng
        self.texts: list[list[Seen]] = [[] for _ in range(N_SEQ)]
        self.floor = [0] * N_SEQ  # in a gap, a sequence may go on here and no earlier
        self.n_done = dict.fromkeys(["append", "rewind", "shift", "copy", "checkpoint", "other"], 0)

    def step(self) -> None:
        seq, kv = int(self.rng.integers(N_SEQ)), self.ctx.kv
        text = self.texts[seq]
        last = text[-1].pos if text else -1
        what = self.rng.choice(list(self.n_done), p=[0.5, 0.12, 0.12, 0.08, 0.08, 0.1])
        if what == "append":
            pos = max(last + 1, self.floor[seq])
            self.append(seq, pos + int(self.rng.choice([0, 0, 0, 2, 20])))
        elif what == "rewind" and text:
            p = kv.rewind(seq, int(self.rng.integers(max(0, last - 30), last + 2)))
            self.texts[seq] = [token for token in text if token.pos < p]
            self.floor[seq] = p
        elif what == "shift" and last > 40:
            end = int(self.rng.integers(5, last - 2 * W))
            if end <= text[0].pos or not self.allowed(lambda: kv.seq_rm(seq, 0, end)):
                return
            text = [token for token in text if token.pos >= end]
            if self.allowed(lambda: kv.seq_add(seq, end, -1, -end)):
                text = [Seen(token.id, token.pos - end) for token in text]
            self.texts[seq] = text
        elif what == "copy":
            to = (seq + 1) % N_SEQ
            kv.seq_rm(to, 0, -1)
            kv.seq_cp(seq, to, 0, -1)
            self.texts[to], self.floor[to] = list(text), self.floor[seq]
        elif what == "checkpoint" and text and last + 1 >= self.floor[seq]:
            assert kv.checkpoint(seq) in kv.checkpoints(seq)
        else:
            kv.defrag("sort" if self.rng.integers(2) else "fill")
        self.n_done[what] += 1

    def allowed(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except (kvg.UnsupportedError, kvg.CacheFullError):
            return False
        return True

    def append(self, seq: int, pos: int) -> None:
        n = int(self.rng.integers(1, N_BATCH + 1))
        tokens = [Token(int(self.rng.integers(3, N_VOCAB)), pos + i, (seq,)) for i in range(n)]
        logits = decode(self.ctx, tokens)
        self.texts[seq] += [Seen(token.id, token.pos) for token in tokens]
        self.fresh.kv.clear()
        near = [token for token in self.texts[seq] if token.pos > tokens[-1].pos - W]
        expected = decode(self.fresh, [Token(*token) for token in near])
        assert nmse(logits[-1:], expected[-1:]) <= where.rule(1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_logits_are_those_of_a_fresh_context(model_file: Callable[[ModelSpec], Path], seed: int) -> None:
    with (
        fault("window", W),
        kvg.Model(model_file(ModelSpec(n_layer=1)), device=where.device) as model,
        open_context(
            model, n_ctx=4000, n_batch=N_BATCH, n_ubatch=4, n_seq_max=N_SEQ, checkpoint_cells=3 * W, **F32
        ) as ctx,
        open_context(model, n_ctx=64, **F32) as fresh,
    ):
        assert ctx.kv.n_cells == N_SEQ * W + N_BATCH + 3 * W
        runner = Runner(ctx, fresh, np.random.default_rng(chance.number(seed)))
        for _ in range(N_STEPS):
            runner.step()
        assert min(runner.n_done.values()) >= 5
