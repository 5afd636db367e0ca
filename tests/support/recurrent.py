"""Models with recurrent layers, and texts in their sequences."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any, NamedTuple, SupportsInt

import numpy as np

import pykvgraph as kvg
from pykvgraph._native.library import lib
from support import where
from support.architectures import ArchSpec
from support.engines import decode, open_context, random_ids, run_of
from support.judge import nmse
from support.models import N_VOCAB

IDS = random_ids(300, N_VOCAB)
N_BATCH = 20
OPTIONS: dict[str, Any] = {
    "n_ctx": 300,
    "n_batch": N_BATCH,
    "n_ubatch": 7,
    "n_seq_max": 4,
    "type_k": "f32",
    "type_v": "f32",
    "defrag_threshold": -1,
}
DELTA_NET = ArchSpec("qwen35", n_layer=4, period=4, state_heads=4)
WINDOWED = ArchSpec("lfm2", head_dim=16, n_layer=4, period=2, state_heads=1, n_taps=3, window=24)
MAMBA2 = ArchSpec("mamba2", n_layer=2, state_heads=8)
SPECS = [
    DELTA_NET,
    ArchSpec("lfm2", head_dim=16, n_layer=4, period=2, state_heads=1, n_taps=3),
    WINDOWED,
    ArchSpec("falcon-h1", n_layer=2, state_heads=8),
    ArchSpec("nemotron_h", n_layer=6, state_heads=8),
    ArchSpec("kimi-linear", 3, n_head_kv=1, state_heads=4, n_expert=2, n_ff_shared=96, rank=48),
    MAMBA2,
]
# as large where it counts as the models that people run: a device's kernels have these shapes
LIKE_LARGE = [
    DELTA_NET,
    ArchSpec("qwen3next", n_layer=4, period=2, state_heads=4, n_expert=2, n_ff_shared=48),
    ArchSpec("kimi-linear", 3, n_head_kv=1, state_heads=4, state_dim=32, n_expert=2, n_ff_shared=96, rank=48),
    ArchSpec("lfm2", n_embd=128, n_layer=4, period=2, state_heads=1, n_taps=3),
    ArchSpec("falcon-h1", n_layer=2, state_heads=4, state_dim=128),
    ArchSpec("nemotron_h", n_layer=6, state_heads=4, state_dim=128),
    ArchSpec("mamba2", n_layer=2, state_heads=4, state_dim=128),
]


def fill(ctx: kvg.Context, n: int, seq: int = 0, shift: int = 0) -> None:
    """The sequence goes on with IDS, from `shift` on, up to position n - 1."""
    for pos in range(ctx.kv.seq_pos_max(seq) + 1, n, N_BATCH):
        end = min(pos + N_BATCH, n)
        decode(ctx, run_of(IDS[pos + shift : end + shift], pos, (seq,)))


def go_on(ctx: kvg.Context, seq: int = 0, seed: int = 5) -> Any:
    """Logits of ten other tokens at the end of the sequence, which then has them."""
    return decode(ctx, run_of(random_ids(10, N_VOCAB, seed), ctx.kv.seq_pos_max(seq) + 1, (seq,)))


def alone(model: kvg.Model, n: int, seed: int = 5, shift: int = 0) -> Any:
    """What go_on() gives in a context of its own, after n tokens."""
    with open_context(model, **OPTIONS) as ctx:
        fill(ctx, n, shift=shift)
        return go_on(ctx, seed=seed)


def same(a: Any, b: Any) -> bool:
    return bool(nmse(a, b) <= where.rule(1e-10))


def equal(a: Any, b: Any) -> bool:
    """To the bit on the CPU; a device adds in another order where cells lie elsewhere."""
    return np.array_equal(a, b) if where.is_cpu() else same(a, b)


def state_bytes(spec: ArchSpec) -> int:
    """Of one sequence, from the shapes: in each layer the last inputs of channels, and a matrix a head."""
    n_layers = sum(spec.has_state(layer) for layer in range(spec.n_layer))
    channels = spec.n_embd
    if spec.arch not in ("lfm2", "lfm2moe"):
        heads_k = spec.state_heads if spec.arch == "kimi-linear" else spec.state_heads_k
        channels = (spec.state_heads + 2 * heads_k) * spec.state_dim
    matrices = 0 if spec.arch in ("lfm2", "lfm2moe") else spec.state_heads * spec.state_dim**2
    return n_layers * 4 * ((spec.n_taps - 1) * channels + matrices)


def read_row(ctx: kvg.Context, index: SupportsInt) -> Any:
    """The floats of one row of states."""
    out = np.empty(ctx.kv.groups[-1].cell_bytes // 4, np.float32)
    address = out.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    ctx._handle.call(lib().kvg_kv_read_state, int(index), address)
    return out


class Standing(NamedTuple):
    """All that is told of cells, states and checkpoints, but not where they lie."""

    cells: list[Counter[tuple[int, bytes, int]]]
    states: Counter[tuple[int, bytes, int, bytes]]
    checkpoints: list[list[int]]


def standing(ctx: kvg.Context) -> Standing:
    *groups, states = [ctx.kv.cells(index) for index in range(len(ctx.kv.groups))]
    return Standing(
        [
            Counter(
                (int(view.pos[i]), view.seq[i].tobytes(), int(view.held[i]))
                for i in np.flatnonzero(view.pos >= 0)
            )
            for view in groups
        ],
        Counter(
            (int(states.pos[i]), states.seq[i].tobytes(), int(states.held[i]), read_row(ctx, i).tobytes())
            for i in np.flatnonzero(states.pos >= 0)
        ),
        [ctx.kv.checkpoints(seq) for seq in range(ctx.kv.n_seq_max)],
    )
