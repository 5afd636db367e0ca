"""Answers that are a row of blocks: thoughts, text, calls of tools. What two interfaces have in common."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Protocol

from pykvgraph.openai.chat_output import ChatOutput
from pykvgraph.openai.form import NamedForm
from pykvgraph.openai.held_pieces import HeldPieces
from pykvgraph.openai.logprobs import logprobs_of
from pykvgraph.openai.sample import Sample
from pykvgraph.openai.vocabulary import Vocabulary
from pykvgraph.openai.wire_json import dumps
from pykvgraph.reply.delta import CallPart, Delta, ToolCall
from pykvgraph.types import Piece

Event = dict[str, Any]  # `type` is its first key


class AnswerBlock:
    """One of them, while it is said. first: the delta that opened it. id: a unique one."""

    def __init__(self, index: int, first: Delta) -> None:
        self.index = index
        self.first = first
        self.id = secrets.token_hex(16)
        self.text = ""  # of a call: its arguments
        self.probs: list[dict[str, Any]] = []  # of the tokens of a text, if anybody wants to know

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
        self._held = HeldPieces()
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
        found = [*self._take(sample, self._output.end()), *self._close()]
        return list(map(dumps, found + self._writer.end(sample, self._blocks, self._output)))

    def whole(self, samples: list[Sample]) -> Any:
        """The answer of a body that wants no stream."""
        sample = samples[0]
        self._said(sample, sample.with_probs)
        n_said = sum(len(piece.text) for piece in sample.with_probs)  # 0 where nobody wants probabilities
        self._take(sample, self._output.feed(sample.text[n_said:]))
        self._take(sample, self._output.end())
        self._close()
        return self._writer.whole(sample, self._blocks, self._output)

    def _said(self, sample: Sample, pieces: list[Piece]) -> list[Event]:
        found = []
        for piece in pieces:
            if sample.tells_probs:
                self._held.add(sample, piece)
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
        for delta in deltas:
            if self._open is None or not self._open.goes_on_with(delta):
                found += self._close()
                self._open = AnswerBlock(len(self._blocks), delta)
                found += self._writer.opened(self._open)
            text = delta.arguments if isinstance(delta, ToolCall) else delta.text
            if text:
                probs = self._probs(sample, text)
                self._open.text += text
                self._open.probs += probs
                found += self._writer.added(self._open, text, probs)
        return found

    def _probs(self, sample: Sample, text: str) -> list[dict[str, Any]]:
        """Of the tokens that say a text of a block; marks, and white space beside them, have none."""
        held = self._held.take(sample)
        begin = next((i for i in range(len(held)) if _begins(held[i:], text)), 0)
        end, n = begin, 0
        while end < len(held) and n < len(text):
            n += len(held[end].text)
            end += 1
        for piece in held[end:]:
            self._held.add(sample, piece)
        return [logprobs_of(sample, piece, self._vocabulary) for piece in held[begin:end]]

    def _close(self) -> list[Event]:
        block, self._open = self._open, None
        if block is None:
            return []
        self._blocks.append(block)
        return self._writer.closed(block)


def _begins(pieces: list[Piece], text: str) -> bool:
    """Whether what these say is a text, and perhaps more."""
    said = ""
    for piece in pieces:
        said += piece.text
        if len(said) >= len(text):
            break
    return said.startswith(text)
