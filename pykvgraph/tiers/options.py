"""How much room there is for prefixes whose cells are needed, and where."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pykvgraph import env
from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Tiers:
    """Where an engine keeps prefixes when others need their cells: in memory, and from there in files.

    ram, disk: bytes, or text with a unit, "512M" or "4G" (of 1,024); 0: none. Never more is taken. path: the
    directory of the files, which several processes may share; None: pykvgraph/prefixes in the cache directory
    (XDG_CACHE_HOME). Everything goes through memory: a disk needs some. Raises InvalidArgumentError.
    """

    ram: int = 0
    disk: int = 0
    path: Path | None = None

    def __init__(
        self, ram: int | str = "1G", disk: int | str = 0, path: str | os.PathLike[str] | None = None
    ) -> None:
        n_ram, n_disk = _bytes_of(ram, "ram"), _bytes_of(disk, "disk")
        if n_disk and not n_ram:
            raise InvalidArgumentError("disk: files are written from memory, and read into it: give ram, too")
        if path is not None and not n_disk:
            raise InvalidArgumentError("path: nothing is written there without disk")
        object.__setattr__(self, "ram", n_ram)
        object.__setattr__(self, "disk", n_disk)
        object.__setattr__(self, "path", _folder(path) if n_disk else None)


def _folder(path: str | os.PathLike[str] | None) -> Path:
    if path is None:
        return env.cache_folder() / "prefixes"
    try:
        name = os.fsdecode(path)
    except TypeError:
        name = ""
    if not name or "\0" in name:
        raise InvalidArgumentError(f"path must be a path, not empty and without NUL, got {shown(path)}")
    return Path(name).absolute()


def _bytes_of(size: object, name: str) -> int:
    if type(size) is int and abs(size) > NO_LIMIT:
        size = ""  # Python prints no integer of thousands of digits
    text = str(size).strip().lower() if type(size) in (int, str) else ""
    unit = text[-1:] if text[-1:] in _UNITS else ""
    digits = text.removesuffix(unit)
    n_bytes = int(digits) * _UNITS[unit] if digits.isascii() and digits.isdigit() and len(digits) < 20 else -1
    if not 0 <= n_bytes <= NO_LIMIT:
        raise InvalidArgumentError(f'{name} must be bytes, or text as "512M" or "4G", got {shown(size)}')
    return n_bytes
