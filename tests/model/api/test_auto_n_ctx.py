"""n_ctx="auto": as many cells as the memory has room for, and no more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
with kvg.Model(sys.argv[1], device="cpu") as model:
    model.n_ctx_train = 1 << 20
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[2]), resource.RLIM_INFINITY))
    with kvg.Context(model, n_ctx="auto", n_threads=1) as ctx:
        batch = kvg.Batch()
        batch.extend([1, 2, 3], 0, (0,), "last")
        ctx.decode(batch)
        print(ctx.n_ctx)
"""


@pytest.mark.slow
def test_it_starts_under_each_limit(tmp_path: Path) -> None:
    """ulimit -v, 20 of them: it starts, and a larger limit gives no fewer cells."""
    found = []
    for mebibytes in range(40, 440, 20):
        command = [sys.executable, "-c", UNDER_A_LIMIT, str(STORIES), str(mebibytes << 20)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append(int(done.stdout))
    assert found == sorted(found)
    assert found[0] < found[-1]
