"""What Llama's sampling arguments mean for a Sampler, and how logits are processed before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pykvgraph.context.context import LastOutput
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.llama.arguments import RANDOM_SEED, refuse_unsupported
from pykvgraph.model.tokenizer import Tokenizer
from pykvgraph.params.params import SamplingParams
from pykvgraph.sampling.sampler import Sampler

Logits = npt.NDArray[np.float32]


class LlamaSampler:
    """Samples the tokens of one generation, with llama-cpp-python's arguments.

    last_n_tokens_size: how many tokens the penalties look back at. others: arguments of the caller that
    are no sampler's; refused when pykvgraph can't do anything about one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seed: int,
        last_n_tokens_size: int,
        /,
        *,
        temp: float,
        top_k: int,
        top_p: float,
        min_p: float,
        typical_p: float,
        repeat_penalty: float,
        frequency_penalty: float,
        presence_penalty: float,
        mirostat_mode: int,
        mirostat_tau: float,
        mirostat_eta: float,
        logits_processor: Any,
        grammar: Any,
        logit_bias: Any = None,
        **others: Any,
    ) -> None:
        refuse_unsupported(others)
        draws_from_all = temp < 0  # as the model says, whatever the other arguments
        seed &= RANDOM_SEED
        uses_mirostat = mirostat_mode in (1, 2) and not draws_from_all
        params = SamplingParams(
            temperature=1.0 if draws_from_all or (uses_mirostat and temp > 0) else temp,
            top_k=0 if draws_from_all else max(top_k, 0),
            top_p=1.0 if draws_from_all else min(max(top_p, 0.0), 1.0),
            min_p=0.0 if draws_from_all else min(max(min_p, 0.0), 1.0),
            typical_p=1.0 if draws_from_all else min(max(typical_p, 0.0), 1.0),
            seed=None if seed == RANDOM_SEED else seed,
            repeat_penalty=repeat_penalty,
            frequency_penalty=frequency_penalty,
            presence_penalty=presence_penalty,
            penalty_last_n=max(last_n_tokens_size, 0),
            mirostat=mirostat_mode if uses_mirostat else 0,
            mirostat_tau=mirostat_tau,
            mirostat_eta=mirostat_eta,
            logit_bias={int(token): bias for token, bias in dict(logit_bias or {}).items()},
            grammar=_text_of(grammar),
        )
        self._sampler = Sampler.of(params, tokenizer)
        self._process = logits_processor
        # whether the likeliest token is the choice, so that nobody needs the logits
        self.greedy = self._sampler.greedy and logits_processor is None

    def going_on(self) -> Sampler:
        """What goes on with the tokens that this one would choose."""
        return self._sampler.copy()

    def go_on_as(self, saved: Sampler | None) -> None:
        """Goes on as a saved sampler did, if that one has the same arguments and seed."""
        if saved is not None and saved.params == self._sampler.params:
            self._sampler = saved.copy()

    def choose(self, ids: npt.NDArray[np.int32], last: LastOutput) -> int:
        """The token after the last output. Raises KVGraphError when logits are not finite."""
        last.require_finite()
        return last.best if self.greedy else self.sample(ids, last.logits)

    def sample(self, ids: npt.NDArray[np.int32], logits: Logits) -> int:
        """A token; ids: the tokens so far."""
        if self._process is not None:
            logits = np.asarray(self._process(ids, logits.copy()), np.float32)
        return self._sampler.sample(logits)


def _text_of(grammar: Any) -> str | None:
    """A LlamaGrammar's text, or a text as it is."""
    text = getattr(grammar, "_grammar", grammar)
    if text is not None and not isinstance(text, str):
        raise InvalidArgumentError(f"grammar must be a LlamaGrammar or a text in GBNF, got {grammar!r}")
    return text
