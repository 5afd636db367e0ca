"""What `kv.groups` tells of each group of cells, and of recurrent states."""

from __future__ import annotations

import numpy as np

from pykvgraph._native.ffi import KvgGroupKind
from pykvgraph._native.kv import read_group, read_info, read_layers, read_state_layers, read_states
from pykvgraph.types import CellGroup


def read_cell_group(context: int, index: int) -> CellGroup:
    info = read_group(context, index)
    return CellGroup(
        kind="full" if info.kind == KvgGroupKind.KVG_GROUP_FULL else "window",
        layers=read_layers(context, index),
        n_cells=info.n_cells,
        window=info.window,
        n_used=info.n_used,
        n_kv=info.n_kv,
        cell_bytes=info.n_layer * (info.k_row_bytes + info.v_row_bytes),
    )


def read_state_groups(context: int) -> tuple[CellGroup, ...]:
    """None, or one."""
    info = read_info(context)
    if info.n_states == 0:
        return ()
    used = np.flatnonzero(read_states(context).pos >= 0)
    n_kv = int(used[-1]) + 1 if len(used) else 0
    layers = read_state_layers(context)
    return (CellGroup("state", layers, info.n_states, 0, info.n_states_used, n_kv, info.state_bytes),)
