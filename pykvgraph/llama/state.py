"""What Llama.save_state() returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvgraph.sampling.sampler import Sampler


@dataclass
class LlamaState:
    """The text of a Llama and its cache.

    input_ids: int32 (n_ctx,), of which the first n_tokens are decoded. scores: float32 (n_tokens, n_vocab)
    with logits_all, else (0, n_vocab). llama_state: what kv.save() returned, the pending token included;
    llama_state_size: its bytes. seed: what the next generation without a seed draws its own from. sampler: of
    a generation in whose midst the state was saved; its random numbers are in libllama's memory, so a pickled
    state is without it.
    """

    input_ids: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]
    n_tokens: int
    llama_state: bytes
    llama_state_size: int
    seed: int
    sampler: Sampler | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "sampler": None}
