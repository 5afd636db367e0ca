"""Who is answered: llama-server's slots, each of which has one text at a time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import OrderedDict
from typing import Any, NamedTuple

from pykvgraph.adapter import Active
from pykvgraph.server.sample import Sample
from pykvgraph.server.sampling import told_briefly


class Text(NamedTuple):
    """A text that a slot had. salt: whose prefixes it shares. adapters: that it was decoded under."""

    ids: list[int]
    salt: bytes
    adapters: Active = ()


class Slots:
    """Gives slots to samples as they come; who comes when all are taken waits for the next one.

    A sample that wants a certain slot waits for that one; meanwhile later samples may take others.
    """

    def __init__(self, n: int, has_drafts: bool, first: int = 0) -> None:
        self.n = n
        self.ids = range(first, first + n)
        self._has_drafts = has_drafts
        self._free = list(self.ids)
        self._waiting: OrderedDict[int, Sample] = OrderedDict()  # by id()
        self._last: dict[int, Sample | None] = dict.fromkeys(self.ids)  # that each slot has, or had
        self._texts = dict.fromkeys(self.ids, Text([], b""))  # that each slot had last
        self._ends: dict[int, list[asyncio.Future[None]]] = {
            slot: [] for slot in self.ids
        }  # who waits for that
        self._tasks = dict.fromkeys(self.ids, 0)
        self._count = itertools.count()

    @property
    def n_processing(self) -> int:
        """Slots that are taken."""
        return self.n - len(self._free)

    @property
    def n_deferred(self) -> int:
        """Samples that wait."""
        return len(self._waiting)

    def enter(self, sample: Sample) -> None:
        """A sample comes."""
        self._waiting[id(sample)] = sample
        self._give()

    def leave(self, sample: Sample) -> None:
        """It has ended, or goes away."""
        if self._waiting.pop(id(sample), None) is not None or sample.slot < 0:
            return
        if self._last[sample.slot] is sample and sample.slot not in self._free:
            self._texts[sample.slot] = Text(sample.prompt + sample.tokens, sample.salt, sample.adapters)
            for end in self._ends[sample.slot]:
                if not end.done():
                    end.set_result(None)
            self._ends[sample.slot].clear()
            heapq.heappush(self._free, sample.slot)
            self._give()

    async def text(self, slot: int) -> Text:
        """What the slot had last; while it is taken, waits for the one that has it."""
        if slot not in self._free:
            end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._ends[slot].append(end)
            await end
        return self._texts[slot]

    def put(self, slot: int, text: Text) -> None:
        """The slot has another text than the one that it had last."""
        self._texts[slot] = text

    def told(self, n_ctx: int) -> list[dict[str, Any]]:
        """What /slots tells."""
        return [self._told(slot, n_ctx) for slot in self.ids]

    def _give(self) -> None:
        for sample in list(self._waiting.values()):
            if not self._free:
                return
            wanted = sample.wanted_slot
            if wanted >= 0 and wanted not in self._free:
                continue
            del self._waiting[id(sample)]
            sample.slot = self._take(wanted)
            self._last[sample.slot] = sample
            self._tasks[sample.slot] = next(self._count)

    def _take(self, wanted: int) -> int:
        if wanted < 0:
            return heapq.heappop(self._free)
        self._free.remove(wanted)
        heapq.heapify(self._free)
        return wanted

    def _told(self, slot: int, n_ctx: int) -> dict[str, Any]:
        runs = slot not in self._free
        told: dict[str, Any] = {
            "id": slot,
            "n_ctx": n_ctx,
            "speculative": self._has_drafts,
            "is_processing": runs,
        }
        sample = self._last[slot]
        if sample is None:
            return told
        n_left = sample.n_predict - sample.n_said if sample.n_predict >= 0 else -1
        n_decoded = len(sample.prompt) - sample.n_cached if sample.n_said else 0
        return told | {
            "id_task": self._tasks[slot],
            "n_prompt_tokens": len(sample.prompt) + sample.n_said,
            "n_prompt_tokens_processed": n_decoded,
            "n_prompt_tokens_cache": sample.n_cached,
            "params": told_briefly(sample.settings),
            "next_token": [
                {
                    "has_next_token": runs,
                    "has_new_line": "\n" in sample.text,
                    "n_remain": n_left,
                    "n_decoded": sample.n_said,
                }
            ],
        }
