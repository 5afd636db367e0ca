"""The largest cache that fits: n_ctx="auto"."""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pykvgraph.checks import size_text
from pykvgraph.errors import DeviceError
from pykvgraph.model.device import devices
from pykvgraph.model.device_types import DevicePart
from pykvgraph.model.gguf_file import GgufFile
from pykvgraph.params.cpus import usable_cpus
from pykvgraph.params.params import MARGIN
from pykvgraph.plan.free_memory import host_free_bytes
from pykvgraph.plan.memory import plan_memory
from pykvgraph.plan.memory_model import weight_limit

STEP = 256  # cells
_TABLES = 300 << 10  # bytes for each tensor of a model: what ggml allocates to split two graphs over devices
_STREAM = ', or kv_tier="auto" (-kvt auto), which keeps in host memory what does not fit there'
_STACK = 8 << 20  # of a thread, where nobody has limited it


# a file, and arguments of plan_memory, without n_ctx
Beside = tuple[str | os.PathLike[str], dict[str, Any]]


@dataclass(frozen=True)
class Fit:
    """A cache that fits, and why it isn't larger.

    n_ctx: its cells. parts: what it and the model take on each device. limits: bytes that may be taken on
    each of these devices. full: the device where one step more would not fit; "": n_ctx is as large as was
    asked for.
    """

    n_ctx: int
    parts: tuple[DevicePart, ...]
    limits: tuple[int, ...]
    full: str


