"""How large an engine's cache is: cells for its texts, and room for resume points."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pykvgraph.context.auto_n_ctx import Draft, fitting_n_ctx, fitting_tier, warning_of_memory
from pykvgraph.context.context import Context
from pykvgraph.errors import DeviceError
from pykvgraph.model.device import devices
from pykvgraph.model.model import Model
from pykvgraph.plan.free_memory import host_free_bytes
from pykvgraph.sequence.sequence import EVERY
from pykvgraph.types import CellGroup

_log = logging.getLogger("pykvgraph.engine")
_MOST_CELLS = 65_536
_POINTS_SHARE = 0.125  # of the free memory, for resume points


class MemoryBudget(NamedTuple):
    """How much of the free memory an engine may take.

    share: of what is not left to others, for this engine of several. margin: per cent, for others.
    """

    share: float
    margin: int


@dataclass(frozen=True)
class Sizes:
    """What the engine's context gets. n_points: resume points that there is room for; 0: none are needed.

    has_draft: whether a draft model's cache of as many cells fits, too. tier: kv_tier and resident_layers,
    for kv_tier="auto".
    """

    n_ctx: int
    n_points: int
    checkpoint_cells: int
    checkpoint_bytes: int
    has_draft: bool = True
    tier: dict[str, Any] = field(default_factory=dict)

    @property
    def points(self) -> dict[str, Any]:
        """Context's arguments for the resume points."""
        return {"checkpoint_cells": self.checkpoint_cells, "checkpoint_bytes": self.checkpoint_bytes}

    @property
    def context(self) -> dict[str, Any]:
        """Context's arguments for all of it."""
        return {"n_ctx": self.n_ctx, **self.points, **self.tier}


def sizes_for(
    model: Model,
    n_ctx: int | None,
    n_seq_max: int,
    batch: dict[str, int],
    n_states: int,
    budget: MemoryBudget,
    draft: Draft | None,
    **context: Any,
) -> Sizes:
    """Sizes for n_seq_max texts; n_ctx None: as many cells as the texts can fill, and the memory can hold.

    A cache that leaves others too little memory is warned of, with what to type. batch: n_batch and n_ubatch.
    n_states: how many states more than the resume points' are kept at a time, of a model that has any. draft:
    its cache has as many cells; where not even the smallest ones fit together, it has none. context: the
    other arguments of Context, adapters too. Raises what Context does, UnsupportedError for a stage of a
    pipeline, and DeviceError when nothing fits.
    """
    model._require_all_layers()
    with Context(model, n_ctx=256, n_batch=32, n_ubatch=32, n_seq_max=1, **context) as probe:
        groups = [group for group in probe.kv.groups if group.kind == "state" or not probe.swa_full]
    free = int(_free_bytes(model) * budget.share)
    context = {**context, **batch, "n_seq_max": n_seq_max}
    if n_ctx is not None:
        sizes = _with_points(n_ctx, groups, n_seq_max, n_states, free)
        context |= sizes.points
        if warning := warning_of_memory(model, n_ctx, context, budget.margin, draft):
            _log.warning(warning)
        return replace(sizes, tier=fitting_tier(model, n_ctx, context, *budget, draft))
    most = min(n_seq_max * max(model.n_ctx_train, 512), _MOST_CELLS)
    largest = _with_points(most, groups, n_seq_max, n_states, free)
    context |= largest.points
    try:
        fitting, has_draft = fitting_n_ctx(model, most, context, *budget, draft), True
    except DeviceError as error:
        if draft is None:
            raise
        fitting, has_draft = fitting_n_ctx(model, most, context, *budget), False
        _log.warning("there are no drafts: with a cache of the draft model, %s", error)
    sizes = _with_points(fitting, groups, n_seq_max, n_states, free)
    context |= sizes.points
    tier = fitting_tier(model, fitting, context, *budget, draft if has_draft else None)
    return replace(sizes, has_draft=has_draft, tier=tier)


def _with_points(n_ctx: int, groups: Sequence[CellGroup], n_seq_max: int, n_states: int, free: int) -> Sizes:
    """Room for resume points in a part of the free memory, where the model needs them.

    groups: those that don't keep every position, and others perhaps.
    """
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
