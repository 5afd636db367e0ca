"""The control groups (cgroups) around this process, version 2 or 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def groups_of(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """The version and the folder of each group that bounds this process, innermost first.

    controller: as "memory" or "cpu". root: where /proc and /sys are. See cgroups(7).
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            version, top = 2, root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, top = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        group = top / path.strip("/")
        while group.is_relative_to(top):
            yield version, group
            group = group.parent


def number_in(path: Path) -> int | None:
    """The number in a group's file; None for no file, and for "max"."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
