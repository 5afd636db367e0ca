"""The rule: our logits may differ from libllama's by twice what its own two attentions differ by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import pykvgraph as kvg
from support import where
from support.engines import Logits, OurEngine, Scenario, open_context
from support.referee import Referee

FLOOR = 1e-6
# What plain attention over an F32 cache may differ by, where weights are F32. Most rows differ by 1e-13;
# ggml's GELU is a table of F16.
EXACT = 2e-8
# What libllama may differ by on a device and on the CPU, and we as well: CUDA rounds what Q4_K multiplies.
COARSEST = 1e-2


@dataclass(frozen=True)
class Distance:
    """worst: NMSE of ours beside libllama's, with the attention where it is largest. own: libllama's."""

    worst: float
    attention: str
    own: float
    allowed: float

    @property
    def is_allowed(self) -> bool:
        return self.worst <= self.allowed  # not when it is NaN


class TooFarError(AssertionError):
    """Ours is farther from libllama than the rule allows."""

    def __init__(self, distance: Distance) -> None:
        text = f"flash_attn={distance.attention}: NMSE {distance.worst:.2e}, allowed {distance.allowed:.2e}"
        super().__init__(text)
        self.distance = distance


def nmse(ours: Logits, theirs: Logits) -> float:
    """Squared error over all rows, relative to the squares of `theirs`."""
    if ours.shape != theirs.shape:
        raise AssertionError(f"shapes differ: {ours.shape} and {theirs.shape}")
    difference = ours.astype(np.float64) - theirs
    return float(np.sum(difference**2) / np.sum(theirs.astype(np.float64) ** 2))


def judge(
    path: Path,
    scenario: Scenario,
    *,
    n_ctx: int = 512,
    n_ubatch: int = 512,
    n_seq_max: int = 1,
    kv_type: str = "f16",
    device: str | None = None,
    slack: float = 1.0,
    attentions: Sequence[str] = ("off", "on", "auto"),
    n_gpu_layers: int = -1,
    offload_kqv: bool = True,
    referee: Path | None = None,
    n_batch: int | None = None,
    swa_full: bool = False,
    kv_tier: str = "device",
) -> Distance:
    """Runs the scenario on libllama, flash and plain, and on ours with each of `attentions`; TooFarError.

    referee: the same model for libllama, where it wants another file; `path` unless given.
    n_batch: of ours; n_ctx unless given. swa_full: of both. kv_tier: of ours.
    device: where.device unless given; `slack` widens the rule for one whose kernels round more coarsely than
    the CPU's. Where libllama differs by more on that device and on the CPU, so may we, up to COARSEST.
    """
    device = device or where.device

    def of_libllama(flash: bool, there: str = "CPU") -> Logits:
        with Referee(
            referee or path,
            flash=flash,
            n_ctx=n_ctx,
            n_ubatch=n_ubatch,
            n_seq_max=n_seq_max,
            kv_type=kv_type,
            swa_full=swa_full,
            device=there,
        ) as libllama:
            return scenario(libllama)

    theirs = {flash: of_libllama(flash) for flash in (False, True)}
    own = nmse(theirs[True], theirs[False])
    allowed = where.rule(slack * max(FLOOR, 2 * own))
    errors = {}
    with kvg.Model(path, device=device, n_gpu_layers=n_gpu_layers) as model:
        for flash_attn in attentions:
            with open_context(
                model,
                n_ctx=n_ctx,
                n_batch=n_batch or n_ctx,
                n_ubatch=n_ubatch,
                n_seq_max=n_seq_max,
                type_k=kv_type,
                type_v=kv_type,
                flash_attn=flash_attn,
                offload_kqv=offload_kqv,
                swa_full=swa_full,
                kv_tier=kv_tier,
            ) as ctx:
                errors[flash_attn] = nmse(scenario(OurEngine(ctx)), theirs[flash_attn == "on"])
    attention = max(errors, key=lambda each: np.inf if np.isnan(errors[each]) else errors[each])
    distance = Distance(errors[attention], attention, own, allowed)
    if not distance.is_allowed and device.lower() != "cpu":
        flash = attention == "on"
        there = nmse(of_libllama(flash, device), theirs[flash])
        distance = replace(distance, allowed=max(allowed, min(2 * there, COARSEST)))
    if not distance.is_allowed:
        raise TooFarError(distance)
    return distance


def exact_error(path: Path, scenario: Scenario, *, n_ctx: int = 512) -> float:
    """NMSE where nothing is rounded but sums: plain attention over an F32 cache, on the CPU.

    A wrong rope in a layer that adds little is below what the rule allows, and not below EXACT.
    """
    with Referee(path, flash=False, n_ctx=n_ctx, kv_type="f32") as libllama:
        theirs = scenario(libllama)
    with (
        kvg.Model(path, device="cpu") as model,
        open_context(model, n_ctx=n_ctx, type_k="f32", type_v="f32", flash_attn="off") as ctx,
    ):
        return nmse(scenario(OurEngine(ctx)), theirs)
