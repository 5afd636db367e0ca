"""Beam search: of all texts that may come next the likeliest go on, until the best are found."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pykvgraph.context.context import LastOutput
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.params.params import SamplingParams
from pykvgraph.sampling.sampler import likeliest
from pykvgraph.sequence.output_text import OutputText
from pykvgraph.types import Piece

_LOOKED_AT = 8  # times beam_width candidates, at most: of these so many may end their texts


class Beam(NamedTuple):
    """A text that was found. pieces: what it says, a token each. logprob: the sum of theirs.

    text: goes on with it. parent: which of the live beams of the step before it was, from 0 on.
    """

    text: OutputText
    pieces: tuple[Piece, ...]
    logprob: float
    parent: int


class _Candidate(NamedTuple):
    """A token that may follow a live beam. logprob: of the text with it. own: of the token."""

    logprob: float
    own: float
    token: int
    parent: int


class BeamSearch:
    """The search behind one prompt, a step at a time: outputs of the live beams in, the next ones out.

    What may come next is every token behind every live beam, ranked by the sum of its text's log
    probabilities. Those of the first beam_width that end their texts have ended; the best beam_width of the
    others go on. It is over when max_tokens are said, when nothing goes on, or when beam_width texts have
    ended and none that goes on has a better score, as it is now, than the worst of them: what transformers
    does with early_stopping=False.

    text: the answer's beginning, where nothing is said yet. Tokens that a grammar forbids are no candidates;
    the probabilities of the others stay the model's own.
    """

    def __init__(self, params: SamplingParams, text: OutputText) -> None:
        self.live = [Beam(text, (), 0.0, 0)]  # the best first; all of them have equally many tokens
        self._ended: list[Beam] = []  # the best first, beam_width at most
        self._width = params.beam_width
        self._penalty = params.length_penalty
        self._n_top = params.top_logprobs
        self._left = params.max_tokens

    @property
    def is_over(self) -> bool:
        """Whether no better text will come."""
        if not self.live:
            return True
        if len(self._ended) < self._width:
            return False
        return self._score(self.live[0]) <= self._score(self._ended[-1])

    def best(self, n: int) -> list[Beam]:
        """The n best texts, the best first; while it is not over, those that go on are among them.

        Fewer, where there are no more: a grammar may allow only some.
        """
        found = [*self._ended, *([] if self.is_over else [beam for beam in self.live if beam.pieces])]
        return sorted(found, key=self._score, reverse=True)[:n]

    def advance(self, outputs: Sequence[LastOutput]) -> None:
        """Takes the output behind each live beam; from then on `live` has the next ones.

        Raises KVGraphError for broken logits, InvalidArgumentError where no text may go on or end, and what
        OutputText.allowed() raises.
        """
        live: list[Beam] = []
        self._left -= 1
        n_looked_at = self._width * (_LOOKED_AT if self._left else 1)
        for rank, candidate in enumerate(islice(self._ranked(outputs), n_looked_at)):
            beam = self._extended(candidate, outputs[candidate.parent])
            if beam.pieces[-1].finish_reason is None:
                live.append(beam)
            elif rank < self._width:
                self._ended.append(beam)
            if len(live) == self._width:
                break
        if not (live or self._ended):
            raise InvalidArgumentError(
                "no token may follow: the grammar allows none of this vocabulary's tokens here"
            )
        self._ended = sorted(self._ended, key=self._score, reverse=True)[: self._width]
        self.live = live

    def ready(self, seconds: float) -> bool:
        """Whether advance() needn't wait for grammars; waits so long for them. Raises as advance() does."""
        end = time.monotonic() + seconds
        waiting = [beam.text for beam in self.live if not beam.text.ready(0.0)]  # all of them are asked
        return all(text.ready(max(end - time.monotonic(), 0.0)) for text in waiting)

    def _score(self, beam: Beam) -> float:
        return beam.logprob / float(len(beam.pieces) ** self._penalty)

    def _ranked(self, outputs: Sequence[LastOutput]) -> Iterator[_Candidate]:
        """The likeliest text first, of equals that of the better beam."""
        rows = [
            self._of_beam(parent, beam, output)
            for parent, (beam, output) in enumerate(zip(self.live, outputs, strict=True))
        ]
        return heapq.merge(*rows, key=lambda candidate: -candidate.logprob)

    def _of_beam(self, parent: int, beam: Beam, output: LastOutput) -> Iterator[_Candidate]:
        """The tokens behind one beam, the likeliest first."""
        output.require_finite()
        row, allowed = output.logits, beam.text.allowed()
        if allowed is not None:
            row = np.where(allowed, row[: len(allowed)], -np.inf)
        for token, logit in _descending(row, 2 * self._width):
            own = logit - output.log_sum
            yield _Candidate(beam.logprob + own, own, token, parent)

    def _extended(self, candidate: _Candidate, output: LastOutput) -> Beam:
        """The beam of a candidate."""
        before = self.live[candidate.parent]
        text = before.text.copy()
        top = [(token, logit - output.log_sum) for token, logit in likeliest(output.logits, self._n_top)]
        piece = text.take(candidate.token, candidate.own, tuple(top))
        return Beam(text, (*before.pieces, piece), candidate.logprob, candidate.parent)


def _descending(row: npt.NDArray[np.float32], n: int) -> Iterator[tuple[int, float]]:
    """Tokens with their logits, the highest first; the first n are found at once, others when asked for."""
    begin = 0
    while begin < len(row):
        for token, logit in likeliest(row, n)[begin:]:
            if logit == -np.inf:
                return
            yield token, logit
        begin, n = n, 2 * n
