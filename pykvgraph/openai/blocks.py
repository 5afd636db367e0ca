"""Answers that are a row of blocks: thoughts, text, calls of tools. What two interfaces have in common."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Protocol

from pykvgraph.openai.chat_output import ChatOutput
from pykvgraph.openai.form import NamedForm
from pykvgraph.openai.logprobs import logprobs_of
from pykvgraph.openai.sample import Sample
from pykvgraph.openai.untold_pieces import UntoldPieces
from pykvgraph.openai.vocabulary import Vocabulary
from pykvgraph.openai.wire_json import dumps
from pykvgraph.reply.delta import CallPart, Delta, ToolCall
from pykvgraph.types import Piece

Event = dict[str, Any]  # `type` is its first key


class AnswerBlock:
    """One of them, while it is said. first: the delta that opened it. id: a unique one.

    breaks_off: whether the answer's tokens ran out within it.
    """

    def __init__(self, index: int, first: Delta) -> None:
        self.index = index
        self.first = first
        self.id = secrets.token_hex(16)
        self.text = ""  # of a call: its arguments
        self.probs: list[dict[str, Any]] = []  # of the tokens of a text, if anybody wants to know
        self.breaks_off = False

    def goes_on_with(self, delta: Delta) -> bool:
        """Whether a delta belongs to it."""
        return isinstance(delta, CallPart) or (
            type(delta) is type(self.first) and not isinstance(delta, ToolCall)
        )


class BlockWriter(Protocol):
    """How an interface writes blocks and what stands around them."""

    def begin(self, sample: Sample) -> list[Event]:
        """Before all blocks."""

    def progress(self, sample: Sample) -> list[Event]:
        """More of the prompt is decoded; behind begin()."""

    def opened(self, block: AnswerBlock) -> list[Event]:
        """A block begins, without text."""

    def added(self, block: AnswerBlock, text: str, probs: list[dict[str, Any]]) -> list[Event]:
        """It goes on. probs: of the tokens of this text."""

    def closed(self, block: AnswerBlock) -> list[Event]:
        """It has ended."""

    def end(self, sample: Sample, blocks: list[AnswerBlock], output: ChatOutput) -> list[Event]:
        """After all blocks."""

    def whole(self, sample: Sample, blocks: list[AnswerBlock], output: ChatOutput) -> Any:
        """All of it, for a body that wants no stream."""


class BlockForm(NamedForm):
    """Divides what a sample says into blocks, for a writer; there is one sample."""

    def __init__(
        self, writer: BlockWriter, new_output: Callable[[], ChatOutput], vocabulary: Vocabulary
    ) -> None:
        self._writer = writer
        self._output = new_output()
        self._vocabulary = vocabulary
        self._untold = UntoldPieces()
        self._begun = False
        self._open: AnswerBlock | None = None
        self._blocks: list[AnswerBlock] = []

    def events(self, sample: Sample, pieces: list[Piece]) -> list[bytes]:
        """Those for what was said."""
        return list(map(dumps, self._begin(sample) + self._said(sample, pieces)))

    def progress_events(self, sample: Sample) -> list[bytes]:
        """Those for how far the sample's prompt is."""
        return list(map(dumps, self._begin(sample) + self._writer.progress(sample)))

    def last_events(self, sample: Sample) -> list[bytes]:
        """What was held back, and the end."""
        found = [*self._take(sample, self._output.end()), *self._close_last(sample)]
        return list(map(dumps, found + self._writer.end(sample, self._blocks, self._output)))

    def whole(self, samples: list[Sample]) -> Any:
        """The answer of a body that wants no stream."""
        sample = samples[0]
        self._said(sample, sample.with_probs)
        n_said = sum(len(piece.text) for piece in sample.with_probs)  # 0 where nobody wants probabilities
        self._take(sample, self._output.feed(sample.text[n_said:]))
        self._take(sample, self._output.end())
        self._close_last(sample)
        return self._writer.whole(sample, self._blocks, self._output)

    def _said(self, sample: Sample, pieces: list[Piece]) -> list[Event]:
        found = []
        for piece in pieces:
            if sample.tells_probs:
                self._untold.add(piece)
            if piece.text:
                found += self._take(sample, self._output.feed(piece.text))
        return found

    def _begin(self, sample: Sample) -> list[Event]:
        """What comes first, once."""
        found = [] if self._begun else self._writer.begin(sample)
        self._begun = True
        return found

    def _take(self, sample: Sample, deltas: list[Delta]) -> list[Event]:
        found = []
        for delta, pieces in zip(deltas, self._untold.of(deltas), strict=True):
            if self._open is None or not self._open.goes_on_with(delta):
                found += self._close()
                self._open = AnswerBlock(len(self._blocks), delta)
                found += self._writer.opened(self._open)
            text = delta.arguments if isinstance(delta, ToolCall) else delta.text
            if text:
                probs = [logprobs_of(sample, piece, self._vocabulary) for piece in pieces]
                self._open.text += text
                self._open.probs += probs
                found += self._writer.added(self._open, text, probs)
        return found

    def _close_last(self, sample: Sample) -> list[Event]:
        if self._open is not None:
            self._open.breaks_off = sample.finish_reason == "length"
        return self._close()

    def _close(self) -> list[Event]:
        block, self._open = self._open, None
        if block is None:
            return []
        self._blocks.append(block)
        return self._writer.closed(block)
