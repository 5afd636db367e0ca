"""Saved cells in files: the old file or the whole new one, whatever happens."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from pykvgraph.checks import native_path
from pykvgraph.errors import InvalidArgumentError, KVGraphError, StateError
from pykvgraph.kv_cache.saved.cells import SavedState
from pykvgraph.kv_cache.saved.format import read_state
from pykvgraph.kv_cache.saved.geometry import Geometry
from pykvgraph.kv_cache.saved.source import FileSource


def write_file(path: str | os.PathLike[str], blob: bytes) -> None:
    """Writes aside, syncs and renames: whatever happens, `path` is the old file or the whole new one.

    An existing file keeps its mode; a new one is its owner's alone (0600), as cells are somebody's text. A
    process that is killed may leave the `.kvgstate-*.tmp` that it was writing beside it.

    Raises InvalidArgumentError for a device, pipe or socket, and what is no path; OSError, which names
    `path`, for a folder, a missing or read-only one around it, or a full disk.
    """
    path = os.fsdecode(native_path(path))
    target = Path(os.path.realpath(path))  # what a link points to is written, not the link
    try:
        mode = _regular_mode(path, InvalidArgumentError)
    except FileNotFoundError:
        if not os.path.basename(path) or target.is_dir():  # "", "missing/", "missing/.."
            raise
        mode = None
    try:
        _replace(target, blob, mode)
    except OSError as error:  # the caller knows nothing of a file aside
        raise OSError(error.errno, error.strerror, path) from None


def _replace(target: Path, blob: bytes, mode: int | None) -> None:
    aside = str(target.with_name(f".kvgstate-{secrets.token_hex(8)}.tmp"))
    try:
        # at no time may more people read it than the file that it will be
        with open(aside, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    except BaseException:
        # Python looks for signals after calls and not before them, so that a second Ctrl-C finds the file
        # gone: nothing may be called between the exception and this, not even a Path's methods
        try:  # noqa: SIM105
            os.unlink(aside)
        except FileNotFoundError:
            pass
        raise
    try:
        folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:  # a folder to write to, not to read: the new file is there all the same
        return
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The content of a file.

    Raises InvalidArgumentError for what is no path, StateError for a device, pipe or socket, and OSError as
    open() does.
    """
    path = os.fsdecode(native_path(path))
    _regular_mode(path, StateError)
    return Path(path).read_bytes()


def read_file(path: str | os.PathLike[str], geometry: Geometry, room: Sequence[int] | None) -> SavedState:
    """The cells in a file, as `unpack` gives them. K and V are read when all else was, and fits.

    Raises as `unpack`; StateError for a device, pipe or socket, too; OSError for a folder or a file that is
    missing or can't be read; InvalidArgumentError for what is no path.
    """
    path = os.fsdecode(native_path(path))
    _regular_mode(path, StateError)
    with open(path, "rb") as file:
        try:
            return read_state(FileSource(file), geometry, room)
        except StateError as error:
            raise StateError(f"{path!r}: {error}") from None


def _regular_mode(path: str, error: type[KVGraphError]) -> int:
    """Permissions of the regular file there; `error` for what is another kind of file, OSError for none."""
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    if not stat.S_ISREG(mode):
        raise error(f"{path!r} is a device, a pipe or a socket: a state is saved in a file")
    return stat.S_IMODE(mode)
