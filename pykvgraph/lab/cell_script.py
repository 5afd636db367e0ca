"""Scripts of cache operations, one per line, for looking at what they do to the cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pykvgraph.batch import Batch
from pykvgraph.context import Context
from pykvgraph.errors import CacheFullError, InvalidArgumentError
from pykvgraph.types import UpdateStats

DEMONSTRATION = """\
decode 0 16          # a prompt
seq_cp 0 1 0 -1      # a second sequence sees it too: nothing is copied
decode 0 8           # each goes on in its own way
decode 1 8
decode 0 8
decode 1 4
seq_rm 0 16 24       # the first gives up its middle: a hole
seq_add 0 24 -1 -8   # and closes the gap: K waits to be turned
defrag fill          # asked for, not done yet
update               # K is turned, the tail fills the hole
seq_add 1 12 -1 4    # shared cells that move are copied first
defrag sort
update               # one run for each set of sequences
"""

_NO_TOKEN = 0  # any will do: only the cells are looked at


@dataclass(frozen=True)
class Operation:
    """A line of a script. seq: the sequence that it is about, if there is one."""

    line: int  # from 1
    text: str
    name: str
    arguments: tuple[int | str, ...]
    comment: str = ""

    @property
    def seq(self) -> int | None:
        """The sequence whose tokens it changes."""
        if not self.arguments or isinstance(self.arguments[0], str):
            return None
        seq = self.arguments[1 if self.name == "seq_cp" else 0]
        assert isinstance(seq, int)
        return seq if seq >= 0 else None

    def apply(self, ctx: Context) -> UpdateStats:
        """Does it, and tells what was shifted and moved on the way. Raises what the operation raises."""
        ctx.kv.take_stats()  # what an earlier one left
        stats = _OPERATIONS[self.name][1](ctx, *self.arguments)
        return stats or ctx.kv.take_stats()


def parse(script: str) -> list[Operation]:
    """The operations of a script. Raises InvalidArgumentError, which names the first line that won't do."""
    operations = []
    for number, line in enumerate(script.splitlines(), 1):
        code, _, comment = line.partition("#")
        text = " ".join(code.split())
        if text:
            name, *words = text.split(" ")
            operations.append(Operation(number, text, name, _arguments(number, name, words), comment.strip()))
    return operations


def _arguments(number: int, name: str, words: list[str]) -> tuple[int | str, ...]:
    if name not in _OPERATIONS:
        known = ", ".join(_OPERATIONS)
        raise InvalidArgumentError(f"line {number}: there is no operation {name!r}, expected one of {known}")
    parameters, _ = _OPERATIONS[name]
    expected = " ".join((name, *parameters))
    if len(words) != len(parameters):
        raise InvalidArgumentError(
            f"line {number}: {name} takes {len(parameters)} arguments, got {len(words)}: "
            f"expected `{expected}`"
        )
    return tuple(
        _argument(number, word, parameter, expected)
        for word, parameter in zip(words, parameters, strict=True)
    )


def _argument(number: int, word: str, parameter: str, expected: str) -> int | str:
    if "|" in parameter:
        if word in parameter.split("|"):
            return word
        wanted = parameter.replace("|", " or ")
    else:
        try:
            return int(word)
        except ValueError:
            wanted = "an integer"
    raise InvalidArgumentError(f"line {number}: {word!r} is not {wanted}, in `{expected}`")


def _decode(ctx: Context, seq: int, n: int) -> None:
    n_free = ctx.kv.n_free
    if n > n_free:
        raise CacheFullError(f"{n} tokens need as many empty cells, and there are {n_free}")
    batch = Batch()
    batch.extend(np.full(max(n, 0), _NO_TOKEN), ctx.kv.seq_pos_max(seq) + 1, (seq,), logits=False)
    ctx.decode(batch)


def _cache(name: str) -> Callable[..., UpdateStats | None]:
    """The operation of that name of the cache."""
    return lambda ctx, *arguments: getattr(ctx.kv, name)(*arguments)


# name: its parameters, and what it does; `A|B` is one of these words, all else is an integer
_OPERATIONS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "decode": (("SEQ", "N"), _decode),
    "seq_rm": (("SEQ", "P0", "P1"), _cache("seq_rm")),
    "seq_cp": (("SRC", "DST", "P0", "P1"), _cache("seq_cp")),
    "seq_keep": (("SEQ",), _cache("seq_keep")),
    "seq_add": (("SEQ", "P0", "P1", "DELTA"), _cache("seq_add")),
    "seq_div": (("SEQ", "P0", "P1", "D"), _cache("seq_div")),
    "defrag": (("fill|sort",), _cache("defrag")),
    "update": ((), _cache("update")),
    "clear": ((), _cache("clear")),
}
