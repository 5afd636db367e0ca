"""A conversation, turn by turn: how many tokens an engine decodes again, and when its answers begin.

The same conversation goes to any Speaker: to our Context here, to servers in benchmarks/turns.py. Each goes
on from its own answers, which all have N_ANSWER tokens, so the counts of tokens can be compared.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from pykvgraph.context.common_length import common_length
from pykvgraph.context.context import Context
from pykvgraph.engine import Engine
from pykvgraph.model.model import Model
from pykvgraph.params.params import SamplingParams
from pykvgraph.sequence.sequence import TokenSequence

N_TURNS = 10
N_MESSAGE = 120  # tokens of a user's message
N_ANSWER = 64
EDITED = {4: 2, 8: 1}  # message: where it is edited, 1 in its first token, 2 in its middle
REGENERATED = {6: 2}  # answer: how many times it is asked for again
USER, ANSWER = "\n<|user|>\n", "\n<|assistant|>\n"


@dataclass(frozen=True)
class Prompt:
    """What an answer is asked for. at: where the last user's message begins, behind its header."""

    name: str  # "4", "4 edited", "6 again"
    ids: list[int]
    at: int


class Answer(NamedTuple):
    """tokens: the answer. n_kept: tokens of the prompt that were not decoded. seconds: to the first token."""

    tokens: list[int]
    n_kept: int
    seconds: float


@dataclass(frozen=True)
class MeasuredTurn:
    """An answer, and what it took.

    n_old: the tokens with which the prompt and what the engine had before it begin alike. n_again: how many
    of these were decoded again. seconds: to the answer's first token.
    """

    name: str
    n_prompt: int
    n_old: int
    n_again: int
    seconds: float

    @property
    def n_new(self) -> int:
        return self.n_prompt - self.n_old


class Speaker(Protocol):
    """An engine in a conversation."""

    def answer(self, prompt: Prompt, n_tokens: int) -> Answer: ...


@dataclass(frozen=True)
class Script:
    """What the user says, as token ids: a long text with the first message, then messages.

    edits: what replaces the messages of EDITED, by their numbers.
    """

    opening: list[int]
    user: list[int]
    assistant: list[int]
    messages: list[list[int]]
    edits: dict[int, list[int]]

    @property
    def n_cells(self) -> int:
        """As many tokens as the conversation has in the end, at most."""
        per_turn = len(self.user) + len(self.assistant) + max(map(len, self.messages)) + N_ANSWER
        return len(self.opening) + N_TURNS * per_turn


def write_script(model: Model, n_prompt: int) -> Script:
    """A conversation whose first prompt has n_prompt tokens: words, or random tokens without a tokenizer."""
    rng = np.random.default_rng(0)
    user, assistant = (
        ([1], [2]) if not model.has_tokenizer else (_encode(model, USER), _encode(model, ANSWER))
    )
    n_message = min(N_MESSAGE, n_prompt // 2)

    def text(n: int) -> list[int]:
        if not model.has_tokenizer:
            return [int(token) for token in rng.integers(0, model.n_vocab, n)]
        return _encode(model, " ".join(_words(rng, n)))[:n]

    messages = [text(n_message) for _ in range(N_TURNS)]
    edits = {}
    for number, part in EDITED.items():
        said = messages[number - 1]
        n_same = 0 if part == 1 else len(said) // part
        first = (said[n_same] + 1) % model.n_vocab  # another token than before
        edits[number] = [*said[:n_same], first, *text(len(said) - n_same - 1)]
    n_opening = max(0, n_prompt - n_message - len(user) - len(assistant))
    return Script(text(n_opening), user, assistant, messages, edits)


def _encode(model: Model, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_special=False)


def _words(rng: np.random.Generator, n: int) -> Iterable[str]:
    letters = list("abcdefghijklmnopqrstuvwxyz")
    return ("".join(rng.choice(letters, rng.integers(2, 9))) for _ in range(n))


def converse(speaker: Speaker, script: Script) -> Iterator[MeasuredTurn]:
    """The conversation. What an engine has: the last prompt, and its answer without the last token."""
    held: list[int] = []
    said = list(script.opening)
    for number, message in enumerate(script.messages, 1):
        asked = [(str(number), message)]
        if number in script.edits:
            asked.append((f"{number} edited", script.edits[number]))
        for i in range(REGENERATED.get(number, 0)):
            asked.append((f"{number} again" + f" {i + 1}" * (i > 0), asked[-1][1]))
        for name, text in asked:
            ids = [*said, *script.user, *text, *script.assistant]
            answer = speaker.answer(Prompt(name, ids, len(said) + len(script.user)), N_ANSWER)
            n_old = common_length(ids, held)
            yield MeasuredTurn(name, len(ids), n_old, max(0, n_old - answer.n_kept), answer.seconds)
            held = [*ids, *answer.tokens[:-1]]
        said = [*ids, *answer.tokens]


def n_asked(script: Script) -> int:
    """How many answers the conversation has."""
    return len(script.messages) + len(script.edits) + sum(REGENERATED.values())


def medians(runs: Sequence[Sequence[MeasuredTurn]]) -> list[MeasuredTurn]:
    """One conversation for several with the same counts: the most tokens decoded again, median times."""
    return [
        MeasuredTurn(
            turns[0].name,
            turns[0].n_prompt,
            turns[0].n_old,
            max(turn.n_again for turn in turns),
            statistics.median(turn.seconds for turn in turns),
        )
        for turns in zip(*runs, strict=True)
    ]


class TextSpeaker:
    """A TokenSequence, which is told where the last message begins: the likeliest tokens."""

    def __init__(self, context: Context) -> None:
        self._text = TokenSequence(context)

    def answer(self, prompt: Prompt, n_tokens: int) -> Answer:
        start = time.perf_counter()
        change = self._text.set(prompt.ids, at=(prompt.at,))
        seconds = time.perf_counter() - start
        tokens = [change.last.best]
        while len(tokens) < n_tokens:
            tokens.append(self._text.append(tokens[-1], copy_logits=False).best)
        return Answer(tokens, change.n_kept, seconds)


class EngineSpeaker:
    """An Engine, to which each prompt is one more request: the likeliest tokens but those that end a text."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        model = engine.model
        ends = [t for t in range(model.n_vocab) if model.tokenizer.is_eog(t)] if model.has_tokenizer else []
        self._never = dict.fromkeys(ends, -math.inf)

    def answer(self, prompt: Prompt, n_tokens: int) -> Answer:
        params = SamplingParams(max_tokens=n_tokens, logit_bias=self._never)
        said = self._engine.submit(prompt.ids, params).result()
        return Answer(list(said.tokens), said.n_cached, said.ttft)
