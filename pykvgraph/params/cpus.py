"""How many CPUs this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pykvgraph.params.control_groups import groups_of, number_in


def usable_cpus(root: Path = Path("/")) -> int:
    """The CPUs of the process's affinity, or as many as its control groups give it time for, rounded up.

    A container with the time of 2 CPUs on a machine of 64 sees 64. On 64 threads it would be stopped for most
    of each tenth of a second. root: where /proc and /sys are.
    """
    return min([len(os.sched_getaffinity(0)), *_quotas(root)])


def _quotas(root: Path) -> Iterator[int]:
    """Of each control group that has one."""
    for version, group in groups_of("cpu", root):
        quota, period = _time_v2(group) if version == 2 else _time_v1(group)
        if quota and period:
            yield -(-quota // period)


def _time_v2(group: Path) -> tuple[int | None, int | None]:
    """Microseconds of CPU time in each period, and the period."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None, None
    return (int(quota), int(period)) if quota.isdigit() and period.isdigit() else (None, None)


def _time_v1(group: Path) -> tuple[int | None, int | None]:
    return number_in(group / "cpu.cfs_quota_us"), number_in(group / "cpu.cfs_period_us")
