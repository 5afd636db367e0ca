"""The rule: our logits may differ from libllama's by twice what its own two attentions differ by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import pykvgraph as kvg
from support import where
from support.engines import Logits, OurEngine, Scenario, open_context
from support.referee import Referee

FLOOR = 1e-6


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
) -> None:
    """Runs the scenario on libllama, flash and plain, and on ours with each of `attentions`.

    referee: the same model for libllama, where it wants another file; `path` unless given.
    n_batch: of ours; n_ctx unless given. swa_full: of both. kv_tier: of ours.
    device: where.device unless given; `slack` widens the rule for one whose kernels round more coarsely than
    the CPU's.
    """
    theirs = {}
    for flash in (False, True):
        with Referee(
            referee or path,
            flash=flash,
            n_ctx=n_ctx,
            n_ubatch=n_ubatch,
            n_seq_max=n_seq_max,
            kv_type=kv_type,
            swa_full=swa_full,
        ) as libllama:
            theirs[flash] = scenario(libllama)
    allowed = where.rule(slack * max(FLOOR, 2 * nmse(theirs[True], theirs[False])))
    with kvg.Model(path, device=device or where.device, n_gpu_layers=n_gpu_layers) as model:
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
                error = nmse(scenario(OurEngine(ctx)), theirs[flash_attn == "on"])
            if not error <= allowed:  # also when it is NaN
                raise AssertionError(f"flash_attn={flash_attn}: NMSE {error:.2e}, allowed {allowed:.2e}")
