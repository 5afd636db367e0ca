"""Random edits of models of each row: what is decoded then is what a fresh context says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support import where
from support.arch_table import Edited, Record, leave
from support.architectures import ArchSpec
from support.chance import THOROUGH
from support.edits_at_random import N_SEQ, Editor
from support.engines import open_context
from support.kinds import LATER_ROWS, ROWS

import pykvgraph as kvg

Architecture = Callable[[ArchSpec], Path]

W, N_BATCH = 8, 9
N_STEPS = 800 if THOROUGH else 300
N_QUICK = 60  # with seed 8 every edit is among them
F32 = {"type_k": "f32", "type_v": "f32"}
# Edits change what a token once saw, so no layer's K and V may depend on another layer's attention: of two
# layers with cells one is silent. Gemma 4's last two have no cells, and read those of both. No expert is
# chosen, because a rounding may choose another one.
HYBRIDS = [
    ArchSpec("gemma2", 2, window=W),
    ArchSpec("gemma3", 2, window=W, scaling="linear"),
    ArchSpec("gpt-oss", 2, window=W, n_expert=2, scaling="yarn"),
    ArchSpec("gemma3n", 2, window=W),
    ArchSpec("gemma4", 2, window=W, head_dim_window=16, n_head_kv_window=4),
    ArchSpec("gemma4", 4, window=W, head_dim_window=64, n_shared=2, n_embd_layer=16, silent=(0, 1)),
]
FILES = [
    replace(spec, silent=spec.silent or (layer,))
    for spec in HYBRIDS
    for layer in range(1 if spec.silent else 2)
]


@pytest.mark.slow
@pytest.mark.parametrize("swa_full", [False, True], ids=["bounded", "swa_full"])
@pytest.mark.parametrize("spec", FILES, ids=str)
def test_logits_are_a_fresh_contexts(
    architecture: Architecture, spec: ArchSpec, swa_full: bool, record_property: Record
) -> None:
    path = architecture(spec)
    editor = edit(path, swa_full, seed=FILES.index(spec), n_steps=N_STEPS)
    leave(record_property, path, Edited(editor.worst))
    counts = editor.counts
    for name in ("append", "copy", "shift", "move_a_part", "remove", "go_back", "rewind", "attach", "load"):
        assert counts[f"{name} done"] >= (5 if THOROUGH else 1), counts
    assert swa_full or min(counts["lost"], counts["rewound to a checkpoint"]) >= 1, counts


@pytest.mark.parametrize("spec", ROWS + LATER_ROWS, ids=str)
def test_logits_of_rows_are_a_fresh_contexts(
    architecture: Architecture, spec: ArchSpec, record_property: Record
) -> None:
    """Sequences that are shifted, shared, compacted, saved and loaded."""
    path = architecture(spec)
    editor = edit(path, False, seed=8, n_steps=N_STEPS if THOROUGH else N_QUICK)
    leave(record_property, path, Edited(editor.worst))
    counts = editor.counts
    moves = () if spec.arch in ("gpt2", "starcoder") else ("shift",)
    for name in ("append", "copy", *moves, "share", "attach", "save", "load", "defrag"):
        assert counts[f"{name} done"] >= (5 if THOROUGH else 1), counts


def edit(path: Path, swa_full: bool, seed: int, n_steps: int) -> Editor:
    """That many random edits."""
    with (
        kvg.Model(path, device=where.device) as model,
        open_context(
            model,
            n_ctx=256,
            n_batch=N_BATCH,
            n_ubatch=5,
            n_seq_max=N_SEQ,
            checkpoint_cells=3 * W,
            swa_full=swa_full,
            **F32,
        ) as ctx,
        open_context(model, n_ctx=256, **F32, swa_full=True) as fresh,
    ):
        editor = Editor(ctx, fresh, W, seed)
        for _ in range(n_steps):
            editor.step()
        return editor
