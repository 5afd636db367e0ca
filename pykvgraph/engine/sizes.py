"""How large an engine's cache is: cells for its texts, and room for resume points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pykvgraph.context import Context, fitting_n_ctx
from pykvgraph.device import devices
from pykvgraph.kept_text import EVERY
from pykvgraph.model import Model
from pykvgraph.plan.free_memory import host_free_bytes
from pykvgraph.types import CellGroup

_MOST_CELLS = 65_536
_POINTS_SHARE = 0.125  # of the free memory, for resume points


@dataclass(frozen=True)
class Sizes:
    """What the engine's context gets. n_points: resume points that there is room for; 0: none are needed."""

    n_ctx: int
    n_points: int
    checkpoint_cells: int
    checkpoint_bytes: int


def sizes_for(
    model: Model, n_ctx: int | None, n_seq_max: int, batch: dict[str, int], n_states: int, **context: Any
) -> Sizes:
    """Sizes for n_seq_max texts; n_ctx None: as many cells as the texts can fill, and the memory can hold.

    batch: n_batch and n_ubatch. n_states: how many states more than the resume points' are kept at a time, of
    a model that has any. Raises what Context does, and DeviceError when nothing fits.
    """
    with Context(model, n_ctx=256, n_batch=32, n_ubatch=32, n_seq_max=1, **context) as probe:
        groups = probe.kv.groups
    free = _free_bytes(model)
    if n_ctx is not None:
        return _with_points(n_ctx, groups, n_seq_max, n_states, free)
    most = min(n_seq_max * max(model.n_ctx_train, 512), _MOST_CELLS)
    largest = _with_points(most, groups, n_seq_max, n_states, free)
    points = {
        "checkpoint_cells": largest.checkpoint_cells,
        "checkpoint_bytes": largest.checkpoint_bytes,
    }
    fitting = fitting_n_ctx(model, most, {**context, **batch, **points, "n_seq_max": n_seq_max})
    return _with_points(fitting, groups, n_seq_max, n_states, free)


def _with_points(n_ctx: int, groups: Sequence[CellGroup], n_seq_max: int, n_states: int, free: int) -> Sizes:
    """Room for resume points in a part of the free memory, where the model needs them."""
    windows = [group for group in groups if group.kind == "window"]
    state_bytes = sum(group.cell_bytes for group in groups if group.kind == "state")
    if not windows and not state_bytes:
        return Sizes(n_ctx, 0, 0, 0)
    widest = max((group.window for group in windows), default=0)
    point_bytes = widest * sum(group.cell_bytes for group in windows) + state_bytes
    n_points = min(2 * (n_ctx // EVERY + n_seq_max), int(free * _POINTS_SHARE) // point_bytes)
    n_points = max(n_points, 2)
    return Sizes(n_ctx, n_points, n_points * widest, (n_points + n_states) * state_bytes)


def _free_bytes(model: Model) -> int:
    """Of the device that has most layers; of the host where the device doesn't tell."""
    names = model.layer_devices
    most = max(set(names), key=names.count)
    found = [device.memory_free for device in devices() if device.name == most and device.type != "cpu"]
    return (found[0] if found else 0) or host_free_bytes(model.weight_bytes)
