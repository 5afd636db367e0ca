"""The caches of a model and of its draft model are sized together, from one part of the memory."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import chance, sanitizer, where
from support.architectures import ArchSpec
from support.planned import draft_context

import pykvgraph as kvg
from pykvgraph.plan import fitting

ON_HOST = pytest.mark.skipif(where.device != "cpu", reason="it is about the memory of the host")
SIZES: dict[str, Any] = {"n_batch": 128, "n_ubatch": 128, "n_seq_max": 40, "n_threads": 1}


def taken(path: Path, n_ctx: int, **more: Any) -> int:
    parts = kvg.plan_memory(path, "cpu", n_ctx=n_ctx, **SIZES, **more)
    return sum(part.cache_bytes + part.compute_bytes for part in parts)


@ON_HOST
@pytest.mark.parametrize("margin", [20, 50])
def test_one_step_more_would_be_too_much(monkeypatch: pytest.MonkeyPatch, stories: Path, margin: int) -> None:
    free = 60_000_000
    monkeypatch.setattr(fitting, "host_free_bytes", lambda *_, **__: free)
    with (
        kvg.Model(stories, device="cpu") as model,
        kvg.Engine(model, draft=model, margin=margin, **SIZES) as engine,
    ):
        n_ctx, drafts = engine.context.n_ctx, draft_context(engine)
        assert drafts is not None and drafts.n_ctx == n_ctx
    limit = free * (100 - margin) // 100

    def both(n: int) -> int:
        return taken(stories, n) + taken(stories, n, swa_full=True)

    assert both(n_ctx) <= limit < both(n_ctx + 256)


@ON_HOST
def test_no_room_for_a_draft(
    monkeypatch: pytest.MonkeyPatch, stories: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model alone fits: it works, without drafts, and says so."""
    free = taken(stories, 256) * 100 // 80 + 10_000
    monkeypatch.setattr(fitting, "host_free_bytes", lambda *_, **__: free)
    with kvg.Model(stories, device="cpu") as model:
        with kvg.Engine(model, draft=model, **SIZES) as engine:
            assert (engine.context.n_ctx, draft_context(engine)) == (256, None)
            done = engine.submit([1, 5, 6], kvg.SamplingParams(max_tokens=4)).result()
        assert (len(done.tokens), done.drafted) == (4, 0)
        (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert warning.startswith("there are no drafts: with a cache of the draft model, CPU has no room")
        monkeypatch.setattr(fitting, "host_free_bytes", lambda *_, **__: 1000)
        with pytest.raises(kvg.DeviceError, match="no room for a cache of 256 cells"):
            kvg.Engine(model, draft=model, **SIZES)


@ON_HOST
def test_what_to_type_counts_both(
    monkeypatch: pytest.MonkeyPatch, stories: Path, caplog: pytest.LogCaptureFixture
) -> None:
    free = (taken(stories, 2048) + taken(stories, 2048, swa_full=True)) * 100 // 80 + 10_000
    monkeypatch.setattr(fitting, "host_free_bytes", lambda *_, **__: free)
    found: list[str] = []
    for n_ctx, has_draft in ((2048, True), (2304, False), (2304, True)):
        caplog.clear()
        with kvg.Model(stories, device="cpu") as model:
            kvg.Engine(model, n_ctx=n_ctx, draft=model if has_draft else None, **SIZES).close()
        found.append(caplog.text)
    assert found[:2] == ["", ""]
    assert re.search(r"n_ctx=2048 \(-c 2048\) does", found[2])


UNDER_A_LIMIT = """
import resource, sys
import pykvgraph as kvg
path, has_draft, more = sys.argv[1], sys.argv[2] == "draft", int(sys.argv[3]) << 20
with kvg.Model(path, device="cpu") as model, kvg.Model(path, device="cpu") as draft:
    model.n_ctx_train = 1 << 20
    *_, data, _ = (int(n) * resource.getpagesize() for n in open("/proc/self/statm").read().split())
    resource.setrlimit(resource.RLIMIT_DATA, (data + more, resource.RLIM_INFINITY))
    try:
        with kvg.Engine(model, draft=draft if has_draft else None, n_seq_max=1, n_threads=1) as engine:
            n_tokens = min(600, engine.context.n_ctx - 40)
            asked = engine.submit([5] * n_tokens, kvg.SamplingParams(max_tokens=32))
            assert len(asked.result().tokens) == 32
            speculation = engine._loop.stepper._speculation
            print(engine.context.n_ctx, speculation._drafter._ctx.n_ctx if speculation else 0)
    except kvg.DeviceError:
        print(0, 0)
"""


@pytest.mark.slow
@ON_HOST
@pytest.mark.skipif(sanitizer.ADDRESS, reason="AddressSanitizer takes memory of its own")
def test_under_limits(architecture: Callable[[ArchSpec], Path]) -> None:
    """2 limits of data, or 30: with a draft model of equal size it starts wherever it does without.

    Both caches are equally long; together they have no less than the cache without a draft, but for 128 MiB
    of graphs and tables of the second one.
    """
    spec = ArchSpec("llama", n_layer=8, n_head=16, n_head_kv=16, head_dim=128)  # 64 KiB a cell
    path = str(architecture(spec))
    limits = [*range(60, 120, 4), *range(120, 420, 20)] if chance.THOROUGH else [100, 400]
    assert len(limits) == (30 if chance.THOROUGH else 2)
    starts = 0
    for more in limits:
        found = []
        for kind in ("alone", "draft"):
            command = [sys.executable, "-c", UNDER_A_LIMIT, path, kind, str(more)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            found.append(tuple(map(int, done.stdout.split())))
        (alone, _), (n_ctx, n_draft) = found
        assert (n_ctx > 0) == (alone > 0)
        assert n_draft in (0, n_ctx)
        starts += n_draft > 0
        if n_draft:
            assert alone - 2048 <= 2 * n_ctx <= alone
    assert starts >= max(len(limits) // 3, 1)
