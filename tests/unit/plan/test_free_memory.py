"""host_free_bytes: what the kernel, control groups and limits leave, worked out by hand."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
from support.control_groups import write_group

from pykvgraph.plan.free_memory import host_free_bytes

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 GiB available, and no control groups."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 16777216 kB\nMemFree: 1024 kB\nMemAvailable: 8388608 kB\n")
    page = resource.getpagesize()
    (proc / "self/statm").write_text(f"{GIB // page} 5 4 3 0 {GIB // 4 // page} 0\n")
    return tmp_path


def test_what_the_kernel_has(root: Path) -> None:
    assert host_free_bytes(root=root) == 8 * GIB
    assert host_free_bytes(3 * GIB, root=root) == 5 * GIB
    assert host_free_bytes(9 * GIB, root=root) == 0
    assert host_free_bytes(n_untouched=9 * GIB, root=root) == 8 * GIB  # nobody counts that


def test_control_groups_of_version_2(root: Path) -> None:
    """The parent leaves less than the group itself; pages of files can go, shared memory can't."""
    (root / "proc/self/cgroup").write_text("0::/box/inner\n")
    box = root / "sys/fs/cgroup/box"
    write_group(box / "inner", memory__max="max\n", memory__current=f"{GIB}\n")
    stat = f"anon 5\nfile {700 * MIB}\nshmem {100 * MIB}\n"
    write_group(box, memory__max=f"{2 * GIB}\n", memory__current=f"{GIB}\n", memory__stat=stat)
    assert host_free_bytes(root=root) == GIB + 600 * MIB
    assert host_free_bytes(500 * MIB, root=root) == GIB + 100 * MIB
    write_group(box / "inner", memory__max=f"{GIB + 50 * MIB}\n")
    assert host_free_bytes(root=root) == 50 * MIB


def test_control_groups_of_version_1(root: Path) -> None:
    (root / "proc/self/cgroup").write_text("5:cpu:/\n4:memory,hugetlb:/box\n0::/\n")
    stat = f"cache 1\ntotal_cache {300 * MIB}\ntotal_shmem {100 * MIB}\n"
    files = {"memory__limit_in_bytes": f"{GIB}\n", "memory__usage_in_bytes": f"{900 * MIB}\n"}
    write_group(root / "sys/fs/cgroup/memory/box", **files, memory__stat=stat)
    assert host_free_bytes(root=root) == (1024 - 900 + 200) * MIB


@pytest.mark.parametrize(("kind", "used"), [(resource.RLIMIT_AS, GIB), (resource.RLIMIT_DATA, GIB // 4)])
def test_limits_of_the_process(root: Path, monkeypatch: pytest.MonkeyPatch, kind: int, used: int) -> None:
    """A file that is mapped has been counted; one that will be mapped has not."""
    infinite = resource.RLIM_INFINITY
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (3 * GIB if which == kind else infinite, infinite)
    )
    assert host_free_bytes(root=root) == 3 * GIB - used
    assert host_free_bytes(GIB, root=root) == 3 * GIB - used
    assert host_free_bytes(GIB, is_mapped=False, root=root) == 2 * GIB - used
    assert host_free_bytes(n_untouched=GIB // 2, root=root) == 5 * GIB // 2 - used


def test_this_machine() -> None:
    assert 0 < host_free_bytes() < 1 << 50
