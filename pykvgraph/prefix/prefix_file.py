"""A prefix in a file: its tokens, and their cells as kv.save() gives them."""

from __future__ import annotations

import os
import struct
import zlib
from array import array
from typing import NamedTuple

from pykvgraph.errors import StateError
from pykvgraph.kv_cache.saved.file import read_regular

_MAGIC = b"kvgtext\1"
_HEAD = struct.Struct("<8sII")  # magic, number of tokens, CRC-32 of their ids


class SavedPrefix(NamedTuple):
    """ids: the tokens. cells: a saved sequence that has them at positions 0, 1, and so on."""

    ids: array[int]
    cells: bytes


def pack(saved: SavedPrefix) -> bytes:
    """A file's bytes that unpack() gives the same for."""
    ids = saved.ids.tobytes()
    return _HEAD.pack(_MAGIC, len(saved.ids), zlib.crc32(ids)) + ids + saved.cells


def unpack(data: bytes, n_vocab: int) -> SavedPrefix:
    """Reads bytes from anywhere; the cells are checked when they are loaded. Raises StateError."""
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        raise StateError("this is no saved prefix")
    _, n, checksum = _HEAD.unpack_from(data)
    end = _HEAD.size + 4 * n
    ids = data[_HEAD.size : end]
    if len(ids) != 4 * n or zlib.crc32(ids) != checksum:
        raise StateError("the saved prefix is damaged: its tokens are not those that were written")
    tokens = array("i", ids)
    if not tokens or min(tokens) < 0 or max(tokens) >= n_vocab:
        raise StateError("the saved prefix has tokens that are not in the model's vocabulary, or none")
    return SavedPrefix(tokens, data[end:])


def read(path: str | os.PathLike[str], n_vocab: int) -> SavedPrefix:
    """As unpack(), of a file. Raises OSError, too, when it can't be read."""
    return unpack(read_regular(path), n_vocab)
