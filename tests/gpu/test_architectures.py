"""Other architectures than llama, on a device and over RPC."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.architectures import ArchSpec
from support.judged_elsewhere import FAMILIES, judge_elsewhere
from support.rpc_server import TESTS

pytestmark = pytest.mark.gpu

Architecture = Callable[[ArchSpec], Path]


@pytest.mark.parametrize("spec", FAMILIES, ids=str)
def test_on_a_device(device: str, architecture: Architecture, spec: ArchSpec) -> None:
    judge_elsewhere(architecture(spec), device)


@pytest.mark.parametrize("spec", FAMILIES, ids=str)
def test_over_rpc(endpoint: str, architecture: Architecture, spec: ArchSpec) -> None:
    """In a process of its own: servers are known for as long as a process lives."""
    done = subprocess.run(
        [sys.executable, "-m", "support.judged_elsewhere", str(architecture(spec)), "RPC0", endpoint],
        cwd=TESTS,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
