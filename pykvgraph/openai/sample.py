"""One text that is being answered: what was said of it so far, and when."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from pykvgraph.engine.types import Completion, PromptProgress
from pykvgraph.model.adapter import Active
from pykvgraph.types import Piece


@dataclass
class Sample:
    """index: among all texts that a body asks for. number: of its prompt. slot: in /slots; -1: it waits.

    wanted_slot: the only one that it takes; -1: any. salt: whose prefixes it shares. adapters: that it is
    decoded under. edits, n_exact: of the slot's text that it goes on from, if that was edited. without: of a
    conversation, see Text of server.slots. n_predict: most tokens that were asked for; -1: as many as fit.
    settings: how it is sampled, as the wire tells it.
    """

    index: int
    prompt: list[int]
    n_predict: int
    settings: dict[str, Any]
    number: int = 0
    tells_probs: bool = False  # whether the answer has the probability of each token
    n_probs: int = 0  # and of how many likely tokens in its place
    wanted_slot: int = -1
    salt: bytes = b""
    adapters: Active = ()
    edits: bytes = b""
    n_exact: int = 0
    without: Callable[[Collection[int]], list[int]] | None = None
    slot: int = -1
    n_most: int = 0  # tokens that the context has room for
    tokens: list[int] = field(default_factory=list)  # that have text; the one that ended it isn't among them
    with_probs: list[Piece] = field(default_factory=list)  # whose probabilities are told: tokens, and end
    n_said: int = 0  # tokens, with the one that ended it
    text: str = ""
    ended: Piece | None = None
    completion: Completion | None = None
    progress: PromptProgress | None = None  # of the prompt, where somebody hears of it
    n_cached: int = 0
    pinned: tuple[int, ...] = ()  # tokens of the prompt that each of the body's pins keeps
    begun: float = field(default_factory=time.perf_counter)
    first: float = 0.0  # when the first token was said
    last: float = 0.0

    def add(self, pieces: list[Piece]) -> None:
        """More was said."""
        now = time.perf_counter()
        self.first = self.first or now
        self.last = now
        self.n_said += len(pieces)
        self.text += "".join([piece.text for piece in pieces])
        self.tokens += [piece.token for piece in pieces]
        if self.tells_probs:
            self.with_probs += pieces
        if pieces[-1].finish_reason is not None:
            self.ended = pieces[-1]
            if self.ended.finish_reason == "stop":
                del self.tokens[-1]
                del self.with_probs[-1:]

    def advance(self, progress: PromptProgress) -> None:
        """More of its prompt is decoded."""
        self.progress, self.n_cached, self.pinned = progress, progress.n_cached, progress.pinned

    def finish(self, completion: Completion) -> None:
        """It has ended; the engine's own times count from now on."""
        self.completion = completion
        self.n_cached, self.pinned = completion.n_cached, completion.pinned
        self.begun += completion.waited
        if self.tells_probs:
            self.with_probs += self.end
        self.first = self.begun + completion.ttft - completion.waited
        self.last = self.first + completion.seconds - completion.ttft

    @property
    def end(self) -> list[Piece]:
        """The token that ended the text; none where a stop string did, whose last token isn't told."""
        return [self.ended] if self.ended and self.stop_type == "eos" else []

    @property
    def stopped_by(self) -> str:
        """The stop string that ended it."""
        return self.completion.stopping_word if self.completion else ""

    @property
    def stop_type(self) -> str:
        """As llama-server calls why it ended: "eos", "word", "limit" or "none"."""
        if self.ended is None:
            return "none"
        if self.ended.finish_reason == "length":
            return "limit"
        return "word" if self.stopped_by else "eos"

    @property
    def finish_reason(self) -> str | None:
        """As OpenAI calls it."""
        return self.ended.finish_reason if self.ended else None

    @property
    def truncated(self) -> bool:
        """Whether it ended because the context did, or gave tokens up to go on."""
        wants_more = self.n_predict < 0 or self.n_predict > self.n_said
        is_full = self.stop_type == "limit" and wants_more and self.n_said >= self.n_most
        return self.n_discarded > 0 or is_full

    @property
    def n_discarded(self) -> int:
        """Tokens that were given up to go on."""
        return self.completion.n_discarded if self.completion else 0

    def _drafts(self) -> dict[str, int]:
        """Only where there were any, as llama-server."""
        done = self.completion
        return {"draft_n": done.drafted, "draft_n_accepted": done.accepted} if done and done.drafted else {}

    def prompt_progress(self) -> dict[str, Any]:
        """As llama-server tells it."""
        assert self.progress is not None
        n_prompt, n_cached, n_decoded, seconds, _ = self.progress
        return {
            "total": n_prompt,
            "cache": n_cached,
            "processed": n_decoded,
            "time_ms": round(seconds * 1e3),
        }

    def timings(self) -> dict[str, Any]:
        """llama-server's; the time of a prompt counts from when it came."""
        if self.progress is not None and not self.n_said:
            return _timings(self.n_cached, self.progress)
        n_prompt = len(self.prompt) - self.n_cached
        prompt_ms = max((self.first - self.begun) * 1e3, 1e-3)
        predicted_ms = max((self.last - self.first) * 1e3, 1e-3)
        n_steps = self.n_said - 1  # the first token came with the prompt
        return {
            **self._drafts(),
            "cache_n": self.n_cached,
            "prompt_n": n_prompt,
            "prompt_ms": prompt_ms,
            "prompt_per_token_ms": prompt_ms / max(n_prompt, 1),
            "prompt_per_second": n_prompt / prompt_ms * 1e3,
            "predicted_n": self.n_said,
            "predicted_ms": predicted_ms,
            "predicted_per_token_ms": predicted_ms / n_steps if n_steps > 0 else 0.0,
            "predicted_per_second": n_steps / predicted_ms * 1e3 if n_steps > 0 else 0.0,
        }


