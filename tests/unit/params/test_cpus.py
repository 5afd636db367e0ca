"""usable_cpus: affinity and control groups, worked out by hand, and a group of this machine's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.control_groups import write_group

from pykvgraph.params.cpus import usable_cpus


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 64 CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def test_no_groups(root: Path) -> None:
    assert usable_cpus(root) == 64


@pytest.mark.parametrize(
    ("time", "cpus"),
    [("200000", 2), ("150000", 2), ("50000", 1), ("1000", 1), ("9900000", 64), ("max", 64)],
)
def test_version_2(root: Path, time: str, cpus: int) -> None:
    (root / "proc/self/cgroup").write_text("0::/box/inner\n")
    write_group(root / "sys/fs/cgroup/box", cpu__max=f"{time} 100000\n")
    write_group(root / "sys/fs/cgroup/box/inner", cpu__max="max 100000\n")
    assert usable_cpus(root) == cpus


@pytest.mark.parametrize("text", ["", "100000\n", "-1 x\n", "100000 0\n"])
def test_a_file_that_says_nothing(root: Path, text: str) -> None:
    (root / "proc/self/cgroup").write_text("0::/\n")
    write_group(root / "sys/fs/cgroup", cpu__max=text)
    assert usable_cpus(root) == 64


@pytest.mark.parametrize(("time", "cpus"), [("300000", 3), ("-1", 64)])
def test_version_1(root: Path, time: str, cpus: int) -> None:
    (root / "proc/self/cgroup").write_text("5:memory:/\n4:cpu,cpuacct:/box\n")
    write_group(root / "sys/fs/cgroup/cpu/box", cpu__cfs_quota_us=f"{time}\n", cpu__cfs_period_us="100000\n")
    assert usable_cpus(root) == cpus


@pytest.fixture
def half_a_cpu() -> Iterator[Path]:
    """The file that takes processes into a real control group with half the time of one CPU."""
    one, two = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    group = (one if one.is_dir() else two) / f"kvgraph-{os.getpid()}"
    try:
        group.mkdir()
        if one.is_dir():
            (group / "cpu.cfs_quota_us").write_text("50000")
        else:
            (group / "cpu.max").write_text("50000 100000")
    except OSError as error:
        pytest.skip(f"a control group can't be made here: {error}")
    yield group / "cgroup.procs"
    group.rmdir()


def test_a_real_quota(half_a_cpu: Path) -> None:
    enter = f"open({str(half_a_cpu)!r}, 'w').write('0')"
    ask = "from pykvgraph.params.cpus import usable_cpus; print(usable_cpus())"
    found = subprocess.run(
        [sys.executable, "-c", f"{enter}\n{ask}"], capture_output=True, text=True, timeout=60
    )
    assert found.stdout == "1\n", found.stderr
