"""A completion as it is asked for: the arguments of create_completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class CompletionRequest:
    """The prompt, how its tokens are sampled, and where the text ends."""

    prompt: str | list[int]
    suffix: str | None
    max_tokens: int | None
    temperature: float
    top_p: float
    min_p: float
    typical_p: float
    logprobs: int | None
    echo: bool
    stop: str | list[str] | None
    frequency_penalty: float
    presence_penalty: float
    repeat_penalty: float
    top_k: int
    stream: bool
    seed: int | None
    tfs_z: float
    mirostat_mode: int
    mirostat_tau: float
    mirostat_eta: float
    model: str  # a name for it, in the answer
    stopping_criteria: Any
    logits_processor: Any
    grammar: Any
    logit_bias: Any

    def stops(self) -> list[bytes]:
        """What ends the text, as bytes, in their order."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop.encode() for stop in stops]
