"""How a body wants its answer sampled: llama-server's fields as SamplingParams."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pykvgraph.checks import INT32_MAX, shown
from pykvgraph.openai.errors import invalid, unsupported
from pykvgraph.openai.vocabulary import Vocabulary
from pykvgraph.params.params import MAX_SEED, SAMPLERS, SamplingParams
from pykvgraph.server.requests.fields import Fields

ADAPTIVE = "adaptive_p"  # draws, so that its place in a list doesn't matter
_LETTERS = dict(zip("edskypmxtia", [*SAMPLERS, ADAPTIVE], strict=True))
_NAMES = {name.replace("_", ""): name for name in _LETTERS.values()}
_NAMES |= {"typp": "typical_p", "typ": "typical_p", "typical": "typical_p"}
_NAMES |= {"nucleus": "top_p", "temp": "temperature"}
_NO_DASHES = str.maketrans("", "", "-_")
_TOLD_NAMES = {"typical_p": "typ_p"}
_SEED_BITS = 0xFFFF_FFFF
_LAST_N = 1 << 20
_MOST_BIAS = 1e30
_MOST_PROBS = 1000  # likely tokens for each: the engine finds them between the steps of all

_NOT_BRIEF = (
    "stop",
    "logit_bias",
    "grammar",
    "grammar_triggers",
    "preserved_tokens",
    "dry_sequence_breakers",
)


def sampling_of(fields: Fields, vocabulary: Vocabulary, n_slots: int, n_predict: int = -1) -> SamplingParams:
    """The parameters; max_tokens is INT32_MAX when nothing limits it. n_predict: when the body says nothing.

    Raises WireError, and what SamplingParams raises.
    """
    _refuse_others(fields)
    n = fields.integer("n_cmpl", fields.integer("n", 1, 1, n_slots), 1, n_slots)
    temperature = fields.real("temperature", 0.8, 0.0, 1e6)
    beams: dict[str, Any] = {}
    if fields.flag("use_beam_search"):  # vLLM's: with as many beams as answers; it looks at no temperature
        temperature = 0.0
        beams = {"beam_width": n, "length_penalty": fields.real("length_penalty", 1.0, -10.0, 10.0)}
    names = sampler_names(fields)
    return SamplingParams(
        max_tokens=_max_tokens(fields, n_predict),
        temperature=temperature,
        top_k=max(fields.integer("top_k", 40), 0),
        top_p=fields.real("top_p", 0.95, 0.0, 1.0),
        min_p=fields.real("min_p", 0.05, 0.0, 1.0),
        typical_p=fields.real("typical_p", 1.0, 0.0, 1.0),
        top_n_sigma=fields.real("top_n_sigma", -1.0, -1e6, 1e6),
        xtc_probability=fields.real("xtc_probability", 0.0, 0.0, 1.0),
        xtc_threshold=fields.real("xtc_threshold", 0.1, 0.0, 1e6),
        dynatemp_range=fields.real("dynatemp_range", 0.0, 0.0, 1e6),
        dynatemp_exponent=fields.real("dynatemp_exponent", 1.0, 0.0, 1e6),
        seed=_seed(fields),
        stop=fields.texts("stop"),
        repeat_penalty=fields.real("repeat_penalty", 1.0),
        frequency_penalty=fields.real("frequency_penalty", 0.0, -1e6, 1e6),
        presence_penalty=fields.real("presence_penalty", 0.0, -1e6, 1e6),
        penalty_last_n=min(fields.integer("repeat_last_n", 64, 0), _LAST_N),
        **_dry(fields),
        mirostat=min(max(fields.integer("mirostat", 0), 0), 2),
        mirostat_tau=fields.real("mirostat_tau", 5.0, 0.0, 1e6),
        mirostat_eta=fields.real("mirostat_eta", 0.1, 0.0, 1e6),
        min_keep=max(fields.integer("min_keep", 0), 0),
        samplers=[name for name in names if name != ADAPTIVE],
        **(_adaptive(fields) if ADAPTIVE in names else {}),
        logit_bias=_biases(fields, vocabulary),
        n=n,
        **beams,
        top_logprobs=_n_probs(fields),
        sampled_probs=fields.flag("post_sampling_probs"),
        n_indent=max(fields.integer("n_indent", 0), 0),
        line_seconds=max(fields.real("t_max_predict_ms", -1, -1e9, 1e9), 0) / 1000,
        **_grammar(fields),
    )


def settings_of(params: SamplingParams) -> dict[str, Any]:
    """What llama-server tells of the sampling of an answer."""
    n_predict = n_predict_of(params)
    seed = _SEED_BITS if params.seed is None else params.seed
    biases = [{"bias": _told_bias(bias), "token": token} for token, bias in params.logit_bias]  # type: ignore[misc]
    return {
        "seed": seed,
        "temperature": params.temperature,
        "dynatemp_range": params.dynatemp_range,
        "dynatemp_exponent": params.dynatemp_exponent,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "top_n_sigma": params.top_n_sigma,
        "xtc_probability": params.xtc_probability,
        "xtc_threshold": params.xtc_threshold,
        "typical_p": params.typical_p,
        "repeat_last_n": params.penalty_last_n,
        "repeat_penalty": params.repeat_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "dry_multiplier": params.dry_multiplier,
        "dry_base": params.dry_base,
        "dry_allowed_length": params.dry_allowed_length,
        "dry_penalty_last_n": params.dry_penalty_last_n,
        "dry_sequence_breakers": list(params.dry_sequence_breakers),
        "mirostat": params.mirostat,
        "mirostat_tau": params.mirostat_tau,
        "mirostat_eta": params.mirostat_eta,
        "adaptive_target": params.adaptive_target,
        "adaptive_decay": params.adaptive_decay,
        "stop": list(params.stop),
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": False,
        "stream": False,
        "logit_bias": biases,
        "n_probs": params.top_logprobs,
        "min_keep": params.min_keep,
        "grammar": params.grammar or "",
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": False,
        "generation_prompt": "",
        "samplers": [_TOLD_NAMES.get(name, name) for name in params.samplers],
        "timings_per_token": False,
        "post_sampling_probs": params.sampled_probs,
        "backend_sampling": False,
        "lora": [],
    }


def n_predict_of(params: SamplingParams) -> int:
    """The most tokens that were asked for; -1: as many as fit."""
    return -1 if params.max_tokens == INT32_MAX else params.max_tokens


def told_briefly(settings: Mapping[str, Any]) -> dict[str, Any]:
    """These settings without texts that a client gave, as /slots and /props tell them."""
    return {name: value for name, value in settings.items() if name not in _NOT_BRIEF}


def _max_tokens(fields: Fields, default: int) -> int:
    """-1: as many as fit. 0 says one token, as in llama-server."""
    names = [name for name in ("n_predict", "max_completion_tokens", "max_tokens") if name in fields]
    n_predict = (fields.integer(names[0], default, -1) or 1) if names else default
    return INT32_MAX if n_predict < 0 else n_predict


def wants_probs(fields: Fields) -> bool:
    """Whether a body wants the probability of each token, be it of no others in its place."""
    if isinstance(fields.get("logprobs"), bool):
        return fields.flag("logprobs")
    return fields.integer("logprobs", -1) >= 0 or _n_probs(fields) > 0


def _n_probs(fields: Fields) -> int:
    """logprobs is a number in OpenAI's texts, and true in its chats, where top_logprobs is the number."""
    if isinstance(fields.get("logprobs"), bool):
        return fields.integer("top_logprobs", 0, 0, _MOST_PROBS) if fields.flag("logprobs") else 0
    others = fields.integer("logprobs", 0, high=_MOST_PROBS)
    return max(fields.integer("n_probs", others, high=_MOST_PROBS), 0)


