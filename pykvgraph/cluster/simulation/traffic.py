"""Who asks simulated workers for what: people who talk in turns, under instructions that many share."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from pykvgraph.cluster.prefixes import BLOCK_BYTES, TOKEN_BYTES, Block

N_INSTRUCTIONS = 50  # texts; the k-th is as frequent as 1 / k
INSTRUCTION_TOKENS = 200, 1500
SAID_TOKENS = 20, 400  # of a turn of the user
ANSWER_TOKENS = 40, 300
N_TURNS = 1, 11  # of a conversation
THINK_SECONDS = 20.0  # between an answer and the next turn, on average
_KEY_BYTES = 8


@dataclass(frozen=True)
class Asked:
    """A request. blocks: of its prompt. after: of the prompt and the answer."""

    blocks: tuple[Block, ...]
    after: tuple[Block, ...]
    n_prompt: int
    n_answer: int


class Traffic:
    """The same for the same seed, whoever answers, and however late."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._n_keys = 0
        rng = random.Random(f"{seed} instructions")
        self._instructions = [
            self._longer((), rng.randint(*INSTRUCTION_TOKENS)) for _ in range(N_INSTRUCTIONS)
        ]

    def person(self, number: int) -> Iterator[tuple[float, Asked]]:
        """Turns of one person for ever: seconds to think before each, and what is asked then."""
        rng = random.Random(f"{self._seed} {number}")
        weights = [1 / (k + 1) for k in range(N_INSTRUCTIONS)]
        while True:
            (said,) = rng.choices(self._instructions, weights)
            for _ in range(rng.randint(*N_TURNS)):
                prompt = self._longer(said, rng.randint(*SAID_TOKENS))
                n_answer = rng.randint(*ANSWER_TOKENS)
                said = self._longer(prompt, n_answer)
                n_prompt = prompt[-1].end // TOKEN_BYTES
                yield rng.expovariate(1 / THINK_SECONDS), Asked(prompt, said, n_prompt, n_answer)

    def _longer(self, blocks: tuple[Block, ...], n_tokens: int) -> tuple[Block, ...]:
        """The text with a new part behind it, cut as blocks_of() cuts it; keys are numbers."""
        found, end = list(blocks), blocks[-1].end if blocks else 0
        left = n_tokens * TOKEN_BYTES
        while left:
            n = min(left, BLOCK_BYTES)
            left, end = left - n, end + n
            self._n_keys += 1
            found.append(Block(self._n_keys.to_bytes(_KEY_BYTES, "little"), end))
        return tuple(found)
