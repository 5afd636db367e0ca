"""How large an engine's cache is: cells for its texts, and room for resume points."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from pykvgraph.context import Context
from pykvgraph.device import devices
from pykvgraph.kept_text import EVERY
from pykvgraph.model import Model

_MOST_CELLS = 65_536
_SHARE = 0.5  # of the free memory, for cells
_POINTS_SHARE = 0.125  # and for resume points


@dataclass(frozen=True)
class Sizes:
    """What the engine's context gets. n_points: resume points that there is room for; 0: none are needed."""

    n_ctx: int
    n_points: int
    checkpoint_cells: int
    checkpoint_bytes: int


def sizes_for(model: Model, n_ctx: int | None, n_seq_max: int, **context: Any) -> Sizes:
    """Sizes for n_seq_max texts; n_ctx None: as many cells as the texts can fill, and the memory can hold."""
    with Context(model, n_ctx=256, n_batch=32, n_ubatch=32, n_seq_max=1, **context) as probe:
        groups = probe.kv.groups
    free = _free_bytes(model)
    if n_ctx is None:
        cell_bytes = sum(group.cell_bytes for group in groups if group.kind == "full")
        most = min(n_seq_max * max(model.n_ctx_train, 512), _MOST_CELLS)
        n_ctx = max(min(most, int(free * _SHARE) // max(cell_bytes, 1)), 512)
    windows = [group for group in groups if group.kind == "window"]
    state_bytes = sum(group.cell_bytes for group in groups if group.kind == "state")
    if not windows and not state_bytes:
        return Sizes(n_ctx, 0, 0, 0)
    widest = max((group.window for group in windows), default=0)
    point_bytes = widest * sum(group.cell_bytes for group in windows) + state_bytes
    n_points = min(2 * (n_ctx // EVERY + n_seq_max), int(free * _POINTS_SHARE) // point_bytes)
    n_points = max(n_points, 2)
    return Sizes(n_ctx, n_points, n_points * widest, n_points * state_bytes)


def _free_bytes(model: Model) -> int:
    """Of the device that has most layers; of the host where the device doesn't tell."""
    names = model.layer_devices
    most = max(set(names), key=names.count)
    found = [device.memory_free for device in devices() if device.name == most and device.type != "cpu"]
    return (found[0] if found else 0) or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