def _dry(fields: Fields) -> dict[str, Any]:
    """An empty list of breakers is an error in llama-server, too."""
    base = fields.real("dry_base", SamplingParams.dry_base, -1e6, 1e6)
    given: dict[str, Any] = {
        "dry_multiplier": max(fields.real("dry_multiplier", 0.0, -1e6, 1e6), 0.0),
        "dry_base": SamplingParams.dry_base if base < 1 else base,  # as llama-server does
        "dry_allowed_length": min(max(fields.integer("dry_allowed_length", 2), 0), _LAST_N),
        "dry_penalty_last_n": min(max(fields.integer("dry_penalty_last_n", 64), 0), _LAST_N),
    }
    if "dry_sequence_breakers" in fields:
        given["dry_sequence_breakers"] = fields.texts("dry_sequence_breakers")
        if fields.get("dry_sequence_breakers") == []:
            raise invalid("Error: dry_sequence_breakers must be a non-empty array of strings")
    return given


def _adaptive(fields: Fields) -> dict[str, Any]:
    return {
        "adaptive_target": min(fields.real("adaptive_target", -1.0, -1e6, 1e6), 1.0),
        "adaptive_decay": min(max(fields.real("adaptive_decay", 0.9, -1e6, 1e6), 0.0), 0.99),
    }


