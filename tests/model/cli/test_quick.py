"""Quick to meet: what an import costs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# CPU time: what the clock would show were the machine not busy with other things
SCRIPT = "import time; t = time.process_time(); import pykvgraph; print(time.process_time() - t)"
SECONDS = 0.3


@pytest.mark.skipif(
    "LD_PRELOAD" in os.environ, reason="a sanitizer's library is preloaded: everything is slow"
)
def test_import_takes_no_time() -> None:
    """The best of five: a busy machine makes some of them slow, the package all of them."""
    times = []
    for _ in range(5):
        run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
        times.append(float(run.stdout))
    assert min(times) <= SECONDS


def test_import_leaves_llama_cpp_alone() -> None:
    """It takes longer than all of ours: it waits for the first tokenizer."""
    script = "import sys, pykvgraph; print('llama_cpp' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
