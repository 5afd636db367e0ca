"""Who is answered: llama-server's slots, each of which has one text at a time."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from pykvgraph.model.adapter import Active
from pykvgraph.openai.sample import Sample
from pykvgraph.server.free_slots import FreeSlots
from pykvgraph.server.requests.sampling import told_briefly

_ANY = -1  # slot


class Text(NamedTuple):
    """A text that a slot had. salt: whose prefixes it shares. adapters: that it was decoded under.

    without: tokens of its prompt without messages of these numbers, where it is of a conversation. n_prompt:
    tokens of the prompt. edits: the salt of what became of it in the slot since it was decoded; b"": nothing.
    n_exact: of an edited one, its first tokens that are as if nothing had.
    """

    ids: list[int]
    salt: bytes
    adapters: Active = ()
    without: Callable[[Collection[int]], list[int]] | None = None
    n_prompt: int = 0
    edits: bytes = b""
    n_exact: int = 0

    @property
    def salt_of_cells(self) -> bytes:
        """Under which the engine has them: those of an edited text are for who names its slot."""
        return self.edits or self.salt

    def has_begun(self, ids: list[int], salt: bytes) -> bool:
        """Whether another text of the same owner begins with more of it than with its exact beginning."""
        n = self.n_exact + 1
        return self.salt == salt and bool(self.edits) and len(ids) >= n and ids[:n] == self.ids[:n]


class Slots:
    """Gives slots to samples as they come; who comes when all are taken waits for the next one.

    A sample that wants a certain slot waits for that one; meanwhile later samples may take others. Nobody
    waits for a slot that is free: so who comes, leaves or goes away is settled at once, however many wait.
    """

    def __init__(self, n: int, has_drafts: bool, first: int = 0) -> None:
        self.n = n
        self.ids = range(first, first + n)
        self._has_drafts = has_drafts
        self._free = FreeSlots(self.ids)
        # who waits for any slot, _ANY, and for a certain one: by numbers in the order in which they came
        self._queues: dict[int, OrderedDict[int, Sample]] = {
            wanted: OrderedDict() for wanted in (_ANY, *self.ids)
        }
        self._numbers: dict[int, int] = {}  # of those who wait, by id()
        self._last: dict[int, Sample | None] = dict.fromkeys(self.ids)  # that each slot has, or had
        self._texts = dict.fromkeys(self.ids, Text([], b""))  # that each slot had last
        # who waits until a slot's text has ended
        self._ends: dict[int, list[asyncio.Future[None]]] = {slot: [] for slot in self.ids}
        self._tasks = dict.fromkeys(self.ids, 0)
        self._count = itertools.count()
        self._came = dict.fromkeys(self.ids, -1)  # when each slot got its text: a number of _n_came; -1: none
        self._n_came = itertools.count()

    @property
    def n_processing(self) -> int:
        """Slots that are taken."""
        return self.n - len(self._free)

    @property
    def n_deferred(self) -> int:
        """Samples that wait."""
        return len(self._numbers)

    def enter(self, sample: Sample) -> None:
        """A sample comes. It wants one of `ids`, or any."""
        slot = self._free.least if sample.wanted_slot < 0 else sample.wanted_slot
        if slot in self._free:
            self._free.take(slot)
            self._give(slot, sample)
            return
        number = self._numbers[id(sample)] = next(self._n_came)
        self._queues[max(sample.wanted_slot, _ANY)][number] = sample

    def leave(self, sample: Sample) -> None:
        """It has ended, or goes away."""
        number, slot = self._numbers.pop(id(sample), None), sample.slot
        if number is not None:
            del self._queues[max(sample.wanted_slot, _ANY)][number]
        elif slot >= 0 and self._last[slot] is sample and slot not in self._free:
            ids, n_prompt = sample.prompt + sample.tokens, len(sample.prompt)
            text = Text(ids, sample.salt, sample.adapters, sample.without, n_prompt)
            self._texts[slot] = text._replace(edits=sample.edits, n_exact=sample.n_exact)
            for end in self._ends[slot]:
                if not end.done():
                    end.set_result(None)
            self._ends[slot].clear()
            self._give_to_next(slot)

    async def text(self, slot: int) -> Text:
        """What the slot had last; while it is taken, waits for the one that has it."""
        if slot not in self._free:
            end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._ends[slot].append(end)
            await end
        return self._texts[slot]

    def last_text(self, slot: int) -> Text:
        """What the slot had last, whoever has it now."""
        return self._texts[slot]

    def longest_free(self, but: int) -> int:
        """The free slot that got its text longest ago, and not this one; -1: there is none."""
        found = [slot for slot in self.ids if slot in self._free and slot != but]
        return min(found, key=lambda slot: self._came[slot], default=-1)

    def put(self, slot: int, text: Text) -> None:
        """The slot has another text than the one that it had last."""
        self._texts[slot] = text
        self._came[slot] = next(self._n_came) if text.ids else -1

    def told(self, n_ctx: int) -> list[dict[str, Any]]:
        """What /slots tells."""
        return [self._told(slot, n_ctx) for slot in self.ids]

    def _give_to_next(self, slot: int) -> None:
        """Who came first, of those that wait for this slot and for any."""
        queues = [queue for queue in (self._queues[_ANY], self._queues[slot]) if queue]
        if not queues:
            self._free.add(slot)
            return
        _, sample = min(queues, key=lambda queue: next(iter(queue))).popitem(last=False)
        del self._numbers[id(sample)]
        self._give(slot, sample)

    def _give(self, slot: int, sample: Sample) -> None:
        sample.slot = slot
        self._last[slot] = sample
        self._tasks[slot] = next(self._count)
        self._came[slot] = next(self._n_came)

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
        n_left = sample.n_predict - sample.n_said if runs and sample.n_predict >= 0 else -1
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
                    "n_decoded": sample.n_said if runs else 0,
                }
            ],
        }


async def own_text(slots: Slots, slot: int, salt: bytes) -> Text:
    """The slot's last text, while it is taken waited for; of somebody else's, nothing."""
    text = await slots.text(slot)
    return text if text.salt == salt else Text([], salt)
