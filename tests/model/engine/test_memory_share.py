"""An engine plans for its part of what may be taken: all but a margin, or a part of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support import where

import pykvgraph as kvg
from pykvgraph.plan import fitting

FREE = 40_000_000


@pytest.mark.skipif(where.device != "cpu", reason="it is about the memory of the host")
@pytest.mark.parametrize(
    ("budget", "limit"),
    [
        ({"memory_share": 0.25}, FREE * 0.2),
        ({"margin": 60}, FREE * 0.4),
        ({"margin": 60, "memory_share": 0.5}, FREE * 0.2),
        ({"margin": 0, "memory_share": 0.25}, FREE * 0.25),
    ],
)
def test_one_step_more_would_be_too_much(
    monkeypatch: pytest.MonkeyPatch, stories: Path, budget: dict[str, Any], limit: float
) -> None:
    monkeypatch.setattr(fitting, "host_free_bytes", lambda *_, **__: FREE)
    with (
        kvg.Model(stories, device="cpu") as model,
        kvg.Engine(model, n_seq_max=64, **budget) as engine,
    ):
        ctx = engine.context
        names = ("n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch")
        arguments = {name: getattr(ctx, name) for name in names if hasattr(ctx, name)}

    def taken(n_ctx: int) -> int:
        parts = kvg.plan_memory(stories, "cpu", n_ctx=n_ctx, **arguments)
        return sum(part.cache_bytes + part.compute_bytes for part in parts)

    assert taken(ctx.n_ctx) <= limit < taken(ctx.n_ctx + 256)


@pytest.mark.parametrize("margin", [-1, 100])
def test_no_margin(stories: Path, margin: int) -> None:
    with kvg.Model(stories) as model, pytest.raises(kvg.InvalidArgumentError, match="margin"):
        kvg.Engine(model, margin=margin)
