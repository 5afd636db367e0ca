"""An engine that is one of four on a machine plans for a quarter of what may be taken."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import where

import pykvgraph as kvg
from pykvgraph.plan import fitting

FREE = 40_000_000


@pytest.mark.skipif(where.device != "cpu", reason="it is about the memory of the host")
def test_a_quarter(monkeypatch: pytest.MonkeyPatch, stories: Path) -> None:
    """One step more would be more than a quarter of 80 %."""
    monkeypatch.setattr(fitting, "host_free_bytes", lambda *_, **__: FREE)
    with (
        kvg.Model(stories, device="cpu") as model,
        kvg.Engine(model, n_seq_max=64, memory_share=0.25) as engine,
    ):
        ctx = engine.context
        names = ("n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch")
        arguments = {name: getattr(ctx, name) for name in names if hasattr(ctx, name)}

    def taken(n_ctx: int) -> int:
        parts = kvg.plan_memory(stories, "cpu", n_ctx=n_ctx, **arguments)
        return sum(part.cache_bytes + part.compute_bytes for part in parts)

    assert taken(ctx.n_ctx) <= FREE * 0.2 < taken(ctx.n_ctx + 256)
