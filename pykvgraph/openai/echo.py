"""What answers of /v1/completions begin with: their prompts, with `echo`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pykvgraph.engine.prompt_scores import TokenScore
from pykvgraph.openai.sample import Sample
from pykvgraph.types import Piece

Scores = Sequence[list[TokenScore]]  # of each prompt; none: nobody wants them


class Echo:
    """What the answers to a body begin with: n of them behind each prompt."""

    def __init__(self, texts: list[str], prompts: list[list[int]], scores: Scores, n: int) -> None:
        self._texts = texts
        self._prompts = prompts
        self._scores = scores
        self._n = n

    @property
    def n_probs(self) -> int:
        """Likely tokens in the place of all tokens of the prompts."""
        return sum(len(each.top) for scores in self._scores for each in scores)

    def text(self, index: int) -> str:
        """Of the answer with this number."""
        return self._texts[index // self._n]

    def pieces(self, index: int) -> list[Piece]:
        """The tokens of its prompt; before the first there is nothing, and its logarithm is NaN."""
        first = Piece("", self._prompts[index // self._n][0], math.nan, None)
        scores = self._scores[index // self._n]
        return [first, *(Piece("", each.token, each.logprob, None, 0, each.top) for each in scores)]

    def samples(self, tells_probs: bool, n_probs: int) -> list[Sample]:
        """Answers that say nothing more."""
        return [
            Sample(
                index=index,
                prompt=self._prompts[index // self._n],
                n_predict=0,
                settings={"post_sampling_probs": False},
                number=index // self._n,
                tells_probs=tells_probs,
                n_probs=n_probs,
                ended=Piece("", 0, 0.0, "length"),
            )
            for index in range(len(self._prompts) * self._n)
        ]
