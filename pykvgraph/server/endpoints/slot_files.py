"""What the cache has of a slot's last text, in files of one folder."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from pathlib import Path
from typing import Any

from starlette.requests import Request

from pykvgraph.errors import KVGraphError, StateError
from pykvgraph.openai.errors import SERVER, WireError, as_wire, invalid, unsupported
from pykvgraph.openai.wire_json import loads
from pykvgraph.server.http.body import SHORT, read_body
from pykvgraph.server.requests.fields import Fields
from pykvgraph.server.service import Service
from pykvgraph.server.slots import Text, own_text

_LONGEST = 255  # bytes of a file's name
_HEAD_BYTES = 1 << 20  # at most, of what a file has beside K and V
_OF_PERMISSION = (errno.EACCES, errno.EPERM)
_OF_NAME = (errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EINVAL, errno.EILSEQ, errno.ELOOP)
# what separates folders, here or elsewhere, and what no file may be called on other systems
_FORBIDDEN = frozenset('/\\:*?"<>|\uff0e\u2215\u2216\ufffd\ufeff')


async def save_or_restore(service: Service, request: Request, slot: int, salt: bytes) -> dict[str, Any]:
    """What the answer tells. Raises WireError."""
    folder, settings = folder_of(service), service.settings
    body = await read_body(request, min(settings.max_body, SHORT), settings.body_seconds)
    name = Fields(loads(body)).text("filename")
    work = _save if request.query_params["action"] == "save" else _restore
    return await work(service, slot, salt, _path(folder, name))


def folder_of(service: Service) -> str:
    """Raises WireError where there is none."""
    if not service.settings.slot_save_path:
        raise unsupported("This server does not support slots action. Start it with `--slot-save-path`")
    return service.settings.slot_save_path


async def _save(service: Service, slot: int, salt: bytes, path: Path) -> dict[str, Any]:
    text = await own_text(service.slots, slot, salt)
    if text.edits:
        raise invalid(
            "Unable to save slot: its text was edited, so that its cells are not those of its tokens"
        )

    def save() -> tuple[int, int]:
        n = service.engine.save_prefix(path, text.ids, salt=salt, adapters=text.adapters) if text.ids else 0
        return n, path.stat().st_size if n else 0

    begin = time.perf_counter()
    try:
        n_tokens, n_bytes = await asyncio.to_thread(save)
    except (OSError, MemoryError, KVGraphError) as error:
        raise _failure("save", error) from error
    told = {"id_slot": slot, "filename": path.name, "n_saved": n_tokens, "n_written": n_bytes}
    return {**told, "timings": {"save_ms": (time.perf_counter() - begin) * 1e3}}


async def _restore(service: Service, slot: int, salt: bytes, path: Path) -> dict[str, Any]:
    await service.slots.text(slot)
    adapters = service.adapters.of(Fields({}))

    def restore() -> tuple[list[int], int]:
        n_bytes = path.stat().st_size
        if n_bytes > _most_bytes(service):
            raise StateError("the file is larger than the cache")
        return service.engine.load_prefix(path, salt=salt, adapters=adapters), n_bytes

    begin = time.perf_counter()
    try:
        ids, n_bytes = await asyncio.to_thread(restore)
    except (OSError, MemoryError, KVGraphError) as error:
        raise _failure("restore", error) from error
    service.slots.put(slot, Text(ids, salt, adapters))
    told = {"id_slot": slot, "filename": path.name, "n_restored": len(ids), "n_read": n_bytes}
    return {**told, "timings": {"restore_ms": (time.perf_counter() - begin) * 1e3}}


def _path(folder: str, name: str) -> Path:
    """The file of that name in the folder. Raises WireError for what might be elsewhere."""
    printable = name.isprintable() and not _FORBIDDEN.intersection(name)
    if not printable or ".." in name or name[-1:] in ("", " ", ".") or name[0] == " ":
        raise invalid("Invalid filename")
    if len(name.encode()) > _LONGEST:
        raise invalid("Invalid filename")
    path = Path(folder) / name
    kind = _kind(path)
    if kind is not None and not stat.S_ISREG(kind):
        raise invalid("Invalid filename: there is a link, a folder or a device of this name, and no file")
    return path


def _kind(path: Path) -> int | None:
    """As lstat() has it; None: there is nothing, or what is wrong with the name is said by who opens it."""
    try:
        return path.lstat().st_mode
    except OSError:
        return None


def _most_bytes(service: Service) -> int:
    """More than a file of this cache can have, and little enough to be read."""
    return (
        2 * sum(group.n_cells * group.cell_bytes for group in service.engine.context.kv.groups) + _HEAD_BYTES
    )


def _failure(what: str, error: Exception) -> WireError:
    """What a client hears of an action that came to nothing; without the path, which clients are not told."""
    if not isinstance(error, OSError):
        told = as_wire(error)
        return WireError(told.code, told.kind, f"Unable to {what} slot: {error or 'out of memory'}")
    reason = error.strerror or os.strerror(error.errno or 0)
    message = f"Unable to {what} slot: {reason}"
    if error.errno in _OF_PERMISSION:
        return WireError(403, "permission_error", message)
    if error.errno in _OF_NAME or (error.errno == errno.ENOENT and what == "restore"):
        return invalid(message)
    return WireError(500, SERVER, message)