def cache_told(samples: Sequence[Sample]) -> dict[str, Any]:
    """Where the tokens of prompts came from, and of the first that misses some, where and why.

    Nobody learns what others have asked: not which token they have in place of this text's, nor that somebody
    under another key has read the same.
    """
    uses = [sample.completion.cache for sample in samples if sample.completion is not None]
    misses = [use.miss for use in uses if use.miss is not None and use.miss.reason != "other_key"]
    return {
        "cells": sum(use.cells for use in uses),
        "ram": sum(use.ram for use in uses),
        "disk": sum(use.disk for use in uses),
        "edited": sum(use.edited for use in uses),
        "miss": {"at": misses[0].at, "reason": misses[0].reason} if misses else None,
    }


def usage_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """As OpenAI's interface counts tokens: a prompt counts once, each of its texts by itself."""
    prompts = [*{sample.number: sample for sample in reversed(samples)}.values()][::-1]
    n_said = sum(sample.n_said for sample in samples)
    n_prompt = sum(len(sample.prompt) for sample in prompts)
    return {
        "completion_tokens": n_said,
        "prompt_tokens": n_prompt,
        "total_tokens": n_prompt + n_said,
        "prompt_tokens_details": {"cached_tokens": sum(sample.n_cached for sample in prompts)},
        "cache": cache_told(prompts),
    }


def _timings(n_cached: int, progress: PromptProgress) -> dict[str, Any]:
    """While nothing is said: of the part of the prompt that was decoded."""
    n, ms = progress.n_decoded - n_cached, progress.seconds * 1e3
    return {
        "cache_n": n_cached,
        "prompt_n": n,
        "prompt_ms": ms,
        "prompt_per_token_ms": ms / n if n else 0.0,
        "prompt_per_second": n / ms * 1e3 if ms else 0.0,
        "predicted_n": 0,
        "predicted_ms": 0.0,
        "predicted_per_token_ms": 0.0,
        "predicted_per_second": 0.0,
    }
