"""A request that is answered by a beam search: one text for the engine, with a sequence for each beam."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from pykvgraph.context.context import LastOutput
from pykvgraph.engine.request_sequence import (
    ANY_TERMS,
    CacheTerms,
    RequestSequence,
    SaidText,
    SampleOwner,
    Tip,
)
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.model.adapter import Active
from pykvgraph.model.tokenizer import Tokenizer
from pykvgraph.params.params import SamplingParams
from pykvgraph.sequence.beam_search import Beam, BeamSearch
from pykvgraph.tiers.rows import Saver


class BeamSequence(RequestSequence):
    """The beams of a request, which run, wait and end together, and are decoded in one batch.

    Its sequences are `seq` and `fork_seqs`; the first ones have the live beams, the best first, and the
    others are empty. `ids` is the prompt with the best live beam. A beam sees the cells of the beam that it
    goes on from (KVCache.seq_cp), so that none is copied; cells that no live beam has are empty.

    What is said is handed out when the search is over: Request's pieces and completions are those of the n
    best texts. While it lasts, only the prompt's cells are for others to share. Where it is preempted or
    parked, it begins again behind its prompt. Where it is cancelled, the best texts so far are handed out.
    """

    def __init__(
        self,
        request: SampleOwner,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        salt: bytes,
        kv: KVCache,
        adapters: Active = (),
        copies: Saver | None = None,
        terms: CacheTerms = ANY_TERMS,
    ) -> None:
        super().__init__(request, 0, prompt, params, tokenizer, salt, None, adapters, copies, terms)
        self._params = params
        self._kv = kv
        self._keeps_best = False  # whether `ids` is the best text, and `seq` has it
        self._n_live = 1  # sequences that beams have: the first ones
        self._search = BeamSearch(params, self._output.copy())

    @property
    def n_seqs(self) -> int:
        """One for each beam."""
        return self._params.beam_width

    @property
    def n_rows(self) -> int:
        """One for each live beam."""
        return len(self._search.live)

    @property
    def tips(self) -> list[Tip]:
        """The last token of each live beam; at first of the prompt."""
        seqs = [self.seq, *self.fork_seqs]
        return [
            Tip(beam.pieces[-1].token if beam.pieces else self.ids[-1], self.n_decoded, seq)
            for beam, seq in zip(self._search.live, seqs, strict=False)
        ]

    @property
    def n_shareable(self) -> int:
        """Of the prompt only, until the best text is known."""
        n = super().n_shareable
        return n if self._keeps_best else min(n, self.n_prompt)

    def cells_to_take(self, n_has: int) -> int:
        """As RequestSequence.cells_to_take(), of all beams."""
        n_said = max(n_has - self.n_prompt, 0)
        return max(self.n_prompt - n_has, 0) + self.n_seqs * (self._params.max_tokens - 1 - n_said)

    def start_over(self) -> None:
        """Nothing is said yet."""
        self._search = BeamSearch(self._params, self._output.copy())
        self._n_said, self._n_live = 0, 1
        del self.ids[self.n_prompt :]

    def can_say(self, seconds: float) -> bool:
        """As RequestSequence.can_say(), of all beams."""
        return self._search.ready(seconds)

    def say(self, outputs: Sequence[LastOutput], now: float) -> Literal["stop", "length"] | None:
        """Takes the outputs of all live beams; returns why the best text ended when the search is over.

        Raises what BeamSearch.advance() and KVCache.seq_cp() raise.
        """
        self._search.advance(outputs)
        self._n_said += 1
        if not self._search.is_over:
            self._rearrange()
            self._set_text(self._search.live[0])
            return None
        self._first = now
        best = self._search.best(1)[0]
        if len(best.pieces) == self._n_said:  # the sequence of the beam that it goes on from still has it
            self._lead(best)
        return best.pieces[-1].finish_reason

    def end(self, reason: Literal["stop", "length", "cancelled"], now: float) -> None:
        """Hands out the n best texts; in place of those that there are not, empty ones of logprob -inf."""
        self.is_done = True
        found = self._search.best(self._params.n)
        for sample in range(self._params.n):
            if sample < len(found):
                self._hand_out(sample, found[sample], reason, now)
            else:
                self._hand_out(sample, self._nothing(found), reason, now)

    def _hand_out(
        self, sample: int, beam: Beam, reason: Literal["stop", "length", "cancelled"], now: float
    ) -> None:
        for piece in beam.pieces:
            self.request._say(dataclasses.replace(piece, seq=sample))
        said = SaidText(
            text="".join([piece.text for piece in beam.pieces]),
            tokens=tuple(_tokens(beam)),
            n=len(beam.pieces),
            logprob=beam.logprob,
            stopping_word=beam.text.stopping_word,
        )
        own = beam.pieces[-1].finish_reason if beam.pieces else None
        self._complete(sample, said, reason if reason == "cancelled" else own or reason, now)

    def _nothing(self, found: Sequence[Beam]) -> Beam:
        """In place of a text that there is not, as the grammar allows fewer. found: those that there are."""
        end = [dataclasses.replace(beam.pieces[-1], text="", logprob=-math.inf, top=()) for beam in found[:1]]
        pieces = tuple(dataclasses.replace(piece, finish_reason="stop") for piece in end)
        return Beam(self._output, pieces, -math.inf, 0)

    def _rearrange(self) -> None:
        """Each live beam gets a sequence with the cells of the beam that it goes on from.

        Of the beams that go on from one beam the first keeps its sequence. The others get sequences that no
        beam needs, and see the same cells.
        """
        seqs = [self.seq, *self.fork_seqs]
        had, live = seqs[: self._n_live], self._search.live
        going_on = {beam.parent for beam in live}
        dropped = [seq for parent, seq in enumerate(had) if parent not in going_on]
        free = [*dropped, *seqs[self._n_live :]]
        places: list[int] = []
        copies: list[tuple[int, int]] = []
        for beam in live:
            place = had[beam.parent]
            if place in places:
                copies.append((place, free.pop()))
                place = copies[-1][1]
            places.append(place)
        self.seq, *self.fork_seqs = [*places, *free]
        self._n_live = len(live)
        for seq in dropped:
            self._kv.seq_rm(seq, -1, -1)
        for source, target in copies:
            self._kv.seq_cp(source, target, -1, -1)

    def _lead(self, best: Beam) -> None:
        """The best text's cells are for others to share: those of the beam that it goes on from."""
        seqs = [self.seq, *self.fork_seqs]
        self.seq = seqs.pop(best.parent)
        self.fork_seqs = seqs
        self._set_text(best)
        self._keeps_best = True

    def _set_text(self, beam: Beam) -> None:
        del self.ids[self.n_prompt :]
        self.ids.extend(_tokens(beam))


def _tokens(beam: Beam) -> list[int]:
    """But for one that ended the text."""
    return [piece.token for piece in beam.pieces if piece.finish_reason != "stop"]
