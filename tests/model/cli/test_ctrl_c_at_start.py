"""Ctrl-C in the first second of a verb: exit code 130, and no traceback."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import chance, ctrl_c

STORIES = Path(__file__).parents[2] / "data" / "stories260K.gguf"
VERBS = [
    ["generate", "-m", str(STORIES), "-p", "Once", "-n", "100000"],
    ["info", "-m", str(STORIES)],
    ["serve", "-m", str(STORIES), "--port", "0"],
]


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb[0])
def test_no_traceback(verb: list[str]) -> None:
    """Before Python has read the first line of this package, a traceback is Python's own."""
    delays = random.Random(chance.seed(5))
    with ctrl_c.heard():
        for _ in range(14 if chance.THOROUGH else 5):
            delay = delays.uniform(0, 1.5)
            with subprocess.Popen(
                [sys.executable, "-m", "pykvgraph", *verb],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            ) as process:
                try:
                    time.sleep(delay)
                    process.send_signal(signal.SIGINT)
                    _, said = process.communicate(timeout=60)
                finally:
                    process.kill()
            was_starting = (
                process.returncode == -signal.SIGINT or "runpy" in said or "Fatal Python error: init" in said
            )
            if was_starting and "pykvgraph" not in said:
                continue  # the interpreter, which had not come to the package
            assert "Traceback" not in said, (delay, said)
            # Python gives signals back before its own end, and dies of this one then: 130 for a shell
            assert process.returncode in (0, 130, -signal.SIGINT), (delay, said)
