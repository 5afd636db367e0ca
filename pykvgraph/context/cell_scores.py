"""What cells are worth: the policies by which a sequence that has too many of them forgets some."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import flag, shown
from pykvgraph.context.context import Context
from pykvgraph.errors import InvalidArgumentError, UnsupportedError

Floats: TypeAlias = npt.NDArray[np.float64]
Peaks: TypeAlias = npt.NDArray[np.float32]  # (n positions, KV heads of all layers)
# For each group and each of its layers (n_head_kv, n_cells), in the order of the group's cells; a layer at a
# time, as K of all layers takes much memory.
HeadScores: TypeAlias = Iterator[Iterator[Floats]]

_N_OBSERVED, _N_POOLED = 64, 5  # tokens; as kvpress and the paper have them
_LEAST = 1e-12  # a vector that is shorter has no direction


class GroupCells(NamedTuple):
    """The cells of a sequence in one group, by position. cells: int64 (n_cells,), their indices.

    n_head_kv: heads of K of each layer.
    """

    number: int
    layers: tuple[int, ...]
    n_head_kv: int
    cells: npt.NDArray[np.int64]


class TextCells:
    """The cells of a sequence, in the groups of cells that keep every position.

    positions: int64 (n,), rising. n_cells: int64 (n,), how many cells each position has: one, unless several
    tokens share it. is_own: bool (n,), whether no other sequence and no hold has any of them. place_of_cell:
    int64 (n_cells,), for each cell of a group, in its order, the index of its position in `positions`.
    repeated: what peaks() told while the whole text was repeated; None: it wasn't.

    Raises UnsupportedError when there is no such group: windows and states forget by themselves.
    """

    def __init__(self, ctx: Context, seq: int) -> None:
        self.kv = kv = ctx.kv
        self._ctx = ctx
        self.repeated: Peaks | None = None
        self.groups: list[GroupCells] = []
        for index, group in enumerate(kv.groups):
            if group.kind != "full":
                continue
            view = kv.cells(index)
            cells = np.flatnonzero(view.seq[:, seq])
            cells = cells[np.argsort(view.pos[cells], kind="stable")]
            self.groups.append(GroupCells(index, group.layers, kv._group(index).n_head_kv, cells))
            if len(self.groups) == 1:
                pos = view.pos[cells].astype(np.int64)
                self.positions, self.place_of_cell, self.n_cells = np.unique(
                    pos, return_inverse=True, return_counts=True
                )
                is_shared = (view.seq[cells].sum(axis=1) > 1) | (view.held[cells] > 0)
                self.is_own = np.bincount(self.place_of_cell, is_shared, len(self.positions)) == 0
        if not self.groups:
            raise UnsupportedError(
                "every layer of this model has a window or a state, which forget by themselves: there are no "
                "cells to be forgotten"
            )

    def by_position(self, of_cells: npt.NDArray[np.floating]) -> Floats:
        """The mean of the numbers of each position's cells. of_cells: (n_cells,), in a group's order."""
        sums = np.bincount(self.place_of_cell, of_cells, len(self.positions))
        return np.asarray(sums / self.n_cells, np.float64)

    def attention(self) -> Floats:
        """What the tokens attend to that the last decode observed: of each position, its cells' share.

        The mean over tokens, layers and query heads.
        """
        total, n = np.zeros(len(self.positions)), 0
        for group in self.groups:
            shares = self._ctx.attention(group.number)[group.cells]
            total += len(group.layers) * self.by_position(shares)
            n += len(group.layers)
        return total / n

    def peaks(self) -> Peaks:
        """The highest attention that each position gets of any token which the last decode observed.

        After decode(peaks=True). Of each KV head of each layer, as Context.attention_of_heads() tells it; of
        cells that share a position, the highest.
        """
        found = []
        for group in self.groups:
            of_cells = self._ctx.attention_of_heads(group.number)[..., group.cells]
            heads = of_cells.reshape(-1, len(group.cells)).T
            if len(group.cells) > len(self.positions):
                highest = np.zeros((len(self.positions), heads.shape[1]), np.float32)
                np.maximum.at(highest, self.place_of_cell, heads)
                heads = highest
            found.append(heads)
        return np.concatenate(found, axis=1)

    def attention_of_heads(self, group: GroupCells) -> Floats:
        """As attention(), but of each cell and KV head of a group: (n_layer, n_head_kv, n_cells)."""
        return self._ctx.attention_of_heads(group.number)[..., group.cells].astype(np.float64)


def window(text: TextCells) -> Floats:
    """The position: the oldest goes, as in a context shift and in StreamingLLM (arXiv:2309.17453)."""
    return text.positions.astype(np.float64)


def keydiff(text: TextCells) -> Floats:
    """How far a K points away from the mean direction of all of them: -cos (KeyDiff, arXiv:2504.15364).

    The mean over the heads of K of all layers.
    """
    total, n = np.zeros(len(text.positions)), 0
    for layers in keydiff_of_heads(text):
        for heads in layers:
            total += text.by_position(heads.sum(axis=0))
            n += len(heads)
    return total / n


def keydiff_of_heads(text: TextCells) -> HeadScores:
    """As keydiff(), of each head of K."""
    return (
        (_keydiff_of_layer(text.kv.read_k(layer)[group.cells]) for layer in group.layers)
        for group in text.groups
    )


def _keydiff_of_layer(k: npt.NDArray[np.float32]) -> Floats:
    """k: (n_cells, n_head_kv, head_dim). Returns (n_head_kv, n_cells)."""
    scale = 1 / np.maximum(np.sqrt(np.einsum("chd,chd->hc", k, k)), _LEAST)
    mean = np.einsum("chd,hc->hd", k, scale)
    mean /= np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), _LEAST)
    return np.asarray(-np.einsum("chd,hd->hc", k, mean) * scale, np.float64)


def snapkv(text: TextCells) -> Floats:
    """The attention of the last 64 tokens, the mean over 5 neighbours (SnapKV, arXiv:2404.14469).

    Those tokens themselves are worth more than all others.
    """
    return _pooled(text.attention(), len(text.positions) - _N_OBSERVED)


def snapkv_of_heads(text: TextCells) -> HeadScores:
    """As snapkv(), of each head of K: the mean over the query heads that read it.

    Neighbours are cells in the order of positions.
    """
    n_before = int((text.place_of_cell < len(text.positions) - _N_OBSERVED).sum())
    return (
        (np.stack([_pooled(head, n_before) for head in heads]) for heads in layers)
        for layers in tova_of_heads(text)
    )


def _pooled(shares: Floats, n: int) -> Floats:
    """Of the first n shares the mean over 5 neighbours; infinity for the others, which are to stay."""
    before = shares[: max(n, 0)]
    half = _N_POOLED // 2
    pooled = np.convolve(before, np.full(_N_POOLED, 1 / _N_POOLED))[half : half + len(before)]
    return np.concatenate([pooled, np.full(len(shares) - len(before), np.inf)])


def tova(text: TextCells) -> Floats:
    """The attention of the last token (TOVA, arXiv:2401.06104)."""
    return text.attention()


def tova_of_heads(text: TextCells) -> HeadScores:
    """As tova(), of each head of K: the mean over the query heads that read it."""
    return (iter(text.attention_of_heads(group)) for group in text.groups)


def kvzip(text: TextCells) -> Floats:
    """The highest attention that a position gets while the text is repeated (KVzip, arXiv:2505.23416).

    The mean over the KV heads of all layers.
    """
    assert text.repeated is not None
    return np.asarray(text.repeated.mean(axis=1, dtype=np.float64))


def kvzip_of_heads(text: TextCells) -> HeadScores:
    """As kvzip(), of each head of K."""
    assert text.repeated is not None
    heads = text.repeated[text.place_of_cell].T.astype(np.float64)
    begin = 0
    for group in text.groups:
        end = begin + len(group.layers) * group.n_head_kv
        yield iter(np.split(heads[begin:end], len(group.layers)))
        begin = end


class Policy(NamedTuple):
    """How cells are scored; those with the lowest scores are forgotten first.

    score: a score for each position of a text, float64 (n,). of_heads: for composite cells a score for each
    cell and each head of K; None: the policy doesn't tell heads apart. n_observed: so many of the last tokens
    are decoded once more before, to see what they attend to. repeats: before, the whole text is repeated
    behind itself (repetition.py).
    """

    score: Callable[[TextCells], Floats]
    n_observed: int = 0
    repeats: bool = False
    of_heads: Callable[[TextCells], HeadScores] | None = None

    @property
    def reads(self) -> bool:
        """Whether any tokens are decoded once more."""
        return self.repeats or self.n_observed > 0


POLICIES: dict[str, Policy] = {
    "window": Policy(window),
    "keydiff": Policy(keydiff, of_heads=keydiff_of_heads),
    "snapkv": Policy(snapkv, _N_OBSERVED, of_heads=snapkv_of_heads),
    "tova": Policy(tova, 1, of_heads=tova_of_heads),
    "kvzip": Policy(kvzip, repeats=True, of_heads=kvzip_of_heads),
}


def checked_policy(name: str, *, repeats: bool = True) -> str:
    """`name`, where it is a policy's. Raises InvalidArgumentError.

    repeats: whether it may be a policy that repeats the text.
    """
    names = [each for each, policy in POLICIES.items() if repeats or not policy.repeats]
    if not isinstance(name, str) or name not in names:
        is_known = isinstance(name, str) and name in POLICIES
        why = ": a text that goes on is too full to be read once more" if is_known else ""
        raise InvalidArgumentError(f"policy must be one of {', '.join(names)}, got {shown(name)}{why}")
    return name


def checked_composite(composite: bool, policy: str) -> bool:
    """`composite`. Raises InvalidArgumentError where it is True and the policy doesn't tell heads apart."""
    if flag(composite, "composite") and POLICIES[policy].of_heads is None:
        names = ", ".join(name for name, each in POLICIES.items() if each.of_heads)
        raise InvalidArgumentError(
            f"composite: {policy} doesn't score each head on its own; policies that do: {names}"
        )
    return composite
