"""Scripts of cache operations, one operation per line. `pykvgraph cells` shows the cells after each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context
from pykvgraph.errors import CacheFullError, InvalidArgumentError
from pykvgraph.types import UpdateStats

DEMONSTRATION = """\
decode 0 16          # a prompt
seq_cp 0 1 0 -1      # a second sequence sees it too: nothing is copied
decode 0 8           # then each sequence gets tokens of its own
decode 1 8
decode 0 8
decode 1 4
seq_rm 0 16 24       # positions of the first are removed: a hole
seq_add 0 24 -1 -8   # later positions close the gap: K-shift pending
defrag fill          # requested, not done yet
update               # cells from the end fill the hole, K is rotated
seq_add 1 12 -1 4    # shared cells are copied before they are shifted
defrag sort
update               # one run for each set of sequences
"""

_NO_TOKEN = 0  # any token id: only the cells are shown


@dataclass(frozen=True)
class Operation:
    """A line of a script."""

    line: int  # from 1
    text: str
    name: str
    arguments: tuple[int | str, ...]
    comment: str = ""

    @property
    def seq(self) -> int | None:
        """The sequence that the operation changes; None when there is none, or when it changes all."""
        if not self.arguments or isinstance(self.arguments[0], str):
            return None
        seq = self.arguments[1 if self.name == "seq_cp" else 0]
        assert isinstance(seq, int)
        return seq if seq >= 0 else None

    def apply(self, ctx: Context) -> UpdateStats:
        """Runs the operation; returns counts of rotated and moved cells. Raises what the operation raises."""
        ctx.kv.take_stats()  # drop the counts of earlier operations
        stats = _OPERATIONS[self.name][1](ctx, *self.arguments)
        return stats or ctx.kv.take_stats()


def parse(script: str) -> list[Operation]:
    """The operations of a script. Raises InvalidArgumentError, which names the first wrong line."""
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


def _checkpoint(ctx: Context, seq: int) -> None:
    ctx.kv.checkpoint(seq)


def _rewind(ctx: Context, seq: int, p: int) -> None:
    ctx.kv.rewind(seq, p)


def _cache(name: str) -> Callable[..., UpdateStats | None]:
    """Calls the cache's method of that name."""
    return lambda ctx, *arguments: getattr(ctx.kv, name)(*arguments)


# name: (parameters, function). A parameter `A|B` is one of these words; every other one is an integer
_OPERATIONS: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "decode": (("SEQ", "N"), _decode),
    "seq_rm": (("SEQ", "P0", "P1"), _cache("seq_rm")),
    "seq_cp": (("SRC", "DST", "P0", "P1"), _cache("seq_cp")),
    "seq_keep": (("SEQ",), _cache("seq_keep")),
    "seq_add": (("SEQ", "P0", "P1", "DELTA"), _cache("seq_add")),
    "seq_div": (("SEQ", "P0", "P1", "D"), _cache("seq_div")),
    "checkpoint": (("SEQ",), _checkpoint),
    "rewind": (("SEQ", "P"), _rewind),
    "defrag": (("fill|sort",), _cache("defrag")),
    "update": ((), _cache("update")),
    "clear": ((), _cache("clear")),
}
