"""The types that K and V are stored in, as they are written: "q8_0"; "f16:q4_0@1024" for rows that age."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from pykvgraph._native.ffi import KvgType
from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError

# by name; the numbers are those of kvgraph.h and of ggml
CACHE_TYPES: dict[str, int] = {kind.name.removeprefix("KVG_TYPE_").lower(): kind for kind in KvgType}
_STEP = 128  # cells that age at a time
_WRITTEN = re.compile(r"(\w+)(?::(\w+)@(\d{1,9}))?")


class StoredAs(NamedTuple):
    """How rows of K or V are stored: as `fresh`, and once `age` later tokens are there as `old`.

    old, age: "" and 0 where rows stay as they are.
    """

    fresh: str
    old: str = ""
    age: int = 0

    def __str__(self) -> str:
        return f"{self.fresh}:{self.old}@{self.age}" if self.old else self.fresh


def parse_cache_type(value: Any, name: str) -> StoredAs:
    """A type as it is written. Raises InvalidArgumentError, which says `name`."""
    found = _WRITTEN.fullmatch(value.lower()) if isinstance(value, str) else None
    fresh, old, age = found.groups() if found else ("", "", "")
    if fresh not in CACHE_TYPES or (old and (old not in CACHE_TYPES or int(age) == 0)):
        expected = ", ".join(map(repr, CACHE_TYPES))
        raise InvalidArgumentError(
            f"{name} must be one of {expected}, or two of them and for how many tokens the first one, "
            f'as in "f16:q4_0@1024"; got {shown(value)}'
        )
    return StoredAs(fresh, old or "", int(age or 0))


def fresh_cells(type_k: StoredAs, type_v: StoredAs) -> int:
    """How many cells have fresh rows, in whole steps of aging; 0: all. Raises InvalidArgumentError."""
    if type_k.age and type_v.age and type_k.age != type_v.age:
        raise InvalidArgumentError(
            f"type_k and type_v must age after the same number of tokens, got {type_k.age} and {type_v.age}"
        )
    return -(-max(type_k.age, type_v.age) // _STEP) * _STEP
