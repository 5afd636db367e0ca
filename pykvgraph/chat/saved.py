"""A conversation in a file: a zip archive of its turns as JSON, and of its cells as kv.save() gives them."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import asdict, dataclass
from typing import Any

from pykvgraph.chat.turn_tokens import Turn
from pykvgraph.checks import INT32_MAX, integer, integers
from pykvgraph.errors import InvalidArgumentError, StateError

_TURNS, _CELLS = "conversation.json", "cells.kvgstate"
_VERSION = 1
_MAX_JSON = 64 << 20  # bytes


@dataclass(frozen=True)
class Saved:
    """What is saved of a conversation.

    front, turns: as tokens. held: the tokens that the cells have. head: the positions of the first of them.
    """

    system: str
    front: list[int]
    turns: list[Turn]
    n_forgotten: int
    held: list[int]
    head: list[int]
    cells: bytes


def pack(saved: Saved) -> bytes:
    """A file that unpack() gives the same for."""
    said = {name: value for name, value in asdict(saved).items() if name != "cells"}
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(_TURNS, json.dumps({"version": _VERSION, **said}))
        archive.writestr(_CELLS, saved.cells)
    return file.getvalue()


def unpack(data: bytes, n_vocab: int) -> Saved:
    """Reads a file from anywhere. Raises StateError for what is no saved conversation, or a damaged one."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise ValueError("its parts are compressed")
            if archive.getinfo(_TURNS).file_size > _MAX_JSON:
                raise ValueError(f"{_TURNS} is too large")
            return _read(json.loads(archive.read(_TURNS)), archive.read(_CELLS), n_vocab)
    except (
        zipfile.BadZipFile,
        RecursionError,
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
        OSError,
    ) as error:
        raise StateError(f"this is no saved conversation, or it is damaged: {error}") from error
    except (RuntimeError, EOFError) as error:  # an encrypted part, or one that is cut short
        raise StateError(f"this saved conversation can't be read: {error}") from error


def _read(said: Any, cells: bytes, n_vocab: int) -> Saved:
    if said["version"] != _VERSION:
        raise ValueError(f"its version is {said['version']!r}, and {_VERSION} is known")

    def tokens(value: Any) -> list[int]:
        found: list[int] = integers(value, "its tokens", 0, n_vocab - 1).tolist()
        return found

    def text(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{value!r} is no text")
        value.encode()  # half a surrogate pair is a ValueError
        return value

    try:
        turns = [
            Turn(
                text(turn["user"]),
                tokens(turn["prompt"]),
                integer(turn["n_header"], "n_header", 0, len(turn["prompt"])),
                tokens(turn["said"]),
            )
            for turn in said["turns"]
        ]
        n_forgotten = integer(said["n_forgotten"], "n_forgotten", 0, INT32_MAX)
        front, held = tokens(said["front"]), tokens(said["held"])
        head: list[int] = integers(said["head"], "its positions", 0, INT32_MAX).tolist()
        if head != sorted(head) or len(head) > len(held):
            raise ValueError("its positions are not in order")
        return Saved(text(said["system"]), front, turns, n_forgotten, held, head, cells)
    except InvalidArgumentError as error:
        raise ValueError(str(error)) from error
