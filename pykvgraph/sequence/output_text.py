"""What is said token by token: samples from outputs, turns tokens into text, and knows when the text ends."""

from __future__ import annotations

from copy import copy
from typing import Literal

import numpy as np
import numpy.typing as npt

from pykvgraph.context.context import LastOutput
from pykvgraph.errors import NotCopied
from pykvgraph.model.tokenizer import Tokenizer
from pykvgraph.params.params import SamplingParams
from pykvgraph.sampling.sampler import Sampler, likeliest
from pykvgraph.sequence.detokenizer import Detokenizer, Lines
from pykvgraph.types import Piece


class OutputText(NotCopied):
    """One text that is being said: each output in, a Piece out, up to the one that ends it.

    tokenizer: None when the model has none; the pieces have no text then. seq: the sequence that the pieces
    name. needs_logits: whether say() does; scores are enough for the likeliest token alone.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None, seq: int) -> None:
        self._drops_space = False
        self._seq = seq
        self._tokenizer = tokenizer
        self._sampler = Sampler.of(params, tokenizer)
        self._stream = Detokenizer(params.stop)
        has_lines = params.n_indent > 0 or params.line_seconds > 0
        self._lines = Lines(params.n_indent, params.line_seconds) if has_lines else None
        self._left = params.max_tokens
        self._n_top = params.top_logprobs
        self._tells_drawn = params.sampled_probs
        self._special = params.special
        self.needs_logits = self._n_top > 0 or not self._sampler.greedy

    def begin(self, prompt: npt.NDArray[np.int32]) -> None:
        """To be called before the first say(), with the prompt."""
        # SentencePiece puts a space before the first word of a text; the user's text doesn't have it
        tokenizer = self._tokenizer
        self._drops_space = tokenizer is not None and tokenizer.space_prefix and prompt[-1] == tokenizer.bos
        self._sampler.begin(prompt)

    def ready(self, seconds: float) -> bool:
        """Whether say() needn't wait for a grammar; waits so long for that. Raises as say() does."""
        return self._sampler.ready(seconds)

    def say(self, last: LastOutput) -> Piece:
        """The piece after what was decoded last. Raises KVGraphError when the logits are broken."""
        last.require_finite()
        token, score = last.best, last.best_logprob
        if not self._sampler.greedy:
            token = self._sampler.sample(last.logits)
        if self.needs_logits:  # the very number that top has of this token: clients compare them
            score = float(last.logits[token]) - last.log_sum
        self._left -= 1
        text, reason = self._text_of(token)
        top: list[tuple[int, float]] = []
        if self._tells_drawn:
            score, top = self._sampler.drawn_with(token, self._n_top)
        elif self._n_top:
            top = [(each, logit - last.log_sum) for each, logit in likeliest(last.logits, self._n_top)]
        return Piece(text, token, score, reason, self._seq, tuple(top))

    def repeat(self, token: int, n_vocab: int) -> Piece | None:
        """The piece of a token that was chosen elsewhere, without its probability.

        None: it can't have been, as the grammar says something else; nothing is said then.
        """
        if not self._sampler.follow(token, n_vocab):
            return None
        self._left -= 1
        text, reason = self._text_of(token)
        return Piece(text, token, 0.0, reason, self._seq, ())

    def copy(self) -> OutputText:
        """Another one, which goes on as this one does."""
        other = OutputText.__new__(OutputText)
        other.__dict__.update(self.__dict__)
        other._sampler = self._sampler.copy()
        other._stream, other._lines = self._stream.copy(), copy(self._lines)
        return other

    def allowed(self) -> npt.NDArray[np.bool_] | None:
        """As Sampler.allowed()."""
        return self._sampler.allowed()

    def take(self, token: int, score: float, top: tuple[tuple[int, float], ...]) -> Piece:
        """The piece of a token that was chosen elsewhere, of those that allowed() has.

        score, top: what the piece tells of its probability.
        """
        self._sampler.take(token)
        self._left -= 1
        text, reason = self._text_of(token)
        return Piece(text, token, score, reason, self._seq, top)

    @property
    def stopping_word(self) -> str:
        """The stop string that ended the text; "" while none did."""
        return self._stream.stopping_word

    def _text_of(self, token: int) -> tuple[str, Literal["stop", "length"] | None]:
        stream, tokenizer, data = self._stream, self._tokenizer, b""
        # a model may have more rows than its tokenizer has tokens
        if tokenizer is not None and token < tokenizer.n_vocab:
            if tokenizer.is_eog(token):
                return stream.finish(), "stop"
            data = tokenizer.token_to_piece(token, special=self._special)
        text = stream.feed(data.removeprefix(b" ") if self._drops_space else data)
        self._drops_space = False
        if stream.stopping_word:
            return text, "stop"
        if self._left == 0:
            return text + stream.finish(), "length"
        end = self._lines.end_of(text) if self._lines else -1
        return (text, None) if end < 0 else (text[:end], "length")
