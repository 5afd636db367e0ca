"""What cells are worth, by the definitions, one head and one layer after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import pykvgraph as kvg

Floats = npt.NDArray[np.float64]


def cells_of(ctx: kvg.Context, group: int = 0, seq: int = 0) -> list[tuple[int, int]]:
    """(position, cell) of a sequence, in the order of positions."""
    view = ctx.kv.cells(group)
    return sorted((int(view.pos[cell]), int(cell)) for cell in np.flatnonzero(view.seq[:, seq]))


def keys_of(ctx: kvg.Context, layer: int, group: int = 0, seq: int = 0) -> Floats:
    """K of a sequence's cells in the order of positions: (n_cells, n_head_kv, head_dim)."""
    return ctx.kv.read_k(layer)[[cell for _, cell in cells_of(ctx, group, seq)]].astype(np.float64)


def keydiff_of_head(keys: Floats) -> list[float]:
    """arXiv:2504.15364: minus the cosine of each key and the mean of all keys, each of length 1.

    keys: (n, head_dim)
    """
    anchor = np.mean([key / np.sqrt(key @ key) for key in keys], axis=0)
    return [-float(key @ anchor / np.sqrt((key @ key) * (anchor @ anchor))) for key in keys]


def keydiff(ctx: kvg.Context, seq: int = 0) -> Floats:
    """The mean over heads and layers."""
    of_heads = []
    for index, group in enumerate(ctx.kv.groups):
        for layer in group.layers if group.kind == "full" else ():
            k = keys_of(ctx, layer, index, seq)
            for head in range(k.shape[1]):
                of_heads.append(keydiff_of_head(k[:, head]))
    return np.asarray(np.mean(of_heads, axis=0))


def lowest(scores: Sequence[float] | Floats, n: int, n_sinks: int = 4, n_recent: int = 64) -> list[int]:
    """The numbers of the n lowest scores, but for the first ones and the last ones; rising."""
    numbers = range(n_sinks, len(scores) - n_recent)
    return sorted(sorted(numbers, key=lambda number: scores[number])[:n])


def attention(attended: Sequence[Floats], n_observed: int) -> Floats:
    """Of the last tokens, the mean over them, layers and heads. attended: of layers, (n_head, n, n)."""
    return np.asarray(np.mean([shares[:, -n_observed:].mean(axis=(0, 1)) for shares in attended], axis=0))


def snapkv(attended: Sequence[Floats], n_observed: int = 64, n_pooled: int = 5) -> Floats:
    """arXiv:2404.14469: of each head, the mean over five neighbours before the tokens that look."""
    of_heads = []
    for shares in attended:
        for head in shares:
            before = head[-n_observed:].mean(axis=0)[:-n_observed]
            padded = np.pad(before, n_pooled // 2)
            of_heads.append([padded[i : i + n_pooled].mean() for i in range(len(before))])
    return np.asarray(np.mean(of_heads, axis=0))


def kvzip(attended: Sequence[Sequence[Floats]], n: int, n_head_kv: int) -> Floats:
    """arXiv:2505.23416: the highest that any token behind the first n gives each of these, in any part.

    attended: of parts, of layers, (n_head, n + m, n + m). The mean over KV heads and layers.
    """
    peaks = []
    for layer in range(len(attended[0])):
        for head_kv in range(n_head_kv):
            group = len(attended[0][layer]) // n_head_kv
            heads = [
                part[layer][head]
                for part in attended
                for head in range(head_kv * group, (head_kv + 1) * group)
            ]
            peaks.append(np.max([head[n:, :n].max(axis=0) for head in heads], axis=0))
    return np.asarray(np.mean(peaks, axis=0))