def _seed(fields: Fields) -> int | None:
    seed = fields.integer("seed", -1, -(2**63), 2**64) & _SEED_BITS
    return seed if seed <= MAX_SEED else None


def _grammar(fields: Fields) -> dict[str, Any]:
    grammar = fields.text("grammar")
    if grammar.strip():
        return {"grammar": grammar}
    return {"json_schema": fields.object("json_schema")} if "json_schema" in fields else {}


def _biases(fields: Fields, vocabulary: Vocabulary) -> dict[int, float]:
    """[[token or text, bias or false], ...] or {"token or text": bias, ...}."""
    given, n_vocab = fields.get("logit_bias", []), vocabulary.tokenizer.n_vocab
    if isinstance(given, (dict, list)) and len(given) > n_vocab:
        raise invalid(f"Field 'logit_bias': has {len(given)} pairs, and the model {n_vocab} tokens")
    pairs = [[_token_or_text(key), bias] for key, bias in given.items()] if isinstance(given, dict) else given
    found: dict[int, float] = {}
    if not isinstance(pairs, list):
        raise invalid(f"Field 'logit_bias': must be pairs of a token and a bias, got {shown(given)}")
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise invalid(f"Field 'logit_bias': must be pairs of a token and a bias, got {shown(pair)}")
        key, bias = pair
        if type(bias) is not float or bias > _MOST_BIAS:
            bias = _bias(bias)
        if type(key) is int:
            if 0 <= key < n_vocab:
                found[key] = bias
        elif isinstance(key, str):
            found.update(dict.fromkeys(vocabulary.tokenizer.encode(key, False), bias))
        else:
            raise invalid(f"Field 'logit_bias': must name tokens by number or text, got {shown(key)}")
    if fields.flag("ignore_eos"):
        found |= dict.fromkeys(vocabulary.eog, -math.inf)
    return found


def _bias(value: Any) -> float:
    if value is False:
        return -math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise invalid(f"Field 'logit_bias': a bias must be a number or false, got {shown(value)}")
    return float(max(min(value, _MOST_BIAS), -_MOST_BIAS))


def _token_or_text(key: str) -> int | str:
    return int(key) if key.isdecimal() and len(key) < 10 else key


def _told_bias(bias: float) -> float | None:
    return bias if math.isfinite(bias) else None


def _refuse_others(fields: Fields) -> None:
    """Raises WireError for a field that would be ignored."""
    fields.flag("backend_sampling")  # samplers run on the CPU, and say the same
    if fields.get("grammar_lazy", False) not in (False,):
        raise unsupported("grammar_lazy: this server can't do that; leave it out")


def sampler_names(fields: Fields) -> list[str]:
    """Of the samplers that a body asks for, which has names, or their letters. Raises WireError."""
    given: Any = fields.get("samplers", list(SAMPLERS[:-1]))
    if isinstance(given, str):
        names = [_LETTERS.get(letter, letter) for letter in given]
    elif isinstance(given, list):
        names = [_NAMES.get(str(name).lower().translate(_NO_DASHES), str(name)) for name in given]
    else:
        raise invalid(f"Field 'samplers': must be an array of names, got {shown(given)}")
    unknown = [name for name in names if name not in _NAMES.values()]
    if unknown:
        raise invalid(f"Field 'samplers': {shown(unknown[0])} is none of {', '.join(_LETTERS.values())}")
    if fields.integer("mirostat", 0) > 0:  # which llama-server uses alone
        return ["temperature"]
    return names
