"""The SHA-256 of a model's file, read once and remembered."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pykvgraph._native.library import lib
from pykvgraph.download.cache_file import recall, remember
from pykvgraph.model.gguf_file import read_parts
from pykvgraph.model.model import Model

_READ_BYTES = 1 << 20
_KNOWN = "digests.json"


def file_digest(model: Model) -> bytes:
    """The SHA-256 of the model's file, or of all its parts one after the other.

    It is read once: then the digest is remembered by what tells a file from another, its device and inode,
    size and time, in the user's cache directory.
    """
    known = {place: digest for place, digest in recall(_KNOWN).items() if _is_digest(digest)}
    whole = hashlib.sha256()
    changed = False
    for path, _ in model._handle.call(lambda model: read_parts(lib().kvg_model_gguf(model))):
        place = _identity(path)
        if place not in known:
            known[place] = _digest_of(path)
            changed = True
        whole.update(bytes.fromhex(known[place]))
    if changed:
        remember(_KNOWN, known)
    return whole.digest()


def _identity(path: Path) -> str:
    found = path.stat()
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}"


def _digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while part := file.read(_READ_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _is_digest(text: Any) -> bool:
    return isinstance(text, str) and len(text) == 64 and all(c in "0123456789abcdef" for c in text)