def fit_n_ctx(
    path: str | os.PathLike[str],
    most: int,
    *,
    is_loaded: bool = False,
    margin: int = MARGIN,
    beside: Sequence[Beside] = (),
    **arguments: Any,
) -> Fit:
    """The most cells, up to `most`, for which there is memory; fewer than `most` in steps of 256.

    Each number of cells is planned exactly (plan_memory), and compared with (100 - margin) per cent of what
    is free: on a device what the device tells, on the host what host_free_bytes() tells. is_loaded: the
    weights are in memory already. beside: other models that are loaded, each of which gets a cache of as many
    cells. arguments: those of plan_memory, without n_ctx.

    Raises DeviceError when not even the smallest cache fits, and what plan_memory raises.
    """
    planned = Planned(path, is_loaded, margin, arguments, beside)
    low = planned.with_cells(min(STEP, most))
    if low.full:
        raise DeviceError(planned.refusal(low))
    # no plan is much larger than what fits: a plan, too, takes the memory of graphs for a moment
    high, full = 0, ""
    while low.n_ctx < most and (high == 0 or high - low.n_ctx > STEP):
        middle = max((low.n_ctx + high) // 2 // STEP, low.n_ctx // STEP + 1) * STEP
        found = planned.with_cells(middle if high else min(2 * low.n_ctx, most))
        if found.full:
            high, full = found.n_ctx, found.full
        else:
            low = found
    return Fit(low.n_ctx, low.parts, low.limits, full)


def fit_resident_layers(
    path: str | os.PathLike[str],
    n_ctx: int,
    n_layer: int,
    *,
    margin: int = MARGIN,
    beside: Sequence[Beside] = (),
    **arguments: Any,
) -> int:
    """The most layers whose K and V the devices hold (resident_layers), of n_layer; the others' are streamed.

    The model is loaded. beside, arguments: as in fit_n_ctx(). Raises what plan_memory raises.
    """
    planned = Planned(path, True, margin, {**arguments, "kv_tier": "host"}, beside)

    def fits(n_resident: int) -> bool:
        tier = "device" if n_resident == n_layer else "host"
        fit = planned.with_cells(n_ctx, kv_tier=tier, resident_layers=n_resident)
        return fit.full in ("", "CPU")

    if fits(n_layer):
        return n_layer
    # bisect: resident layers 0 to low fit, high doesn't
    low, high = 0, n_layer
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def warning_of(
    path: str | os.PathLike[str],
    n_ctx: int,
    *,
    margin: int = MARGIN,
    beside: Sequence[Beside] = (),
    **arguments: Any,
) -> str:
    """What to type where a cache of n_ctx cells leaves less than `margin` % of the free memory; "": fine.

    The model is loaded. beside, arguments: as in fit_n_ctx(). Raises what plan_memory raises.
    """
    found = Planned(path, True, margin, arguments, beside).with_cells(n_ctx)
    if not found.full:
        return ""
    try:
        fitting = fit_n_ctx(path, n_ctx, is_loaded=True, margin=margin, beside=beside, **arguments).n_ctx
        advice = f"n_ctx={fitting} (-c {fitting}) does"
    except DeviceError:
        advice = "no smaller one does either, so free memory there"
    return (
        f"{found.full}: a cache of {n_ctx} cells does not leave {margin} % of what is free to others, "
        f"so that the memory may run out; {advice}"
    )


class Planned:
    """Plans of one model with more or fewer cells, and of others beside it, and the memory free at first."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        is_loaded: bool,
        margin: int,
        arguments: dict[str, Any],
        beside: Sequence[Beside] = (),
    ) -> None:
        self._asked = [(path, arguments), *beside]
        self._is_loaded = is_loaded
        parts = [part for plan in self._plans(STEP) for part in plan]
        told = {device.name: device.memory_free for device in devices() if device.type == "gpu"}
        n_file = sum(part.mapped_bytes for part in parts)
        n_untouched = sum(_untouched(*each) for each in self._asked)
        host = host_free_bytes(n_file, is_mapped=is_loaded, n_untouched=n_untouched)
        self._limits = {part.device: weight_limit(told.get(part.device) or host, margin) for part in parts}

    def with_cells(self, n_ctx: int, **more: Any) -> Fit:
        """full: the first device on which it doesn't fit. more: arguments of the model's own plan."""
        try:
            plans = self._plans(n_ctx, **more)
        except DeviceError as error:  # it names the device first, or there is no host memory
            names = [name for name in self._limits if str(error).startswith(name)]
            return Fit(n_ctx, (), tuple(self._limits.values()), (names or ["CPU"])[0])
        taken = self._taken(plans)
        full = next((name for name, limit in self._limits.items() if taken[name] > limit), "")
        return Fit(n_ctx, plans[0], tuple(self._limits[part.device] for part in plans[0]), full)

    def refusal(self, fit: Fit) -> str:
        """Why a cache doesn't fit."""
        sizes = ""
        can_stream = fit.full != "CPU" and self._asked[0][1].get("kv_tier", "device") == "device"
        if fit.parts:
            n_bytes, limit = self._taken(self._plans(fit.n_ctx))[fit.full], self._limits[fit.full]
            sizes = f": it would take {size_text(n_bytes)}, and {size_text(limit)} may be taken"
        return (
            f"{fit.full} has no room for a cache of {fit.n_ctx} cells{sizes}. Free memory there, or use a "
            "smaller model, fewer n_gpu_layers, a smaller n_ubatch, or a smaller type_k and type_v"
            f"{_STREAM if can_stream else ''}"
        )

    def _plans(self, n_ctx: int, **more: Any) -> list[tuple[DevicePart, ...]]:
        (path, own), *beside = self._asked
        asked = [(path, {**own, **more}), *beside]
        return [plan_memory(path, n_ctx=n_ctx, **arguments) for path, arguments in asked]

    def _taken(self, plans: list[tuple[DevicePart, ...]]) -> Counter[str]:
        """By device, what is not in memory yet; mapped weights were taken off what is free."""
        taken: Counter[str] = Counter()
        for i, plan in enumerate(plans):
            for part in plan:
                weights = 0 if self._is_loaded or i > 0 else part.weight_bytes - part.mapped_bytes
                taken[part.device] += weights + part.cache_bytes + part.compute_bytes
        return taken


def _untouched(path: str | os.PathLike[str], arguments: dict[str, Any]) -> int:
    """What a context allocates and hardly uses: tables of graphs, stacks of threads."""
    with GgufFile(path) as file:
        n_tensors = len(file.tensors)
    asked = [arguments.get("n_threads"), arguments.get("n_threads_batch")]
    n_threads = max([int(each) for each in asked if each] or [usable_cpus()])
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return _TABLES * n_tensors + (_STACK if stack == resource.RLIM_INFINITY else stack) * (n_threads - 1)
