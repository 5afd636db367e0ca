"""Looking at K and V: whose rows they are, and how far they may be from fresh ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

import pykvgraph as kvg
from support import where
from support.engines import Token, decode

Rows = npt.NDArray[np.float32]  # (n_rows, n_head_kv, head_dim)

# What ggml's angles and the cache's type cost a rotated K, relative to the largest value.
ROUNDING = {"f32": 1e-5, "f16": 2e-3}
ANGLE = 8e-8  # per position


def allowed_drift(fresh: Rows, kv_type: str, top: int, n_updates: int = 1) -> float:
    """How far K may be from `fresh` after `n_updates` rotations at positions up to `top`."""
    slack, rounding = 1, ROUNDING[kv_type]
    if not where.is_cpu():
        slack = 10  # the sines of other makers
        rounding = max(rounding, ROUNDING["f16"])  # CUDA multiplies F32 by F32 as TF32, with F16's 10 bits
    return float(slack * np.abs(fresh).max() * (rounding + ANGLE * top) * np.sqrt(n_updates))


def fresh_k(ctx: kvg.Context, tokens: Iterable[Token]) -> Rows:
    """Layer 0's K of tokens decoded where they stand, in their order. Clears the context.

    Layer 0's K depends on nothing but the token and its position, so any sequence will do.
    """
    tokens = list(tokens)
    ctx.kv.clear()
    decode(ctx, tokens)
    cells = ctx.kv.cells()
    keys = [(token.pos, token.seq_ids) for token in tokens]
    places = {(int(cells.pos[i]), seqs_of(cells, i)): i for i in np.flatnonzero(cells.pos >= 0)}
    return ctx.kv.read_k(0)[[places[key] for key in keys]]


def seqs_of(cells: kvg.CellsView, index: SupportsIndex) -> tuple[int, ...]:
    """The sequences that see a cell, in order."""
    return tuple(int(seq) for seq in np.flatnonzero(cells.seq[index]))


def cells_at(kv: kvg.KVCache, positions: Iterable[int]) -> list[int]:
    """The cells of positions that occur once each."""
    pos = kv.cells().pos
    return [int(np.flatnonzero(pos == p).item()) for p in positions]


def same_cells(one: kvg.CellsView, other: kvg.CellsView) -> bool:
    """Whether positions, sequences, pending shifts and dithers are equal, cell by cell."""
    names = ("pos", "seq", "shift", "dither")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


Contents = Counter[tuple[int, int, bytes]]


def contents(kv: kvg.KVCache, seq: int) -> Contents:
    """What a sequence sees: of each group its positions, each with the bytes of K and V, in no order."""
    found: Contents = Counter()
    for index, group in enumerate(kv.groups):
        tensors = [rows for layer in group.layers for rows in (kv.read_k(layer), kv.read_v(layer))]
        cells = kv.cells(index)
        for i in np.flatnonzero(cells.seq[:, seq]):
            found[index, int(cells.pos[i]), b"".join(rows[i].tobytes() for rows in tensors)] += 1
    return found
