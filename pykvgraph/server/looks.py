"""Who has the cells of the cache, and who is answered, as GET /cells and the page at / tell it."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvgraph.engine.types import EngineLook
from pykvgraph.kv_cache.maps.colors import SEQUENCE_COLORS, SHARED_COLOR, ink
from pykvgraph.kv_cache.maps.group import letter
from pykvgraph.server.http.reply import JsonReply
from pykvgraph.types import CellGroup, CellsView

EMPTY, HELD, SHARED = -1, -2, -3  # who has a cell, if it isn't one sequence
IS_HELD, IS_PENDING, IS_WAITING = 1, 2, 4  # marks, which are added up
MAX_PLACES = 4096  # of a group; with more cells several are one place
_SECONDS = 0.25  # from one look to the next, at least
_SHARE = 20  # and at least so many times as long as a look takes

_COLORS = {
    "shared": [SHARED_COLOR, ink(SHARED_COLOR)],
    "sequences": [[color, ink(color)] for color in SEQUENCE_COLORS],
}


class Looks:
    """Looks at the engine, at most every _SECONDS; whoever asks in between gets the last look.

    look: takes one. model_name: as answers tell it.
    """

    def __init__(self, look: Callable[[], EngineLook], model_name: str) -> None:
        self._look = look
        self._model_name = model_name
        self._looking = asyncio.Lock()
        self._reply: JsonReply | None = None
        self._next = 0.0  # when a new look may be taken

    async def told(self) -> JsonReply:
        """What /cells answers."""
        async with self._looking:
            begin = time.monotonic()
            if self._reply is None or begin >= self._next:
                self._reply = await asyncio.to_thread(self._told)
                end = time.monotonic()
                self._next = end + max(_SECONDS, _SHARE * (end - begin))
            return self._reply

    def _told(self) -> JsonReply:
        look = self._look()
        counts = dataclasses.asdict(look.stats)
        del counts["cells_used"]
        return JsonReply(
            {
                "seconds": look.seconds,
                "model": self._model_name,
                "colors": _COLORS,
                "groups": [_group(*each) for each in zip(look.groups, look.views, strict=True)],
                "running": _running(look),
                "waiting": [dataclasses.asdict(text) for text in look.waiting],
                **counts,
            }
        )


def places_of(view: CellsView) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Who has each place, and its marks. A place is a cell, or of a large cache as many as fit MAX_PLACES.

    A place with several cells is empty if all are; otherwise whoever has the most of them has it, and it has
    every mark that one of them has.
    """
    n_seqs = view.seq.sum(axis=1)
    seen = np.where(n_seqs > 1, SHARED, view.seq.argmax(axis=1))
    who = np.where(n_seqs > 0, seen, np.where(view.held > 0, HELD, EMPTY)).astype(np.int64)
    marks = IS_HELD * (view.held > 0) + np.where(view.waiting, IS_WAITING, IS_PENDING) * (view.shift != 0)
    per_place = cells_of_a_place(len(who))
    if per_place == 1:
        return who, marks
    begins = np.arange(0, len(who), per_place)
    n_kinds = view.seq.shape[1] - SHARED
    place = np.arange(len(who)) // per_place
    counts = np.bincount(place * n_kinds + who - SHARED, minlength=len(begins) * n_kinds)
    counts = counts.reshape(-1, n_kinds)
    counts[:, EMPTY - SHARED] = counts.sum(axis=1) == counts[:, EMPTY - SHARED]
    return counts.argmax(axis=1) + SHARED, np.bitwise_or.reduceat(marks, begins)


def cells_of_a_place(n_cells: int) -> int:
    """How many cells are one place."""
    return max(-(-n_cells // MAX_PLACES), 1)


def runs_of(who: npt.NDArray[np.int64], marks: npt.NDArray[np.int64]) -> list[int]:
    """Places that follow each other and are equal: their number, who has them, and their marks, of each."""
    changes = np.flatnonzero((np.diff(who) != 0) | (np.diff(marks) != 0)) + 1
    begins = np.concatenate([np.zeros(min(len(who), 1), np.int64), changes])
    lengths = np.diff(begins, append=len(who))
    found: list[int] = np.stack([lengths, who[begins], marks[begins]], axis=1).ravel().tolist()
    return found


def _group(group: CellGroup, view: CellsView) -> dict[str, Any]:
    who, marks = places_of(view)
    n_seqs = view.seq.sum(axis=1)
    n_shifts_waiting = int(view.waiting.sum())
    return {
        "kind": group.kind,
        "window": group.window,
        "n_cells": group.n_cells,
        "n_used": view.n_used,
        "n_holes": view.n_kv - view.n_used,
        "n_shared": int((n_seqs > 1).sum()),
        "n_only_held": int(((n_seqs == 0) & (view.held > 0)).sum()),
        "n_shifts_pending": int((view.shift != 0).sum()) - n_shifts_waiting,
        "n_shifts_waiting": n_shifts_waiting,
        "cells_of_a_place": cells_of_a_place(group.n_cells),
        "runs": runs_of(who, marks),
    }


def _running(look: EngineLook) -> list[dict[str, Any]]:
    """With their cells of the first group: all of them, and those that others see, too."""
    seq = look.views[0].seq
    n_cells = seq.sum(axis=0).tolist()
    n_shared = seq[seq.sum(axis=1) > 1].sum(axis=0).tolist()
    return [
        dataclasses.asdict(text)
        | {"letter": letter(text.seq), "n_cells": n_cells[text.seq], "n_shared": n_shared[text.seq]}
        for text in look.running
    ]
