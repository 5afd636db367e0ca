"""libllama's samplers, in a row: what a Sampler applies to the logits when greedy isn't all."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pykvgraph._native import libllama
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.params.biases import Biases
from pykvgraph.params.params import SamplingParams

if TYPE_CHECKING:
    from pykvgraph.model.tokenizer import Tokenizer

_LLAMA_NAMES = {"typical_p": "typical", "temperature": "temp_ext"}
_MIROSTAT_M = 100  # tokens that mirostat 1 estimates with, as in its paper


def is_plainly_greedy(chosen: SamplingParams) -> bool:
    """Whether the likeliest token is always the choice."""
    return is_greedy(chosen) and not (changes_logits(chosen) or has_grammar(chosen))


def is_greedy_behind_biases(chosen: SamplingParams) -> bool:
    """Whether the likeliest token behind logit_bias is always the choice."""
    return is_greedy(chosen) and not (n_remembered(chosen) or has_grammar(chosen))


def changes_logits(chosen: SamplingParams) -> bool:
    """Whether logits are changed before a token is chosen."""
    return bool(chosen.logit_bias) or n_remembered(chosen) > 0


def n_remembered(chosen: SamplingParams) -> int:
    """On how many of the last tokens the choice depends, because of penalties."""
    n_dry = chosen.dry_penalty_last_n if has_dry(chosen) else 0
    return max(chosen.penalty_last_n if _penalizes(chosen) else 0, n_dry)


def has_dry(chosen: SamplingParams) -> bool:
    """Whether repetitions are penalized, by DRY."""
    is_on = chosen.dry_multiplier > 0 and chosen.dry_base >= 1 and chosen.dry_penalty_last_n > 0
    return "dry" in chosen.samplers and is_on


def _penalizes(chosen: SamplingParams) -> bool:
    neutral = (chosen.repeat_penalty, chosen.frequency_penalty, chosen.presence_penalty) == (1.0, 0.0, 0.0)
    return "penalties" in chosen.samplers and chosen.penalty_last_n > 0 and not neutral


def is_greedy(chosen: SamplingParams) -> bool:
    """Whether it takes the likeliest token, of those that the grammar allows, behind penalties and DRY.

    What comes behind a temperature of 0 has one candidate left; what comes before may leave that one out.
    """
    if "temperature" not in chosen.samplers or not chosen.temperature == chosen.dynatemp_range == 0:
        return False
    leaves_out = {"typical_p": chosen.typical_p < 1, "xtc": chosen.xtc_probability > 0, "infill": True}
    return not any(leaves_out.get(name) for name in _before_temperature(chosen))


def _before_temperature(chosen: SamplingParams) -> tuple[str, ...]:
    names = tuple(chosen.samplers)
    return names[: names.index("temperature")]


def has_grammar(chosen: SamplingParams) -> bool:
    """Whether a grammar says which texts may be."""
    return chosen.grammar is not None or chosen.json_schema is not None


def new_chain(chosen: SamplingParams, seed: int, n_vocab: int, tokenizer: Tokenizer | None) -> int:
    """A libllama chain, which its owner frees.

    The grammar is none of its links. Raises InvalidArgumentError for DRY without a tokenizer.
    """
    llama = libllama.low_level()
    params = llama.llama_sampler_chain_default_params()
    params.no_perf = True
    chain: int = llama.llama_sampler_chain_init(params)
    try:
        for link in _links(llama, chosen, seed, n_vocab, tokenizer):
            llama.llama_sampler_chain_add(chain, link)  # which owns it from now on
    except BaseException:
        llama.llama_sampler_free(chain)
        raise
    return chain


def remember(chain: int, tokens: npt.NDArray[np.int32]) -> None:
    """Tells the penalties and DRY of the text so far."""
    llama = libllama.low_level()
    for i in range(llama.llama_sampler_chain_n(chain)):
        link = llama.llama_sampler_chain_get(chain, i)
        if llama.llama_sampler_name(link) in (b"penalties", b"dry"):
            for token in tokens.tolist():
                llama.llama_sampler_accept(link, token)


def _links(
    llama: Any, chosen: SamplingParams, seed: int, n_vocab: int, tokenizer: Tokenizer | None
) -> Iterator[int]:
    if chosen.logit_bias:
        assert isinstance(chosen.logit_bias, Biases)
        biases = chosen.logit_bias.native
        pointer = biases.ctypes.data_as(ctypes.POINTER(llama.llama_logit_bias))
        yield llama.llama_sampler_init_logit_bias(n_vocab, len(biases), pointer)
    names = _before_temperature(chosen) if is_greedy(chosen) else chosen.samplers
    if is_greedy(chosen) or chosen.mirostat:
        names = [name for name in names if name in ("penalties", "dry")]
    for name in names:
        if (name != "penalties" or _penalizes(chosen)) and (name != "dry" or has_dry(chosen)):
            yield _link(llama, name, chosen, seed, n_vocab, tokenizer)
    if is_greedy(chosen):
        yield llama.llama_sampler_init_greedy()
    elif chosen.mirostat:
        yield llama.llama_sampler_init_temp(chosen.temperature)
        yield _mirostat(llama, chosen, seed, n_vocab)
    elif chosen.adaptive_target >= 0:
        yield llama.llama_sampler_init_adaptive_p(chosen.adaptive_target, chosen.adaptive_decay, seed)
    else:
        yield llama.llama_sampler_init_dist(seed)


def _link(
    llama: Any, name: str, chosen: SamplingParams, seed: int, n_vocab: int, tokenizer: Tokenizer | None
) -> int:
    if name == "dry":
        return _dry(llama, chosen, tokenizer)
    if name == "infill":
        return _infill(llama, tokenizer)
    penalties = chosen.repeat_penalty, chosen.frequency_penalty, chosen.presence_penalty
    arguments: dict[str, tuple[Any, ...]] = {
        "penalties": (n_vocab, chosen.penalty_last_n, *penalties),
        "top_n_sigma": (chosen.top_n_sigma,),
        "top_k": (chosen.top_k,),
        "typical": (chosen.typical_p, chosen.min_keep),
        "top_p": (chosen.top_p, chosen.min_keep),
        "min_p": (chosen.min_p, chosen.min_keep),
        "xtc": (chosen.xtc_probability, chosen.xtc_threshold, chosen.min_keep, seed),
        "temp_ext": (chosen.temperature, chosen.dynatemp_range, chosen.dynatemp_exponent),
    }
    own_name = _LLAMA_NAMES.get(name, name)
    link: int = getattr(llama, f"llama_sampler_init_{own_name}")(*arguments[own_name])
    return link


def _mirostat(llama: Any, chosen: SamplingParams, seed: int, n_vocab: int) -> int:
    tau_eta = chosen.mirostat_tau, chosen.mirostat_eta
    sampler: int
    if chosen.mirostat == 1:
        sampler = llama.llama_sampler_init_mirostat(n_vocab, seed, *tau_eta, _MIROSTAT_M)
    else:
        sampler = llama.llama_sampler_init_mirostat_v2(seed, *tau_eta)
    return sampler


def _infill(llama: Any, tokenizer: Tokenizer | None) -> int:
    if tokenizer is None:
        raise InvalidArgumentError("infill is about text: give the Sampler its tokenizer=model.tokenizer")
    sampler: int = tokenizer._ask(llama.llama_sampler_init_infill)
    return sampler


def _dry(llama: Any, chosen: SamplingParams, tokenizer: Tokenizer | None) -> int:
    if tokenizer is None:
        raise InvalidArgumentError("DRY's breakers are texts: give the Sampler its tokenizer=model.tokenizer")
    breakers = [each.encode(errors="replace") for each in chosen.dry_sequence_breakers]
    sampler: int = tokenizer._ask(
        llama.llama_sampler_init_dry,
        chosen.dry_multiplier,
        chosen.dry_base,
        chosen.dry_allowed_length,
        chosen.dry_penalty_last_n,
        (ctypes.c_char_p * len(breakers))(*breakers),
        len(breakers),
    )
    return sampler
