"""Recall in a chat: facts are told, more is said than the cache holds, and the facts are asked for.

Of a dialogue's three facts one is in the system prompt, which is kept; one is told first, and given up when
the cache is full; one is told near the end, and still in the window when it is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple, TypeAlias, get_args

from pykvgraph.chat import Conversation, Discard
from pykvgraph.checks import integer
from pykvgraph.context.context import Context
from pykvgraph.demos.dialogue import DID_NOT_TELL, SYSTEM, Fact, draw_facts, small_talk
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.params.params import SamplingParams

Why: TypeAlias = Literal["system", "told", "small talk", "asked"]
Place: TypeAlias = Literal["kept prefix", "window", "given up"]
PLACES: tuple[Place, ...] = get_args(Place)
GREEDY = SamplingParams(max_tokens=24)
ROOM = 96  # cells that three questions and their answers are sure to find empty


@dataclass(frozen=True)
class Recall:
    """A fact that was asked for. place: where it was then. n_since: tokens between telling and question."""

    fact: Fact
    place: Place
    question: str
    answer: str
    n_since: int

    @property
    def result(self) -> Literal["recalled", "denied", "wrong"]:
        if self.fact.value in self.answer:
            return "recalled"
        return "denied" if self.answer == DID_NOT_TELL else "wrong"


class Said(NamedTuple):
    """A turn, or the system prompt without an answer. place: of the fact that was asked for, else None."""

    why: Why
    message: str
    answer: str
    place: Place | None


@dataclass(frozen=True)
class Dialogue:
    """A dialogue that was played: its questions, its tokens, and how often turns were given up."""

    recalls: tuple[Recall, ...]
    n_tokens: int
    n_discards: int


def play(
    ctx: Context,
    seed: int,
    n_contexts: int = 3,
    on_turn: Callable[[Said], None] | None = None,
    on_discard: Callable[[Discard], None] | None = None,
) -> Dialogue:
    """Clears the context, plays the dialogue drawn with `seed`, and asks for its facts.

    n_contexts: small talk goes on until so many times the cache's cells were said. on_turn: called with the
    system prompt and after each turn; on_discard: when turns are given up.

    Raises InvalidArgumentError for a bad argument or a cache that is too small, and what Conversation does.
    """
    n_wanted = integer(n_contexts, "n_contexts", 1) * ctx.n_ctx
    if ctx.n_ctx < 4 * ROOM:
        raise InvalidArgumentError(f"n_ctx is {ctx.n_ctx}: a dialogue needs {4 * ROOM} cells or more")
    return _Player(ctx, Random(integer(seed, "seed", 0)), on_turn, on_discard).play(n_wanted)


def totals(dialogues: Iterable[Dialogue]) -> dict[Place, Counter[str]]:
    """How often facts were "asked" for, by where they were then, and how often each result came."""
    counts: dict[Place, Counter[str]] = {place: Counter() for place in PLACES}
    for dialogue in dialogues:
        for recall in dialogue.recalls:
            counts[recall.place].update(("asked", recall.result))
    return counts


class _Player:
    """One dialogue while it is played."""

    def __init__(
        self,
        ctx: Context,
        rng: Random,
        on_turn: Callable[[Said], None] | None,
        on_discard: Callable[[Discard], None] | None,
    ) -> None:
        ctx.reset()
        self._kv, self._rng = ctx.kv, rng
        self._on_turn, self._on_discard = on_turn, on_discard
        self._discards: list[Discard] = []
        kept, self._early, self._late = draw_facts(rng, 3)
        self._system = f"{rng.choice(SYSTEM)} {kept.told(rng)}"
        self._told = {kept: (self._system, 0)}  # the message that told it, and after how many tokens
        self._talk = Conversation(ctx, system=self._system, on_discard=self._discarded)

    def play(self, n_wanted: int) -> Dialogue:
        self._show(Said("system", self._system, "", None))
        self._tell(self._early)
        while self._n_tokens() < n_wanted or self._kv.n_free < 2 * ROOM:
            self._small_talk()
        self._tell(self._late)
        n_left = self._rng.randrange(ROOM, self._kv.n_free)
        while self._kv.n_free > n_left + ROOM // 4:
            self._small_talk()
        recalls = tuple(map(self._ask, self._rng.sample(list(self._told), 3)))
        return Dialogue(recalls, self._n_tokens(), len(self._discards))

    def _small_talk(self) -> None:
        message, _ = small_talk(self._rng)
        self._say("small talk", message)

    def _tell(self, fact: Fact) -> None:
        message = fact.told(self._rng)
        self._told[fact] = message, self._n_tokens()
        self._say("told", message)

    def _ask(self, fact: Fact) -> Recall:
        message, n_before = self._told[fact]
        n_since, question = self._n_tokens() - n_before, self._rng.choice(fact.kind.questions)
        place = self._place_of(message)
        return Recall(fact, place, question, self._say("asked", question, place), n_since)

    def _place_of(self, message: str) -> Place:
        if message == self._system:
            return "kept prefix"
        return "window" if message in [said for said, _ in self._talk.turns] else "given up"

    def _say(self, why: Why, message: str, place: Place | None = None) -> str:
        answer = "".join(piece.text for piece in self._talk.ask(message, GREEDY)).strip()
        self._show(Said(why, message, answer, place))
        return answer

    def _show(self, said: Said) -> None:
        if self._on_turn is not None:
            self._on_turn(said)

    def _discarded(self, discard: Discard) -> None:
        self._discards.append(discard)
        if self._on_discard is not None:
            self._on_discard(discard)

    def _n_tokens(self) -> int:
        return len(self._talk.ids) + sum(discard.n_tokens for discard in self._discards)
