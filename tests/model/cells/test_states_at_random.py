"""Random operations on caches with recurrent states: rows, users and logits are those of plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support import where
from support.architectures import ArchSpec
from support.chance import THOROUGH
from support.engines import open_context
from support.states_at_random import N_SEQ, Runner

import pykvgraph as kvg

pytestmark = pytest.mark.any_device

Architecture = Callable[[ArchSpec], Path]

F32 = {"type_k": "f32", "type_v": "f32"}
LOUD = [
    ArchSpec("qwen35", n_layer=3, period=3, state_heads=4),
    ArchSpec("lfm2", head_dim=16, n_layer=4, period=2, state_heads=1, n_taps=3),
    ArchSpec("lfm2", head_dim=16, n_layer=4, period=2, state_heads=1, n_taps=3, window=6),
    ArchSpec("falcon-h1", n_layer=2, state_heads=8),
    ArchSpec("nemotron_h", n_layer=5, state_heads=8),
    ArchSpec("granitehybrid", n_layer=3, period=3, state_heads=8),
    ArchSpec("kimi-linear", 3, n_head_kv=1, state_heads=4, n_expert=2, n_ff_shared=96, rank=48),
]
# with middle removals: logits are of states alone
SILENT = [
    ArchSpec("qwen35", n_layer=3, period=3, state_heads=4, silent=(2,)),
    ArchSpec("lfm2", head_dim=16, n_layer=4, period=2, state_heads=1, n_taps=6, silent=(1, 3)),
    ArchSpec("falcon-h1", n_layer=2, state_heads=8, silent=(0, 1)),
    ArchSpec("nemotron_h", n_layer=5, state_heads=8, silent=(1, 4)),
    ArchSpec("granitehybrid", n_layer=3, period=3, state_heads=8, silent=(2,)),
    ArchSpec("mamba2", n_layer=2, state_heads=8),
]

FILES = LOUD + SILENT + [ArchSpec("nemotron_h_moe", n_layer=3, state_heads=8, n_expert=2, n_ff_shared=48)]
# a software device takes a millisecond for each row that is normalized
N_STEPS = 400 if THOROUGH else 200 if where.is_cpu() else 120


def no_attention(spec: ArchSpec) -> bool:
    return bool(spec.silent) or spec.arch == "mamba2"


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 200], ids=["few", "many"])
@pytest.mark.parametrize("spec", FILES, ids=str)
def test_all_is_as_in_plain_python(architecture: Architecture, spec: ArchSpec, rows: int) -> None:
    counts = operate(architecture(spec), no_attention(spec), rows, seed=FILES.index(spec), n_steps=N_STEPS)
    names = ["append", "append_together", "copy", "copy_a_part", "checkpoint", "rewind", "attach", "load"]
    names += ["remove", "shift", "move"] * no_attention(spec)
    never = [name for name in names if not counts[f"{name} done"]]
    assert len(never) <= 2, (never, counts)  # some seed leaves one out
    assert counts["refused"] + counts["failed"] >= 1, counts
    assert counts["evicted"] == 0 or rows == 1 or spec.window > 0, counts


def operate(path: Path, silent: bool, rows: int, seed: int, n_steps: int) -> Counter[str]:
    """So many random operations; how often each was done."""
    with kvg.Model(path, device=where.device) as model:
        with open_context(model, n_ctx=16) as ctx:
            row_bytes = ctx.kv.groups[-1].cell_bytes
        with (
            open_context(
                model,
                n_ctx=360,
                n_batch=36,
                n_ubatch=5,
                n_seq_max=N_SEQ,
                checkpoint_cells=16,
                checkpoint_bytes=rows * row_bytes,
                **F32,
            ) as ctx,
            open_context(model, n_ctx=512, swa_full=True, **F32) as fresh,
        ):
            runner = Runner(ctx, fresh, seed, silent, where.limit(1e-6))
            for _ in range(n_steps):
                runner.step()
            return runner.counts
