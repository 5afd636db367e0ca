"""Logits to a token: greedy here, everything else by libllama's samplers."""

from __future__ import annotations

import ctypes
import math
import secrets
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvgraph._native import libllama
from pykvgraph._native.handles import Handle, NotCopied
from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError, KVGraphError
from pykvgraph.params import MAX_SEED, SamplingParams


class Sampler(NotCopied):
    """Chooses a token from its logits.

    temperature 0 (greedy): always the likeliest token, the lowest id among equals; the other arguments don't
    matter. Above 0: libllama's samplers in this order: top_k (keep the k likeliest tokens; 0: off), top_p
    (keep the likeliest tokens that together have this probability; 1: off), min_p (keep tokens with at least
    this share of the likeliest token's probability; 0: off), temperature, random draw.

    seed: 0 to 2^32 - 2, or None for a random seed. Threads may share a sampler; they then take turns, and
    share its random numbers. Raises InvalidArgumentError, which names the bad argument.
    """

    def __init__(
        self,
        temperature: float = SamplingParams.temperature,
        top_k: int = SamplingParams.top_k,
        top_p: float = SamplingParams.top_p,
        min_p: float = SamplingParams.min_p,
        seed: int | None = SamplingParams.seed,
    ) -> None:
        chosen = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        seed = secrets.randbelow(MAX_SEED + 1) if chosen.seed is None else chosen.seed
        self.greedy = chosen.temperature == 0
        self._chain: Handle | None = None
        self._candidates = np.empty(0, [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
        if chosen.temperature > 0:
            llama = self._llama = libllama.low_level()
            self._chain = Handle.own(
                _new_chain, llama, chosen, seed, free=llama.llama_sampler_free, name="sampler"
            )

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """Chooses a token id; logits: float32 (n_vocab,).

        Raises InvalidArgumentError unless logits is a one-dimensional array of floats, and KVGraphError when
        a logit is NaN or the largest is infinite.
        """
        if not isinstance(logits, np.ndarray) or logits.dtype.kind != "f":
            raise InvalidArgumentError(f"logits must be an array of floats, got {shown(logits)}")
        if logits.ndim != 1 or logits.size == 0:
            raise InvalidArgumentError(
                f"logits must be (n_vocab,), got shape {logits.shape}: take one row, as in ctx.logits()[-1]"
            )
        best = int(logits.argmax())  # NaN counts as the largest
        if not math.isfinite(logits[best]):
            raise KVGraphError(f"the logits are broken: {logits[best]} for token {best}")
        return best if self._chain is None else self._chain.call(self._draw, logits)

    def _draw(self, chain: int, logits: npt.NDArray[np.float32]) -> int:
        llama = self._llama
        if len(self._candidates) != len(logits):
            self._candidates = np.empty(len(logits), self._candidates.dtype)
        # samplers reorder them, so they are new for each draw
        self._candidates["id"] = np.arange(len(logits))
        self._candidates["logit"] = logits
        self._candidates["p"] = 0
        data = self._candidates.ctypes.data_as(ctypes.POINTER(llama.llama_token_data))
        array = llama.llama_token_data_array(data=data, size=len(logits), selected=-1, sorted=False)
        llama.llama_sampler_apply(chain, ctypes.byref(array))
        if not 0 <= array.selected < array.size:
            raise KVGraphError(f"libllama's sampler chose candidate {array.selected} of {array.size}")
        return int(array.data[array.selected].id)


def _new_chain(llama: Any, chosen: SamplingParams, seed: int) -> int:
    params = llama.llama_sampler_chain_default_params()
    params.no_perf = True
    chain: int = llama.llama_sampler_chain_init(params)
    for link in (
        llama.llama_sampler_init_top_k(chosen.top_k),
        llama.llama_sampler_init_top_p(chosen.top_p, 1),
        llama.llama_sampler_init_min_p(chosen.min_p, 1),
        llama.llama_sampler_init_temp(chosen.temperature),
        llama.llama_sampler_init_dist(seed),
    ):
        llama.llama_sampler_chain_add(chain, link)  # which owns it from now on
    return chain
