"""GPT-2 has learned an embedding of each position: K and V are made with it, and nothing moves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.architectures import ArchSpec
from support.engines import decode, open_context, random_ids, run_of
from support.models import N_VOCAB

import pykvgraph as kvg

N_POSITIONS = 64
IDS = random_ids(N_POSITIONS + 1, N_VOCAB)


@pytest.fixture(scope="module")
def model(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    spec = ArchSpec("gpt2", 1, head_dim=16, n_head_kv=4, fused=True, n_ctx_train=N_POSITIONS)
    with kvg.Model(architecture(spec), device="cpu") as opened:
        yield opened


@pytest.mark.parametrize("change", ["seq_add", "seq_div"])
def test_positions_stay(model: kvg.Model, change: str) -> None:
    with open_context(model, n_ctx=128, n_seq_max=2) as ctx:
        decode(ctx, run_of(IDS[:20]))
        ctx.kv.seq_cp(0, 1, 0, -1)
        before = ctx.kv.cells()
        with pytest.raises(kvg.UnsupportedError, match=rf"{change}: this model has learned an embedding"):
            getattr(ctx.kv, change)(0, 4, -1, 3)
        after = ctx.kv.cells()
        assert np.array_equal(before.pos, after.pos) and np.array_equal(before.seq, after.seq)
        assert not ctx.kv.can_shift
        with pytest.raises(kvg.UnsupportedError):
            kvg.ContextShift(n_keep=2).apply(ctx.kv)


def test_a_position_that_was_not_learned(model: kvg.Model) -> None:
    with open_context(model, n_ctx=128) as ctx:
        with pytest.raises(kvg.InvalidArgumentError, match=r"token 64 .* position 64; .* positions 0 to 63"):
            decode(ctx, run_of(IDS))
        assert ctx.kv.n_used == 0
        decode(ctx, run_of(IDS[:N_POSITIONS]))
        with pytest.raises(kvg.InvalidArgumentError):
            ctx.append(IDS[-1], seq=0)
        assert ctx.kv.n_used == N_POSITIONS


def test_an_engine_goes_on_with_the_others(model: kvg.Model) -> None:
    greedy = kvg.SamplingParams(max_tokens=30, temperature=0)
    with kvg.Engine(model, n_ctx=256, n_seq_max=2, background=False) as engine:
        long, short = engine.submit(IDS[:50], greedy), engine.submit(IDS[:10], greedy)
        assert len(short.result().tokens) == 30
        with pytest.raises(kvg.InvalidArgumentError, match="position 64"):
            long.result()
