"""A machine with too little memory: a typed error, nothing changed, and the next call right."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.models import WIDE, ModelSpec

# In a process of its own, which may be short of memory alone. Prints what was refused.
CHILD = """
import resource, sys
import numpy as np
import pykvgraph as kvg

def leave(mebibytes):
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (mebibytes << 20), HARD))

def refused(errors, call):
    try:
        call()
    except errors as error:
        print(type(error).__name__)
    else:
        sys.exit(f"{call} was not refused")

def interleaved():
    batch = kvg.Batch()
    for i in range(300):
        batch.add(5 + i % 200, i // 2, seq_ids=(i % 2,), logits=False)
    return batch

HARD = resource.getrlimit(resource.RLIMIT_AS)[1]
model = kvg.Model(sys.argv[1], device="cpu")
options = {"n_ctx": 600, "n_batch": 512, "n_seq_max": 3, "type_k": "f32", "type_v": "f32", "defrag_threshold": -1}
ctx = kvg.Context(model, **options)
ctx.decode(interleaved())
for p0 in range(0, 150, 6):
    ctx.kv.seq_cp(0, 2, p0, p0 + 5)  # scattered: copies go through scratch
before = ctx.kv.cells()
ctx.kv.defrag("sort")
leave(4)
refused(kvg.DeviceError, ctx.kv.update)  # 16 MiB of scratch
refused(kvg.DeviceError, lambda: ctx.kv.seq_add(2, 0, -1, 7))
refused(kvg.DeviceError, lambda: kvg.Context(model, **{**options, "n_ctx": 5000}))
refused((kvg.DeviceError, MemoryError), ctx.kv.save)
everything = kvg.Batch()
everything.extend(np.full(200, 5, np.int32), 150, (1,), logits="all")
leave(0)
refused((kvg.DeviceError, MemoryError), lambda: kvg.Context(model, **{**options, "n_ctx": 300}))
resource.setrlimit(resource.RLIMIT_AS, (HARD, HARD))
after = ctx.kv.cells()
assert all(np.array_equal(getattr(after, name), getattr(before, name)) for name in ("pos", "seq", "shift"))

# now all of it works, and comes out as where memory was never short
other = kvg.Context(model, **options)
other.decode(interleaved())
for p0 in range(0, 150, 6):
    other.kv.seq_cp(0, 2, p0, p0 + 5)
other.kv.defrag("sort")
for each in (ctx, other):
    each.kv.seq_add(2, 0, -1, 7)
    each.kv.update()
    each.decode(everything)
assert ctx.kv.save() == other.kv.save()
assert np.array_equal(ctx.logits(), other.logits())
"""


def test_short_of_memory(model_file: Callable[[ModelSpec], Path]) -> None:
    if "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("AddressSanitizer ends a process that is short of memory")
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(model_file(WIDE))],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split()[:3] == ["DeviceError"] * 3
