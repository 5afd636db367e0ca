"""Packages of others that `make clients` installs, each in a process of its own environment."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support import clients
from support.clients.environment import python_of

PROGRAMS = Path(clients.__path__[0])
ENVIRONMENTS = {
    "with_instructor.py": "instructor",
    "with_litellm.py": "together",
    "with_pydantic_ai.py": "together",
}
# not ours: conftest.py needs the library, and other packages warn of what they like
PYTEST = [
    "-m",
    "pytest",
    "-q",
    "-c",
    "pyproject.toml",
    "--noconftest",
    "-p",
    "no:cacheprovider",
    "-o",
    "filterwarnings=",
]


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(ENVIRONMENTS))
def test_a_package(guarded: str, program: str) -> None:
    command = [str(python_of(ENVIRONMENTS[program])), *PYTEST, str(PROGRAMS / program)]
    environment = os.environ | {"KVGRAPH_SERVER": guarded}
    root = PROGRAMS.parents[2]
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout[-10_000:] + ended.stderr[-2000:]


def test_all_programs_run() -> None:
    assert {path.name for path in PROGRAMS.glob("with_*.py")} == set(ENVIRONMENTS)
