"""The largest cache that fits: n_ctx="auto"."""

from __future__ import annotations

import os
import resource
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
_STACK = 8 << 20  # of a thread, where nobody has limited it


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
    **arguments: Any,
) -> Fit:
    """The most cells, up to `most`, for which there is memory; fewer than `most` in steps of 256.

    Each number of cells is planned exactly (plan_memory), and compared with (100 - margin) per cent of what
    is free: on a device what the device tells, on the host what host_free_bytes() tells. is_loaded: the
    weights are in memory already. arguments: those of plan_memory, without n_ctx.

    Raises DeviceError when not even the smallest cache fits, and what plan_memory raises.
    """
    planned = Planned(path, is_loaded, margin, arguments)
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


def warning_of(path: str | os.PathLike[str], n_ctx: int, *, margin: int = MARGIN, **arguments: Any) -> str:
    """What to type where a cache of n_ctx cells leaves less than `margin` % of the free memory; "": fine.

    The model is loaded. arguments: those of plan_memory, without n_ctx. Raises what plan_memory raises.
    """
    found = Planned(path, True, margin, arguments).with_cells(n_ctx)
    if not found.full:
        return ""
    try:
        fitting = fit_n_ctx(path, n_ctx, is_loaded=True, margin=margin, **arguments).n_ctx
        advice = f"n_ctx={fitting} (-c {fitting}) does"
    except DeviceError:
        advice = "no smaller one does either, so free memory there"
    return (
        f"{found.full}: a cache of {n_ctx} cells does not leave {margin} % of what is free to others, "
        f"so that the memory may run out; {advice}"
    )


class Planned:
    """Plans of one model with more or fewer cells, beside the memory that was free at first."""

    def __init__(
        self, path: str | os.PathLike[str], is_loaded: bool, margin: int, arguments: dict[str, Any]
    ) -> None:
        self._path = path
        self._is_loaded = is_loaded
        self._arguments = arguments
        parts = plan_memory(path, n_ctx=STEP, **arguments)
        self._devices = [part.device for part in parts]
        told = {device.name: device.memory_free for device in devices() if device.type == "gpu"}
        n_file = sum(part.mapped_bytes for part in parts)
        host = host_free_bytes(n_file, is_mapped=is_loaded, n_untouched=_untouched(path, arguments))
        self.limits = tuple(weight_limit(told.get(part.device) or host, margin) for part in parts)

    def with_cells(self, n_ctx: int) -> Fit:
        """full: the first device on which it doesn't fit."""
        try:
            parts = plan_memory(self._path, n_ctx=n_ctx, **self._arguments)
        except DeviceError as error:  # it names the device first, or there is no host memory
            names = [name for name in self._devices if str(error).startswith(name)]
            return Fit(n_ctx, (), self.limits, (names or ["CPU"])[0])
        pairs = zip(parts, self.limits, strict=True)
        full = next((part.device for part, limit in pairs if self._to_take(part) > limit), "")
        return Fit(n_ctx, parts, self.limits, full)

    def refusal(self, fit: Fit) -> str:
        """Why a cache doesn't fit."""
        pairs = zip(fit.parts, fit.limits, strict=False)
        amounts = [(self._to_take(part), limit) for part, limit in pairs if part.device == fit.full]
        sizes = "".join(
            f": it would take {size_text(n)}, and {size_text(limit)} may be taken" for n, limit in amounts
        )
        return (
            f"{fit.full} has no room for a cache of {fit.n_ctx} cells{sizes}. Free memory there, or use a "
            "smaller model, fewer n_gpu_layers, a smaller n_ubatch, or a smaller type_k and type_v"
        )

    def _to_take(self, part: DevicePart) -> int:
        """What is not in memory yet; mapped weights were taken off what is free."""
        weights = 0 if self._is_loaded else part.weight_bytes - part.mapped_bytes
        return weights + part.cache_bytes + part.compute_bytes


def _untouched(path: str | os.PathLike[str], arguments: dict[str, Any]) -> int:
    """What a context allocates and hardly uses: tables of graphs, stacks of threads."""
    with GgufFile(path) as file:
        n_tensors = len(file.tensors)
    asked = [arguments.get("n_threads"), arguments.get("n_threads_batch")]
    n_threads = max([int(each) for each in asked if each] or [usable_cpus()])
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return _TABLES * n_tensors + (_STACK if stack == resource.RLIM_INFINITY else stack) * (n_threads - 1)
