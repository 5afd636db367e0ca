"""Who asks simulated workers for what: people who talk in turns, under instructions that many share."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

from pykvgraph.cluster.prefixes import BLOCK_BYTES, TOKEN_BYTES, TextBlock

N_INSTRUCTIONS = 50  # texts; the k-th is as frequent as 1 / k
INSTRUCTION_TOKENS = 200, 1500
SAID_TOKENS = 20, 400  # of a turn of the user
ANSWER_TOKENS = 40, 300
N_TURNS = 1, 11  # of a conversation
THINK_SECONDS = 20.0  # between an answer and the next turn, on average
_WEIGHTS = tuple(itertools.accumulate(1 / (k + 1) for k in range(N_INSTRUCTIONS)))
_KEY = Struct("<II")


class SimulatedPart(NamedTuple):
    """A part of texts: an instruction, or what was said under it. n_tokens: of it."""

    number: int
    n_tokens: int


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request. blocks: of its prompt. instruction, talk: the parts of the prompt."""

    blocks: tuple[TextBlock, ...]
    instruction: SimulatedPart
    talk: SimulatedPart
    n_answer: int

    @property
    def n_prompt(self) -> int:
        """Tokens."""
        return self.instruction.n_tokens + self.talk.n_tokens


class Traffic:
    """The same for the same seed, whoever answers, and however late."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._parts = itertools.count()
        rng = random.Random(f"{seed} instructions")
        self._instructions: list[tuple[SimulatedPart, tuple[TextBlock, ...]]] = []
        for _ in range(N_INSTRUCTIONS):
            part = SimulatedPart(next(self._parts), rng.randint(*INSTRUCTION_TOKENS))
            self._instructions.append((part, _blocks(part.number, 0, part.n_tokens, 0)))

    def person(self, number: int) -> Iterator[tuple[float, SimulatedRequest]]:
        """Turns of one person for ever: seconds to think before each, and what is asked then."""
        rng = random.Random(f"{self._seed} {number}")
        while True:
            ((instruction, blocks),) = rng.choices(self._instructions, cum_weights=_WEIGHTS)
            talk, n_tokens, before = next(self._parts), 0, instruction.n_tokens * TOKEN_BYTES
            for _ in range(rng.randint(*N_TURNS)):
                n_said, n_answer = rng.randint(*SAID_TOKENS), rng.randint(*ANSWER_TOKENS)
                prompt = blocks + _blocks(talk, n_tokens, n_said, before)
                n_tokens += n_said
                asked = SimulatedRequest(prompt, instruction, SimulatedPart(talk, n_tokens), n_answer)
                yield rng.expovariate(1 / THINK_SECONDS), asked
                blocks = prompt + _blocks(talk, n_tokens, n_answer, before)
                n_tokens += n_answer


def part_of(block: TextBlock) -> SimulatedPart:
    """To which part of texts a block belongs, and how many tokens of the part it ends."""
    return SimulatedPart(*_KEY.unpack(block.key))


def _blocks(part: int, begin: int, n_tokens: int, before: int) -> tuple[TextBlock, ...]:
    """Of so many more tokens of a part, cut as blocks_of() cuts them. before: bytes in front of the part."""
    step = BLOCK_BYTES // TOKEN_BYTES
    ends = [*range(begin + step, begin + n_tokens, step), begin + n_tokens]
    return tuple([TextBlock(_KEY.pack(part, end), before + end * TOKEN_BYTES) for end in ends])
