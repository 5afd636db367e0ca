"""Where K is a latent, V is the first part of it, and takes no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.architectures import ArchSpec
from support.engines import decode, open_context, random_ids, run_of
from support.models import N_VOCAB

import pykvgraph as kvg

RANK, N_BEHIND, N_LAYER = 96, 32, 2
IDS = random_ids(60, N_VOCAB)


SPEC = ArchSpec(
    "deepseek2", N_LAYER, 64, 4, 1, 64, n_expert=4, n_ff_shared=96, rank=RANK, n_behind=N_BEHIND, q_rank=40
)


@pytest.fixture(scope="module")
def model(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(SPEC), device="cpu") as opened:
        yield opened


# bytes of the 32 numbers of a block
@pytest.mark.parametrize(("kind", "block"), [("f32", 128), ("f16", 64), ("q8_0", 34), ("q4_0", 18)])
def test_bytes(model: kvg.Model, kind: str, block: int) -> None:
    with open_context(model, n_ctx=256, type_k=kind, type_v=kind) as ctx:
        assert ctx.kv.bytes == 256 * N_LAYER * (RANK + N_BEHIND) // 32 * block


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_saved_cells_are_the_same(model: kvg.Model, kind: str) -> None:
    with (
        open_context(model, n_ctx=128, type_k=kind, type_v=kind) as ctx,
        open_context(model, n_ctx=128, type_k=kind, type_v=kind) as other,
    ):
        decode(ctx, run_of(IDS[:40]))
        other.kv.load(ctx.kv.save(0), 0)
        expected = decode(ctx, run_of(IDS[40:], 40))
        assert np.array_equal(decode(other, run_of(IDS[40:], 40)), expected)


def test_there_is_no_v_to_read(model: kvg.Model) -> None:
    with open_context(model, n_ctx=128) as ctx:
        decode(ctx, run_of(IDS))
        assert ctx.kv.read_k(0).shape == (128, 1, RANK + N_BEHIND)
        with pytest.raises(kvg.InvalidArgumentError, match=f"no V of its own: it is the first {RANK} dim"):
            ctx.kv.read_v(0)


def test_a_latent_of_odd_width_is_refused(architecture: Callable[[ArchSpec], Path]) -> None:
    """ggml would end the process: its rope begins at even dimensions."""
    with pytest.raises(kvg.UnsupportedError, match="a latent of 95; rope rotates pairs"):
        kvg.Model(architecture(replace(SPEC, rank=95)), device="cpu")
