"""Who runs, and which tokens the next step decodes: queues of texts, without a cache or a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.waiting import Waiting
from pykvgraph.model.adapter import Active


class Chunk(NamedTuple):
    """The next n tokens of a text; ends: whether no known token is left then, so that another is said.

    draft: tokens that may follow, decoded as well.
    """

    sequence: RequestSequence
    n: int
    ends: bool
    draft: tuple[int, ...] = ()

    @property
    def decodes(self) -> bool:
        """Whether it is the last token of an answer, and no part of a prompt."""
        return self.ends and self.n == 1

    @property
    def is_single(self) -> bool:
        """Whether it is decoded as one token, or one of each beam, without a draft."""
        return self.decodes and not self.draft

    @property
    def n_outputs(self) -> int:
        """How many outputs its decode has: of the last known token, and of each token of the draft."""
        return self.sequence.n_rows + len(self.draft) if self.ends else 0

    @property
    def n_rows(self) -> int:
        """How many tokens are decoded for it, without a draft: of beams one each, else n."""
        return self.sequence.n_rows if self.decodes else self.n


class Scheduler:
    """Texts that wait and texts that run; n_seq_max of them have a sequence.

    Waiting texts are in the order in which they may enter: higher priority first, then as they came. A text
    that was preempted comes back before those that came after it.
    """

    def __init__(self, n_seq_max: int, n_batch: int) -> None:
        self.waiting = Waiting()
        self.running: list[RequestSequence] = []
        self._free_seqs = list(range(n_seq_max - 1, -1, -1))
        self._n_seq_max = n_seq_max
        self._n_batch = n_batch
        self._n_came = 0
        self._n_turns = 0
        self._turns: dict[Active, int] = {}  # of adapters that texts run under: when they had theirs last

    @property
    def n_free_seqs(self) -> int:
        """Sequences that nobody has."""
        return len(self._free_seqs)

    def arrive(self, sequence: RequestSequence) -> None:
        """A new text waits."""
        self._n_came += 1
        sequence.order = self._n_came
        self.wait(sequence)

    def wait(self, sequence: RequestSequence) -> None:
        """A text waits, in its place."""
        self.waiting.add(sequence)

    def enter(self, sequence: RequestSequence) -> None:
        """A waiting text gets sequences for itself and its forks, and runs."""
        self.waiting.remove(sequence)
        sequence.seq = self._free_seqs.pop()
        sequence.fork_seqs = [self._free_seqs.pop() for _ in range(sequence.n_seqs - 1)]
        sequence.n_idle = 0
        self.running.append(sequence)

    def fork(self, sequence: RequestSequence) -> list[RequestSequence]:
        """The forks of a text, which run from now on in the sequences that were kept for them."""
        forks, sequence.forks = sequence.forks, []
        for each in forks:
            each.seq = sequence.fork_seqs.pop()
            each.order = sequence.order
            self.running.append(each)
        return forks

    def leave(self, sequence: RequestSequence) -> None:
        """A running text ends, or is preempted: its sequences are free again."""
        self.running.remove(sequence)
        self._free_seqs += [sequence.seq, *sequence.fork_seqs]
        sequence.seq, sequence.fork_seqs, sequence.unsaid = -1, [], None

    def borrow(self) -> int:
        """A sequence that nobody has, until give_back()."""
        return self._free_seqs.pop()

    def give_back(self, seq: int) -> None:
        """What borrow() gave."""
        self._free_seqs.append(seq)

    def youngest(self) -> RequestSequence:
        """Of the running texts with the lowest priority the one that came last."""
        return max(self.running, key=lambda each: (-each.priority, each.order))

    def chunks(self, n_prompt_tokens: int) -> list[Chunk]:
        """What the next step decodes: a token of each answer, then parts of prompts.

        All of them are under the same adapters: whose turn it is. n_prompt_tokens: how many tokens of prompts
        at most. Nobody is passed over more than n_seq_max times in a row by texts under the same adapters, if
        count_idle() hears of what is decoded: whoever was left out for longest comes first. Sets of adapters
        have turns, a step each.
        """
        room = self._n_batch
        chosen: list[Chunk] = []
        together = self._of_turn()
        decoding = [each for each in together if each.decodes]
        if sum(each.n_rows for each in decoding) > room:
            decoding = sorted(decoding, key=lambda each: -each.n_idle)
        for sequence in decoding:
            if sequence.n_rows <= room:
                chosen.append(Chunk(sequence, 1, True))
                room -= sequence.n_rows
        room = min(room, n_prompt_tokens)
        for sequence in self._readers(together):
            n = min(sequence.next_stop(), room)
            if n > 0:
                chosen.append(Chunk(sequence, n, n == sequence.n_todo))
                room -= n
        return chosen

    def count_idle(self, chosen: list[Chunk]) -> None:
        """These chunks are decoded now; who has none of them is passed over."""
        if chosen:
            self._n_turns += 1
            self._turns = {each.adapters: self._turns.get(each.adapters, 0) for each in self.running}
            self._turns[chosen[0].sequence.adapters] = self._n_turns
        advanced = {id(chunk.sequence) for chunk in chosen}
        for sequence in self.running:
            sequence.n_idle = 0 if id(sequence) in advanced else sequence.n_idle + 1

    def _of_turn(self) -> list[RequestSequence]:
        """Those that are decoded together: under the adapters that had their turn longest ago."""
        ready = [each for each in self.running if each.fetch is None and each.unsaid is None]
        if not ready:
            return []
        turn = min(ready, key=lambda each: self._turns.get(each.adapters, 0)).adapters
        return [each for each in ready if each.adapters == turn]

    def _readers(self, together: list[RequestSequence]) -> Iterator[RequestSequence]:
        """Texts whose prompts are decoded, in the order in which they get room: least left first.

        So the mean time to the first token is as short as can be; who is passed over comes first in the end.
        """
        reading = [each for each in together if not each.decodes]
        overdue = self._n_seq_max - 1
        yield from sorted(
            reading, key=lambda each: (each.n_idle < overdue, -each.priority, each.n_todo, each.order)
        )
