"""Beam search by its definition: each step computes every text anew, and sorts all that may follow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from support.engines import Logits


class Found(NamedTuple):
    """A text. logprob: the sum of the log probabilities of its tokens, one that ended it included."""

    tokens: tuple[int, ...]
    logprob: float
    has_ended: bool

    def score(self, length_penalty: float) -> float:
        return self.logprob / float(len(self.tokens) ** length_penalty)


class Search(NamedTuple):
    """best: the texts, the best first. closest: the least distance of two sums that were ranked.

    steps: the texts that went on after each step.
    """

    best: list[Found]
    closest: float
    steps: list[list[Found]]


def search(
    rows_of: Callable[[list[list[int]]], Logits],
    prompt: Sequence[int],
    ends: Collection[int],
    *,
    width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
) -> Search:
    """As transformers searches with early_stopping=False (GenerationMixin._beam_search).

    rows_of(texts): the logits behind the last token of each, (n_texts, n_vocab).
    """
    live, ended = [Found((), 0.0, False)], list[Found]()
    closest, steps = np.inf, list[list[Found]]()
    while live and len(live[0].tokens) < max_tokens:
        rows = rows_of([[*prompt, *text.tokens] for text in live]).astype(np.float64)
        logprobs = rows - np.logaddexp.reduce(rows, axis=1, keepdims=True)
        sums = logprobs + np.array([[text.logprob] for text in live])
        order = np.argsort(-sums, axis=None, kind="stable")
        candidates = []
        for parent, token in zip(
            *np.unravel_index(order[: width * (1 + len(ends))], sums.shape), strict=True
        ):
            tokens = (*live[parent].tokens, int(token))
            is_last = token in ends or len(tokens) == max_tokens
            candidates.append(Found(tokens, float(sums[parent, token]), is_last))
        ended += [text for text in candidates[:width] if text.has_ended]
        ended = sorted(ended, key=lambda text: -text.score(length_penalty))[:width]
        live = [text for text in candidates if not text.has_ended][:width]
        steps.append(live)
        near = np.sort(sums, axis=None)[::-1][: 3 * width]
        closest = min(closest, float(-np.diff(near).max()))
        if live and len(ended) == width and live[0].score(length_penalty) <= ended[-1].score(length_penalty):
            break
    return Search(ended, closest, steps)
