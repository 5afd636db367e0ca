"""How much memory this process may still take."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from pykvgraph.params.control_groups import groups_of, number_in

_PAGE = resource.getpagesize()
_NO_LIMIT = 1 << 62


def host_free_bytes(
    n_file: int = 0, *, is_mapped: bool = True, n_untouched: int = 0, root: Path = Path("/")
) -> int:
    """Bytes of host memory that the process may take before something refuses, or swaps.

    The least of what the kernel says is available, of what the process's control groups (v2 or v1) leave,
    and of its limits (ulimit -v, ulimit -d). n_file: bytes of a mapped file that are to stay in memory, which
    the kernel and the control groups count as free. is_mapped: it is mapped already, so that ulimit -v has
    counted it. n_untouched: bytes that will be allocated and hardly used: only ulimit counts them. root:
    where /proc and /sys are.
    """
    shared = min([_available(root), *_left_by_groups(root)]) - n_file
    own = min([_NO_LIMIT, *_left_by_limits(root)]) - (0 if is_mapped else n_file) - n_untouched
    return max(min(shared, own), 0)


def _available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return _NO_LIMIT


def _left_by_groups(root: Path) -> Iterator[int]:
    """Of each control group around the process. Pages of files don't count: the kernel drops them first."""
    for version, group in groups_of("memory", root):
        if version == 2:
            most, used, files, shared = "memory.max", "memory.current", "file", "shmem"
        else:
            most, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
            files, shared = "total_cache", "total_shmem"
        limit, current = number_in(group / most), number_in(group / used)
        if limit is not None and current is not None:
            found = _statistics(group / "memory.stat")
            # memory that processes share is there, too, but has no file to be read from again
            yield limit - current + found.get(files, 0) - found.get(shared, 0)


def _statistics(path: Path) -> dict[str, int]:
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
    except OSError:
        return {}
    return {name: int(number) for name, number in pairs}


def _left_by_limits(root: Path) -> Iterator[int]:
    """Of the process's own limits. What is mapped counts there already."""
    size, *_, data, _ = (int(n) * _PAGE for n in (root / "proc/self/statm").read_text().split())
    for limit, used in ((resource.RLIMIT_AS, size), (resource.RLIMIT_DATA, data)):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            yield soft - used
