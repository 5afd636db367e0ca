"""os.fork() in a process that uses a device: the child gets a typed error or the CPU's answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

# a child that hangs is ended by its alarm, which shows as -14
SCRIPT = """
import os, signal, sys
import numpy as np
import pykvgraph as kvg

path, device = sys.argv[1:]
model = kvg.Model(path, device=device)
ctx = kvg.Context(model, n_ctx=256, n_threads=1)
with kvg.Model(path, device="cpu") as cpu, kvg.Context(cpu, n_ctx=256, n_threads=1) as other:
    expected = other.append(5)
ctx.append(5)

def refused(error, work):
    try:
        work()
    except error as refusal:
        assert "fork" in str(refusal) and "cpu" in str(refusal), refusal
        return
    raise AssertionError("it was not refused")

def in_child():
    for work in (lambda: ctx.append(6), lambda: ctx.kv.read_k(0), lambda: kvg.Context(model, n_ctx=256)):
        refused(kvg.InvalidArgumentError, work)
    for name in (device, "auto"):
        refused(kvg.UnsupportedError, lambda: kvg.Model(path, device=name))
        refused(kvg.UnsupportedError, lambda: kvg.plan_memory(path, name))
    assert device in [info.name for info in kvg.devices()]
    ctx.close()
    model.close()
    with kvg.Model(path, device="cpu") as cpu, kvg.Context(cpu, n_ctx=256, n_threads=1) as other:
        assert np.array_equal(other.append(5), expected)

child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        in_child()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)  # as multiprocessing's children do: CUDA's exit handlers are the parent's
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
ctx.append(6)
assert ctx.kv.n_used == 2
"""


def test_what_is_on_a_device_stays_with_the_parent(device: str, stories: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(stories), device], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
