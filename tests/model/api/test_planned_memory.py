"""What plan_memory() says beside what a context has, and beside what the process took."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.architectures import ArchSpec
from support.engines import decode, random_ids, run_of
from support.judge import nmse
from support.kept_graphs import grow_graphs
from support.models import N_VOCAB, WeightType
from support.planned import KV_TYPES, MODELS, compare

import pykvgraph as kvg

LIMIT = 0.02

Architecture = Callable[[ArchSpec], Path]


@pytest.mark.slow
@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("spec", MODELS, ids=str)
def test_what_is_planned_is_allocated(architecture: Architecture, spec: ArchSpec, kv_type: str) -> None:
    """Weights, cells and graphs, each within 2 %."""
    for found in compare(architecture(spec), "cpu", kv_type):
        assert found.error <= LIMIT, found


@pytest.mark.slow
@pytest.mark.parametrize("spec", MODELS, ids=str)
def test_with_the_logits_of_every_token(architecture: Architecture, spec: ArchSpec) -> None:
    """A whole micro-batch of them, where room was asked for."""
    for found in compare(architecture(spec), "cpu", "f16", n_outputs_max=64):
        assert found.error <= LIMIT, found


def test_more_logits_than_there_is_room_for(architecture: Architecture) -> None:
    """Graphs stay as large as they were reserved."""
    path = architecture(ArchSpec("llama", 4, n_embd=256, n_head=4, n_head_kv=1, head_dim=64))
    ids = run_of(random_ids(300, N_VOCAB))
    asked = [token._replace(logits=i % 7 != 3) for i, token in enumerate(ids)]
    with kvg.Model(path, device="cpu") as model, kvg.Context(model, n_ctx=512) as ctx:
        grow_graphs(ctx)
        held = ctx.devices[0].compute_bytes
        ctx.reset()
        found = decode(ctx, asked)
        assert ctx.devices[0].compute_bytes == held
        ctx.reset()
        singly = [decode(ctx, [token]) for token in asked]
        assert nmse(np.concatenate(singly), found) <= 1e-6
    with kvg.Model(path, device="cpu") as model, kvg.Context(model, n_ctx=512, n_outputs_max=512) as ctx:
        assert nmse(decode(ctx, asked), found) <= 1e-6


RESIDENT = """
import sys
import pykvgraph as kvg
from support.kept_graphs import grow_graphs

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))

path, other, kv_type = sys.argv[1:]
threads = {"n_threads": 1, "n_threads_batch": 1}
options = {"n_ctx": 60_000, "type_k": kv_type, "type_v": kv_type, **threads}
(planned,) = kvg.plan_memory(path, "cpu", **options)
with kvg.Model(other, device="cpu") as model, kvg.Context(model, n_ctx=64, **threads) as ctx:
    grow_graphs(ctx)  # what the first context of a process takes
with kvg.Model(path, device="cpu") as model:
    before = resident()
    with kvg.Context(model, **options) as ctx:
        print(resident() - before, planned.cache_bytes)
        grow_graphs(ctx, before=512)
        print(resident() - before, planned.cache_bytes + planned.compute_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer takes memory of its own")
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_the_process_takes_what_is_planned(architecture: Architecture, kv_type: str) -> None:
    """As the kernel counts its resident memory: the cache within 2 %, and with graphs no more than that."""
    spec = ArchSpec("llama", 6, n_head=8, n_head_kv=4, head_dim=64, n_embd=256, weights=WeightType.Q8_0)
    arguments = [str(architecture(spec)), str(architecture(ArchSpec("llama"))), kv_type]
    tests = Path(__file__).parents[2]
    command = [sys.executable, "-c", RESIDENT, *arguments]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (cache, planned_cache), (most, planned) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert planned_cache > 100_000_000
    assert abs(cache - planned_cache) <= LIMIT * cache
    assert planned_cache <= most <= (1 + LIMIT) * planned
