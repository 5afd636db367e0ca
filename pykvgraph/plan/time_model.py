"""How long a step lasts: a linear model of its tokens and of the cells that they attend to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.plan.least_squares import non_negative

FEW = 8  # tokens: up to so many are multiplied one by one, more of them as a matrix


class StepSample(NamedTuple):
    """What one decode took. n_cells: those that its tokens attend to, added up over the tokens."""

    n_tokens: int
    n_cells: int
    seconds: float


@dataclass(frozen=True)
class StepLine:
    """step + token · n_tokens + cell · n_cells seconds; no coefficient is negative."""

    step: float
    token: float
    cell: float

    @classmethod
    def fit(cls, samples: Sequence[StepSample]) -> StepLine:
        """By least squares of the relative errors."""
        return cls(*non_negative([(1, n, cells) for n, cells, _ in samples], [s for *_, s in samples]))

    def seconds(self, n_tokens: int, n_cells: int) -> float:
        """Of one micro-batch."""
        return self.step + self.token * n_tokens + self.cell * n_cells


@dataclass(frozen=True)
class TimeModel:
    """A line for micro-batches of at most 8 tokens, and one for larger ones."""

    few: StepLine
    many: StepLine

    @classmethod
    def fit(cls, samples: Sequence[StepSample]) -> TimeModel:
        """Raises InvalidArgumentError without samples of both sizes, and for times that are not positive."""
        few = [each for each in samples if each.n_tokens <= FEW]
        many = [each for each in samples if each.n_tokens > FEW]
        if not few or not many:
            raise InvalidArgumentError(f"samples: some must have at most {FEW} tokens, and some more")
        return cls(StepLine.fit(few), StepLine.fit(many))

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds of a step, of a token, and of a cell that one attends to: of few tokens, then of many."""
        return (*astuple(self.few), *astuple(self.many))

    def seconds(self, n_tokens: int, n_cells: int) -> float:
        """Of a micro-batch; n_cells: those that its tokens attend to, added up over the tokens."""
        return (self.few if n_tokens <= FEW else self.many).seconds(n_tokens, n_cells)

    def prefill(self, n_texts: int, n_tokens: int, n_ubatch: int = 512) -> float:
        """Of n_texts prompts of n_tokens each, one after the other in micro-batches."""
        found = 0.0
        for first in range(0, n_tokens, n_ubatch):
            n = min(n_ubatch, n_tokens - first)
            found += self.seconds(n, cells_of_run(first, n))
        return n_texts * found

    def next_token(self, n_in: int, n_out: int) -> float:
        """Of the next token of a text that has so many tokens of a prompt and of an answer."""
        return self.seconds(1, n_in + n_out + 1)


def cells_of_run(first: int, n: int) -> int:
    """What n tokens of one text attend to, added up; first: tokens of it before them."""
    return n * first + n * (n + 1) // 2
