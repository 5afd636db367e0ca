"""What is remembered from run to run, in files of the user's cache directory: it can be found out again."""

from __future__ import annotations

import json
import os
from typing import Any

from pykvgraph import env

_MOST_BYTES = 4 << 20  # of a file: larger ones are not ours


def recall(name: str) -> dict[str, Any]:
    """What a file of this name says; {} when there is none, or when it is anything but a JSON object.

    Anybody may have written it: callers check each value.
    """
    path = env.cache_folder() / name
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return {}
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def remember(name: str, known: dict[str, Any]) -> None:
    """Writes the file, whole or not at all. Where that can't be done, it is found out again next time."""
    path = env.cache_folder() / name
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(known), encoding="utf-8")
        part.replace(path)
    except OSError:
        return
