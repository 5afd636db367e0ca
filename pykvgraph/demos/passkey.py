"""The passkey test: a key is hidden in a long text of junk, and the model is asked for the key.

The text may be longer than the cache. It is the text of llama.cpp's passkey example, which comes from
Landmark Attention (arXiv:2305.16300).
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import integer
from pykvgraph.context.context import Context
from pykvgraph.context.context_shift import N_KEEP
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.model.model import Model
from pykvgraph.params.params import ContextParams
from pykvgraph.sequence.decode_loop import generate
from pykvgraph.sequence.long_reader import LongReader, extended
from pykvgraph.types import CellsView, ShiftReport

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them."
    " I will quiz you about the important information there."
)
JUNK = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
QUESTION = " What is the pass key? The pass key is"
MAX_KEY = 50000
N_ANSWER = 16  # tokens of the answer; a key has at most five digits


@dataclass(frozen=True)
class Task:
    """One passkey text. i_pos: pieces of junk before the key; None: a number drawn with the seed."""

    n_junk: int = 250
    i_pos: int | None = None
    n_grp: int = 1
    n_keep: int = N_KEEP
    seed: int = 1

    def __post_init__(self) -> None:
        integer(self.n_junk, "n_junk", 1)
        integer(self.n_grp, "n_grp", 1)
        integer(self.n_keep, "n_keep", 0)
        if self.i_pos is not None and not 0 <= self.i_pos <= self.n_junk:
            raise InvalidArgumentError(
                f"i_pos is {self.i_pos}, expected 0 to {self.n_junk}, the pieces of junk"
            )

    def drawn(self) -> tuple[str, int]:
        """The key, and how many pieces of junk come before it, drawn with the seed."""
        rng = random.Random(self.seed)
        key = str(rng.randint(1, MAX_KEY))
        return key, rng.randrange(self.n_junk) if self.i_pos is None else self.i_pos


@dataclass(frozen=True)
class Trial:
    """The result of a task. in_window: the whole line with the key was in the cache at the question."""

    key: str
    answer: str
    found: bool
    in_window: bool
    i_pos: int
    n_tokens: int
    discards: int  # times that old text was given up
    shifted_cells: int  # by these; not what self-extend rotates, nor what waits (UpdateStats)
    moved_cells: int
    key_cells_moved: int
    seconds: float


def default_n_ctx(model: Model, n_grp: int, n_keep: int) -> int:
    """Cells for a task, as llama.cpp's example takes them: n_grp trained contexts, and what is kept.

    A model that was trained for more than Context's default counts as trained for that: a text of that length
    is soon read, and the proof is the same.
    """
    return min(model.n_ctx_train, ContextParams.n_ctx) * n_grp + n_keep


def tokens_per_line(model: Model) -> float:
    """How many tokens a piece of junk has."""
    return len(model.tokenizer.encode(JUNK * 10, add_special=False)) / 10


def run(
    ctx: Context,
    task: Task,
    on_shift: Callable[[ShiftReport], None] | None = None,
    on_cells: Callable[[str, CellsView, list[int]], None] | None = None,
) -> Trial:
    """Clears the context, reads the task's text and asks for the key. Raises what Context.decode raises.

    on_cells: called with what was done, the cells, and which of them have the key's line: before and after
    each shift, after each self-extend, and before the question.
    """
    start = time.perf_counter()
    key, i_pos = task.drawn()
    document, key_span = document_of(ctx.model, task)
    question = ctx.model.tokenizer.encode(QUESTION, add_special=False)
    ctx.reset()
    key_cells = _KeyCells(ctx.kv, key_span)
    shifts: list[ShiftReport] = []

    def show(done: str) -> None:
        if on_cells is not None:
            on_cells(done, *key_cells.now())

    def before_shift() -> None:
        key_cells.look()
        show("full")

    def extended_by(p0: int, p1: int, n_grp: int) -> None:
        key_cells.extended(p0, p1, n_grp)
        show(f"grouped by {n_grp}")

    def shifted(report: ShiftReport) -> None:
        shifts.append(report)
        key_cells.shifted(report)
        show(f"shift {len(shifts)}: {report.stats.moved_cells} moved")
        if on_shift is not None:
            on_shift(report)

    reader = LongReader(
        ctx,
        n_keep=task.n_keep,
        n_grp=task.n_grp,
        before_shift=before_shift,
        on_shift=shifted,
        on_extend=extended_by,
    )
    reader.read(document)
    reader.make_room(len(question) + N_ANSWER)
    show("the question")
    answer = "".join(piece.text for piece in generate(ctx, question, max_tokens=N_ANSWER, stop=".")).strip()
    digits = re.match(r"\d+", answer)
    return Trial(
        key=key,
        answer=answer,
        found=digits is not None and digits[0] == key,
        in_window=key_cells.all_there(),
        i_pos=i_pos,
        n_tokens=len(document) + len(question),
        discards=len(shifts),
        shifted_cells=sum(report.stats.shifted_cells for report in shifts),
        moved_cells=sum(report.stats.moved_cells for report in shifts),
        key_cells_moved=key_cells.n_moved,
        seconds=time.perf_counter() - start,
    )


def document_of(model: Model, task: Task) -> tuple[list[int], range]:
    """The tokens of the text without the question, and the range of them that is the key's line."""
    key, i_pos = task.drawn()
    tokenizer = model.tokenizer
    before = TASK + JUNK * i_pos
    with_key = f"{before} The pass key is {key}. Remember it. {key} is the pass key."
    document = tokenizer.encode(with_key + JUNK * (task.n_junk - i_pos))
    return document, range(len(tokenizer.encode(before)), len(tokenizer.encode(with_key)))


class _KeyCells:
    """Follows the cells of the key's line by their positions, which each operation changes in a known way.

    A token that is not decoded yet counts with the position that it would get now; an operation that changes
    the end of the text changes this position too. With n_grp above 1, tokens share positions. Then a
    neighbour at the same position as an end of the line counts as a part of the line.
    """

    def __init__(self, kv: KVCache, span: range) -> None:
        self._kv = kv
        self._pos: npt.NDArray[np.int64] = np.arange(span.start, span.stop)
        self._n_tokens = len(self._pos)
        self._before = kv.cells()
        self.n_moved = 0

    def extended(self, p0: int, p1: int, n_grp: int) -> None:
        self._pos = extended(self._pos, p0, p1, n_grp)

    def look(self) -> None:
        """Call it before a shift."""
        self._before = self._kv.cells()

    def shifted(self, report: ShiftReport) -> None:
        end = report.n_keep + report.n_discard
        left = self._pos[(self._pos < report.n_keep) | (self._pos >= end)]
        self._pos = np.where(left >= end, left - report.n_discard, left)
        # a cell of a discarded token may now have another token of the line in it
        places = set(_places(self._before, left))
        self.n_moved += len(set(_places(self._kv.cells(), self._pos)) - places)

    def now(self) -> tuple[CellsView, list[int]]:
        """The cells of the cache, and which of them have the line."""
        view = self._kv.cells()
        return view, _places(view, self._pos)

    def all_there(self) -> bool:
        return len(self._pos) == self._n_tokens


def _places(view: CellsView, positions: npt.NDArray[np.int64]) -> list[int]:
    """The cells at these positions."""
    return [int(cell) for cell in np.flatnonzero(view.seq[:, 0] & np.isin(view.pos, positions))]
