"""The process ends while a daemon thread is in a call: nothing may be freed, nor torn down, under it."""

from __future__ import annotations

import collections
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# What has been imported is forked, so that a run takes no longer than its thread. Each child ends as any
# program does: atexit, then the libraries' own destructors.
SCRIPT = """
import os, signal, sys, threading, time, warnings
import numpy as np
import pykvgraph as kvg
from pykvgraph._native import libllama

kind, path, runs = sys.argv[1], sys.argv[2], int(sys.argv[3])
libllama.low_level()
warnings.simplefilter("ignore")
text = "Once upon a time there was a little girl. " * 50
rows = np.random.default_rng(0).standard_normal(50_000).astype(np.float32)
started = threading.Event()

def encode():
    tokenizer = kvg.Model(path, "cpu").tokenizer
    while True:
        tokenizer.encode(text)
        started.set()

def sample():
    sampler = kvg.Sampler(1.0, seed=1)
    while True:
        sampler.sample(rows)
        started.set()

def generate():
    ctx = kvg.Context(kvg.Model(path, "cpu"), n_ctx=256)
    while True:
        for _ in kvg.generate(ctx, "Once", max_tokens=50, temperature=1.0):
            started.set()
        ctx.reset()

def decode():
    ctx = kvg.Context(kvg.Model(path, "cpu"), n_ctx=256, n_threads=2)
    batch = kvg.Batch()
    batch.extend(range(5, 205), 0)
    while True:
        ctx.decode(batch)
        started.set()
        ctx.reset()

def load():
    while True:
        kvg.Model(path, "cpu").tokenizer.encode("a")
        started.set()

for run in range(runs):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        threading.excepthook = lambda *_: None  # a call is refused: that is as it should be
        for _ in range(3 if kind == "encode" else 1):
            threading.Thread(target=globals()[kind], daemon=True).start()
        started.wait()
        time.sleep(run / 1000)
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("kind", ["encode", "sample", "generate", "decode", "load"])
def test_the_end_waits_for_a_daemon_threads_call(stories: Path, kind: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind, str(stories), "20"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert collections.Counter(run.stdout.split()) == {"0": 20}, run.stderr


def test_handlers_at_exit_may_still_use_it(stories: Path) -> None:
    """Those that were registered after the import run first."""
    script = (
        "import atexit, pykvgraph as kvg\n"
        f"ctx = kvg.Context(kvg.Model({str(stories)!r}, 'cpu'), n_ctx=64)\n"
        "atexit.register(lambda: print(len(ctx.append(1))))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (run.stdout.strip(), run.stderr) == ("512", "")
