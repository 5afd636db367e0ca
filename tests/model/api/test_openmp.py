"""How libgomp's threads wait, as it tells itself: OMP_DISPLAY_ENV makes it print what it has read."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from pykvgraph import env

SCRIPT = """
import subprocess, sys
{first}
import pykvgraph
pykvgraph.devices()
sys.stdout.write(subprocess.run(["env"], capture_output=True, text=True, check=True).stdout)
"""


def run(first: str = "", **variables: str) -> tuple[str, str, str]:
    """How often threads spin, the environment of a program that is started then, and what is told."""
    own = {"OMP_DISPLAY_ENV": "VERBOSE", "KVGRAPH_LOG": "info", **variables}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(first=first)],
        env={**clean, **own},
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"GOMP_SPINCOUNT = '(\w+)'", done.stderr)
    if found is None:
        pytest.skip("this ggml computes without libgomp")
    return found[1], done.stdout, done.stderr


def test_threads_spin_for_a_short_while() -> None:
    spins, environment, told = run()
    assert spins == str(env.SPINS)
    assert "GOMP_SPINCOUNT" not in environment
    assert "libgomp was in this process" not in told


@pytest.mark.parametrize(
    ("variables", "spins"), [({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "PASSIVE"}, "0")]
)
def test_what_the_user_has_set_stays(variables: dict[str, str], spins: str) -> None:
    found, environment, _ = run(**variables)
    assert found == spins
    in_child = dict(line.split("=", 1) for line in environment.splitlines() if "=" in line)
    assert {name: in_child.get(name) for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} == {
        "GOMP_SPINCOUNT": None,
        "OMP_WAIT_POLICY": None,
        **variables,
    }


def test_a_libgomp_that_is_there_already() -> None:
    spins, environment, told = run("import ctypes; ctypes.CDLL('libgomp.so.1')")
    assert spins != str(env.SPINS)
    assert "GOMP_SPINCOUNT" not in environment
    assert "libgomp was in this process before pykvgraph" in told
