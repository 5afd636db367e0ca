"""Composite cells: each head of each layer has K and V of tokens of its own choice in them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pykvgraph._native.ffi import KvgKvComposite
from pykvgraph._native.handles import Handle
from pykvgraph._native.kv import int32
from pykvgraph._native.library import lib, sized


class Composition(NamedTuple):
    """Which rows stay of a sequence's cells in one group without a window.

    group: index into `kv.groups`. cells: all that the sequence has at their positions; nobody else has any of
    them. rows: (n_layer, n_head_kv, n_kept), indices into `cells`, rising for each head.
    """

    group: int
    cells: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]


def compose(handle: Handle, seq: int, compositions: Sequence[Composition]) -> None:
    """Gathers the rows that stay in n_kept of the cells, and empties the other cells.

    compositions: one for each group without a window, all with the same positions and the same n_kept. The
    cells that stay are all at the last of their positions, as one: from then on they are kept, shared, moved,
    saved or removed together, and all their rows move alike. K is rotated to the cells' positions before.

    Raises InvalidArgumentError for other compositions, and UnsupportedError for a model that tells distances
    by cells' positions (ALiBi) and for a cache whose rows age, with nothing changed; DeviceError when the
    device fails: the cache must be cleared then, as update() says.
    """
    given = [(group, np.ascontiguousarray(c), np.ascontiguousarray(r)) for group, c, r in compositions]
    structs = (KvgKvComposite * len(given))(
        *(
            sized(
                KvgKvComposite,
                group=group,
                n_cells=len(cells),
                cells=int32(cells),
                n_kept=rows.shape[-1],
                **{"from": int32(rows)},
            )
            for group, cells, rows in given
        )
    )
    handle.call(lib().kvg_kv_compose, seq, ctypes.cast(structs, ctypes.POINTER(KvgKvComposite)), len(given))
