"""The types that K and V are stored in, as they are written: "q8_0"; "f16:q4_0@1024" for rows that age."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from pykvgraph._native.ffi import KvgType
from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError

# by name; the numbers are those of kvgraph.h and of ggml
CACHE_TYPES: dict[str, int] = {kind.name.removeprefix("KVG_TYPE_").lower(): kind for kind in KvgType}
_STEP = 128  # AGING_STEP of native/src/memory/aging.h: the number of fresh cells is a multiple of it
_WRITTEN = re.compile(r"(\w+)(?::(\w+)@([0-9]{1,9}))?", re.ASCII)


class StoredAs(NamedTuple):
    """The type of new rows of K or V; of rows that age also the type of old ones.

    age: how many of the last tokens have rows of the fresh type. old, age: "" and 0 where rows don't age.
    """

    fresh: str
    old: str = ""
    age: int = 0

    def __str__(self) -> str:
        return f"{self.fresh}:{self.old}@{self.age}" if self.old else self.fresh


def parse_cache_type(value: Any, name: str) -> StoredAs:
    """Reads a type as it is written, in any case. Raises InvalidArgumentError, which names `name`."""
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
    """How many cells have rows of the fresh types: the age, rounded up to a multiple of 128. 0: all cells.

    Raises InvalidArgumentError where K and V have two ages.
    """
    if type_k.age and type_v.age and type_k.age != type_v.age:
        raise InvalidArgumentError(
            f"type_k and type_v must age after the same number of tokens, got {type_k.age} and {type_v.age}"
        )
    return -(-max(type_k.age, type_v.age) // _STEP) * _STEP
