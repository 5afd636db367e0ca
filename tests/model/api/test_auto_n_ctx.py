"""n_ctx="auto": as many cells as the memory has room for, and no more."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import chance, sanitizer
from support.architectures import ArchSpec

import pykvgraph as kvg
from pykvgraph.plan import fitting
from pykvgraph.plan.fitting import fit_n_ctx

STORIES = Path(__file__).parents[2] / "data" / "stories260K.gguf"


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(fitting, "host_free_bytes", lambda *_, **__: free)


@pytest.mark.parametrize("margin", [0, 20])
@pytest.mark.parametrize("free", [5_000_000, 9_000_000, 33_333_333, 100_000_000])
def test_one_step_more_would_not_fit(monkeypatch: pytest.MonkeyPatch, free: int, margin: int) -> None:
    with_free(monkeypatch, free)
    fit = fit_n_ctx(STORIES, 1 << 20, device="cpu", is_loaded=True, margin=margin)

    def taken(n_ctx: int) -> int:
        return sum(
            part.cache_bytes + part.compute_bytes for part in kvg.plan_memory(STORIES, "cpu", n_ctx=n_ctx)
        )

    assert fit.n_ctx % 256 == 0
    assert taken(fit.n_ctx) <= free * (100 - margin) // 100 < taken(fit.n_ctx + 256)
    assert fit.full == "CPU"
    assert fit.limits == (free * (100 - margin) // 100,)


def test_no_more_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 1 << 40)
    fit = fit_n_ctx(STORIES, 777, device="cpu")
    assert (fit.n_ctx, fit.full) == (777, "")
    with kvg.Model(STORIES, device="cpu") as model, kvg.Context(model, n_ctx="auto") as ctx:
        assert ctx.n_ctx == model.n_ctx_train


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 1 << 20)
    with (
        kvg.Model(STORIES, device="cpu") as model,
        pytest.raises(kvg.DeviceError, match=r"no room for a cache of 256 cells.*Free memory"),
    ):
        kvg.Context(model, n_ctx="auto")


UNDER_A_LIMIT = """
import resource, sys
import pykvgraph as kvg
path, kind, more = sys.argv[1], getattr(resource, sys.argv[2]), int(sys.argv[3])
with kvg.Model(path, device="cpu") as model:
    model.n_ctx_train = 1 << 20
    size, *_, data, _ = (int(n) * resource.getpagesize() for n in open("/proc/self/statm").read().split())
    used = size if kind == resource.RLIMIT_AS else data
    resource.setrlimit(kind, (used + more, resource.RLIM_INFINITY))
    with kvg.Context(model, n_ctx="auto", n_threads=1, n_threads_batch=1) as ctx:
        batch = kvg.Batch()
        for first in range(0, ctx.n_ctx, 512):
            batch.clear()
            batch.extend([5] * min(512, ctx.n_ctx - first), first, (0,), "last")
            ctx.decode(batch)
        ctx.kv.seq_rm(0, ctx.n_ctx - 40, -1)
        for position in range(ctx.n_ctx - 40, ctx.n_ctx):
            ctx.append(7)
        assert ctx.kv.n_used == ctx.n_ctx
        print(ctx.n_ctx, ctx.kv.bytes)
"""


REFUSED = """
import re, resource, sys
import pykvgraph as kvg
with kvg.Model(sys.argv[1], device="cpu") as model:
    *_, data, _ = (int(n) * resource.getpagesize() for n in open("/proc/self/statm").read().split())
    resource.setrlimit(resource.RLIMIT_DATA, (data + 150_000_000, resource.RLIM_INFINITY))
    try:
        kvg.Context(model, n_ctx=8000, n_threads=1)
    except kvg.DeviceError as error:
        n_ctx = int(re.search(r"; n_ctx=(\\d+) \\(-c \\1\\) fits$", str(error))[1])
    with kvg.Context(model, n_ctx=n_ctx, n_threads=1) as ctx:
        batch = kvg.Batch()
        batch.extend([5] * 512, 0, (0,), "last")
        ctx.decode(batch)
        print(n_ctx, ctx.kv.bytes)
"""


@pytest.mark.skipif(sanitizer.ADDRESS, reason="AddressSanitizer takes memory of its own")
def test_a_cache_that_is_refused_says_which_is_not(architecture: Callable[[ArchSpec], Path]) -> None:
    spec = ArchSpec("llama", n_layer=8, n_head=16, n_head_kv=16, head_dim=128)  # 64 KiB a cell
    command = [sys.executable, "-c", REFUSED, str(architecture(spec))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    n_ctx, n_bytes = map(int, done.stdout.split())
    assert n_ctx * 65536 <= n_bytes <= 0.8 * 150_000_000
    assert n_ctx >= 512


@pytest.mark.slow
@pytest.mark.skipif(sanitizer.ADDRESS, reason="AddressSanitizer takes memory of its own")
@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_under_each_limit(architecture: Callable[[ArchSpec], Path], kind: str) -> None:
    """4 limits of 80 to 170 MB, or 10: it starts, fills the cache to the last cell, and takes what there is.

    A larger limit gives no fewer cells. Cells leave the margin, and no more than that and 60 MB for graphs.
    """
    spec = ArchSpec("llama", n_layer=8, n_head=16, n_head_kv=16, head_dim=128)  # 64 KiB a cell
    path, found = str(architecture(spec)), []
    for more in range(80_000_000, 180_000_000, 10_000_000 if chance.THOROUGH else 30_000_000):
        command = [sys.executable, "-c", UNDER_A_LIMIT, path, kind, str(more)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        n_ctx, n_bytes = map(int, done.stdout.split())
        assert n_ctx * 65536 <= n_bytes <= 0.8 * more
        assert n_bytes >= 0.8 * more - 60_000_000 - 256 * 65536
        found.append(n_ctx)
    assert len(found) == (10 if chance.THOROUGH else 4)
    assert found == sorted(found)
    assert found[0] < found[-1]
