"""The parameters of a model, a context and a generation, with their defaults and checks.

The signatures of Model, Context, Sampler and generate take their defaults from here, as in
`n_ctx: int = ContextParams.n_ctx`; so do the command line and the bench. Some values, such as a size or a
device's name, can only be checked by the native code; it does so when it gets the parameters.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from pykvgraph._native.ffi import KvgContextParams, KvgFlashAttn, KvgKvTier, KvgModelParams
from pykvgraph._native.fork import importing
from pykvgraph._native.library import sized
from pykvgraph.checks import INT32_MAX, flag, indices, integer, native_path, real, shown, strings
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.params.biases import checked_biases
from pykvgraph.params.cache_type import CACHE_TYPES, fresh_cells, parse_cache_type
from pykvgraph.params.cpus import usable_cpus
from pykvgraph.params.overrides import Overrides, checked_overrides, native_overrides

KV_TIERS: dict[str, int] = {
    "device": KvgKvTier.KVG_KV_TIER_DEVICE,
    "host": KvgKvTier.KVG_KV_TIER_HOST,
    "auto": KvgKvTier.KVG_KV_TIER_HOST,  # what takes least there, until it is known how many layers fit
}
_FLASH_ATTN: dict[str | bool, int] = {
    "auto": KvgFlashAttn.KVG_FLASH_ATTN_AUTO,
    "on": KvgFlashAttn.KVG_FLASH_ATTN_ON,
    "off": KvgFlashAttn.KVG_FLASH_ATTN_OFF,
    True: KvgFlashAttn.KVG_FLASH_ATTN_ON,
    False: KvgFlashAttn.KVG_FLASH_ATTN_OFF,
}
# what changes and sorts out candidates, in the order of llama.cpp; infill is only there when it is asked for
SAMPLERS = (
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typical_p",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
    "infill",
)
MOST_SCALE = 1e6  # of a LoRA adapter
MAX_SEED = 2**32 - 2  # for libllama, 2^32 - 1 means a random seed
_MAX_THREADS = 512
_MAX_LAST_N = 1 << 20
_MOST_BREAKERS = 64
_MOST_SAMPLERS = 64
_MOST_SAMPLES = 4096
_LONGEST_GRAMMAR = 1 << 20
_SMALL_MODEL = 10_000_000  # parameters
MARGIN = 20  # per cent of the free memory, for what others may take meanwhile
# what draws, changes logits, or ends a text by the clock or its lines
_NOT_WITH_BEAMS = (
    *("temperature", "typical_p", "xtc_probability", "dynatemp_range", "samplers", "logit_bias"),
    *("repeat_penalty", "frequency_penalty", "presence_penalty", "dry_multiplier", "mirostat"),
    *("adaptive_target", "sampled_probs", "thoughts", "n_indent", "line_seconds"),
)


@dataclass(frozen=True)
class ModelParams:
    """Where the layers of a model go; the fields are Model's arguments.

    Raises InvalidArgumentError, which names the field.
    """

    device: str = "auto"
    n_gpu_layers: int = -1
    tensor_split: Sequence[float] | None = None
    kv_overrides: Overrides | None = None
    layers: range | None = None
    draft_heads: bool = False
    assistant: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.device, str) or not self.device.isascii() or "\0" in self.device:
            raise InvalidArgumentError(
                f'device must be "auto" or names that pykvgraph.devices() lists, got {shown(self.device)}'
            )
        _set(
            self,
            n_gpu_layers=integer(self.n_gpu_layers, "n_gpu_layers"),
            tensor_split=_shares(self.tensor_split),
            kv_overrides=checked_overrides(self.kv_overrides),
            layers=None if self.layers is None else _stage(self.layers),
            draft_heads=flag(self.draft_heads, "draft_heads"),
            assistant=None if self.assistant is None else Path(os.fsdecode(native_path(self.assistant))),
        )

    def native(self) -> KvgModelParams:
        """The struct for kvg_model_load and kvg_plan_new."""
        shares, overrides = self.tensor_split or (), native_overrides(self.kv_overrides or {})
        layers = range(0) if self.layers is None else self.layers
        return sized(
            KvgModelParams,
            devices=self.device.encode(),
            n_gpu_layers=self.n_gpu_layers,
            tensor_split=(ctypes.c_float * len(shares))(*shares) if shares else None,
            n_split=len(shares),
            overrides=overrides if overrides else None,
            n_overrides=len(overrides),
            layer_begin=layers.start,
            layer_end=layers.stop,
            draft_heads=self.draft_heads,
            assistant=None if self.assistant is None else native_path(self.assistant),
        )


@dataclass(frozen=True)
class ContextParams:
    """The sizes of a context and how it computes; the fields are Context's arguments.

    Raises InvalidArgumentError, which names the field.
    """

    n_ctx: int = 4096
    n_batch: int = 512
    n_ubatch: int = 512
    n_seq_max: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: Literal["auto", "on", "off"] | bool = "auto"
    hadamard: bool = True
    n_threads: int | None = None
    n_threads_batch: int | None = None
    defrag_threshold: float = 0.1
    offload_kqv: bool = True
    swa_full: bool = False
    checkpoint_cells: int = 0
    checkpoint_bytes: int | None = None
    kv_tier: Literal["device", "host", "auto"] = "device"
    device_layers: int = 2
    resident_layers: int = 0
    n_outputs_max: int = 0

    def __post_init__(self) -> None:
        threads = {"n_threads": self.n_threads, "n_threads_batch": self.n_threads_batch}
        type_k, type_v = parse_cache_type(self.type_k, "type_k"), parse_cache_type(self.type_v, "type_v")
        n_batch, n_fresh = integer(self.n_batch, "n_batch"), fresh_cells(type_k, type_v)
        _set(
            self,
            n_ctx=integer(self.n_ctx, "n_ctx"),
            n_batch=min(n_batch, n_fresh or n_batch),  # all tokens of a batch are fresh at once
            n_ubatch=integer(self.n_ubatch, "n_ubatch"),
            n_seq_max=integer(self.n_seq_max, "n_seq_max"),
            **{name: integer(value, name) for name, value in threads.items() if value is not None},
            type_k=str(type_k),
            type_v=str(type_v),
            flash_attn=_choice(self.flash_attn, "flash_attn", _FLASH_ATTN),
            hadamard=flag(self.hadamard, "hadamard"),
            defrag_threshold=real(self.defrag_threshold, "defrag_threshold", -1e30, 1e30),
            offload_kqv=flag(self.offload_kqv, "offload_kqv"),
            swa_full=flag(self.swa_full, "swa_full"),
            checkpoint_cells=integer(self.checkpoint_cells, "checkpoint_cells"),
            checkpoint_bytes=None
            if self.checkpoint_bytes is None
            else integer(self.checkpoint_bytes, "checkpoint_bytes", 0),
            kv_tier=_choice(self.kv_tier, "kv_tier", KV_TIERS),
            device_layers=integer(self.device_layers, "device_layers", 1),
            resident_layers=integer(self.resident_layers, "resident_layers", 0),
            n_outputs_max=integer(self.n_outputs_max, "n_outputs_max", 0),
        )

    def native(self, n_params: int) -> KvgContextParams:
        """The struct for kvg_context_new and kvg_plan_new, for a model of n_params parameters."""
        n_threads = default_threads(n_params) if self.n_threads is None else self.n_threads
        type_k, type_v = parse_cache_type(self.type_k, "type_k"), parse_cache_type(self.type_v, "type_v")
        return sized(
            KvgContextParams,
            n_ctx=self.n_ctx,
            n_batch=self.n_batch,
            n_ubatch=self.n_ubatch,
            n_seq_max=self.n_seq_max,
            n_threads=n_threads,
            n_threads_batch=n_threads if self.n_threads_batch is None else self.n_threads_batch,
            type_k=CACHE_TYPES[type_k.fresh],
            type_v=CACHE_TYPES[type_v.fresh],
            n_fresh=fresh_cells(type_k, type_v),
            old_type_k=CACHE_TYPES[type_k.old or type_k.fresh],
            old_type_v=CACHE_TYPES[type_v.old or type_v.fresh],
            flash_attn=_FLASH_ATTN[self.flash_attn],
            hadamard=self.hadamard,
            defrag_threshold=self.defrag_threshold,
            offload_kqv=self.offload_kqv,
            swa_full=self.swa_full,
            checkpoint_cells=self.checkpoint_cells,
            checkpoint_bytes=-1 if self.checkpoint_bytes is None else self.checkpoint_bytes,
            kv_tier=KV_TIERS[self.kv_tier],
            device_layers=self.device_layers,
            resident_layers=self.resident_layers,
            n_outputs_max=self.n_outputs_max,
        )


@dataclass(frozen=True)
class ThoughtLimit:
    """How much a model may think in one text: what SamplingParams.thoughts takes.

    n_tokens: most tokens between the marks `open` and `close`, as the model's chat template writes them; then
    `message` and the closing mark are said, whatever the model would say. n_begun: tokens of thoughts that
    the prompt ends with; None: the model has yet to open them.

    Raises InvalidArgumentError, which names the field.
    """

    n_tokens: int
    open: str = "<think>"
    close: str = "</think>"
    message: str = ""
    n_begun: int | None = None

    def __post_init__(self) -> None:
        for name in ("open", "close", "message"):
            value = getattr(self, name)
            if not isinstance(value, str) or not (value or name == "message"):
                raise InvalidArgumentError(f"{name} must be a text, got {shown(value)}")
        _set(
            self,
            n_tokens=integer(self.n_tokens, "n_tokens", 0, INT32_MAX),
            n_begun=None if self.n_begun is None else integer(self.n_begun, "n_begun", 0, INT32_MAX),
        )


@dataclass(frozen=True)
class SamplingParams:
    """How a text is generated; the fields are arguments of generate, but for those of an Engine.

    max_tokens: most tokens to generate. temperature: 0 takes the likeliest token, and top_k, top_p, min_p and
    seed do not matter then. top_k: draw from this many of the likeliest tokens; 0: from all. top_p: draw from
    the likeliest tokens that together have this probability; 1: from all. min_p: draw from tokens that have
    at least this share of the likeliest token's probability; 0: from all. seed: 0 to 2^32 - 2, or None for a
    random seed. stop: the text ends before the first of these strings; a single string may be given as it is.

    typical_p: draw from the tokens nearest to the expected information that together have this probability
    (arXiv:2202.00666); 1: from all. top_n_sigma: draw from tokens whose logits are at most this many standard
    deviations below the largest (arXiv:2411.07641); 0 and less: from all. xtc_probability: with this
    probability, leave out all tokens that have at least the probability xtc_threshold, but for the least
    likely of them; 0: never. dynatemp_range: the temperature follows the entropy, from temperature less this
    to temperature and this, by a power of dynatemp_exponent; 0: off.

    Penalties make tokens less likely that were among the last penalty_last_n of the prompt and the text:
    repeat_penalty divides (negative: multiplies) their logits, 1: off; frequency_penalty is subtracted
    once for each time, presence_penalty once; 0: off. DRY does so with tokens that would go on with a
    repetition of more than dry_allowed_length tokens, within the last dry_penalty_last_n: it subtracts
    dry_multiplier times dry_base to the power of what the repetition has more; dry_multiplier 0: off. No
    repetition goes across one of dry_sequence_breakers.

    mirostat: 1 or 2: keep the text's surprise at mirostat_tau, learning at the rate mirostat_eta
    (arXiv:2007.14966), in place of top_k, top_p, min_p, typical_p, top_n_sigma, xtc and dynatemp; 0: off.
    min_keep: how many tokens top_p, min_p, typical_p and xtc leave at least. adaptive_target: what is left is
    drawn from so that the probabilities of what was drawn are about this in the mean, of which a draw forgets
    1 - adaptive_decay (llama.cpp's adaptive-p); negative: off.
    samplers: which of these there are, and in which order; those of SAMPLERS but for infill, unless it is
    given: libllama's sampler for what comes between a prefix and a suffix, whole tokens of words, and an end
    where that is likely. logit_bias and the grammar come before them, a random draw behind them.
    logit_bias: what is added to the logits of some tokens, {token: bias}; -inf forbids one. grammar: only
    texts of this grammar, in llama.cpp's GBNF with the rule `root`, or in llguidance's Lark behind a line
    `%llguidance {}`. json_schema: only JSON that follows this schema, given as a dict or as its JSON text;
    {}: any JSON object. These, the penalties and DRY matter at temperature 0 too, and so do xtc and
    dynatemp_range.

    For an Engine: n: how many texts behind the same prompt; with a seed, the text after that takes the next
    one. beam_width: from 2 on, beam search: in each step so many of the likeliest texts go on, and the n best
    that were found are the answers, the best first (docs/many-requests.md). It takes temperature 0, and
    nothing that changes probabilities. length_penalty: the best text has the highest sum of its tokens' log
    probabilities, divided by their number to this power; 0: the highest sum. It matters to beams only.
    priority: requests with a higher one enter first. top_logprobs: of how many of the likeliest tokens
    each Piece tells the probabilities (Piece.top). special: control tokens add their names to the text.
    sampled_probs: Piece.logprob and Piece.top tell the probabilities that a token was drawn with, behind all
    samplers, in place of the model's own. n_indent: the text ends before a line that begins with fewer spaces
    and tabs. line_seconds: it ends with the first line that ends so many seconds after its first token; 0: it
    doesn't.
    thoughts: a ThoughtLimit; None: as many as the model wants.

    Raises InvalidArgumentError, which names the field.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None
    stop: str | Iterable[str] = ()
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    penalty_last_n: int = 64
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: Iterable[str] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    min_keep: int = 0
    samplers: Iterable[str] = SAMPLERS[:-1]
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = ()
    grammar: str | None = None
    json_schema: str | Mapping[str, Any] | None = None
    n: int = 1
    beam_width: int = 1
    length_penalty: float = 1.0
    priority: int = 0
    top_logprobs: int = 0
    special: bool = False
    sampled_probs: bool = False
    n_indent: int = 0
    line_seconds: float = 0.0
    thoughts: ThoughtLimit | None = None

    def __post_init__(self) -> None:
        _set(
            self,
            n=integer(self.n, "n", 1, _MOST_SAMPLES),
            beam_width=integer(self.beam_width, "beam_width", 1, _MOST_SAMPLES),
            length_penalty=real(self.length_penalty, "length_penalty", -10.0, 10.0),
            priority=integer(self.priority, "priority"),
            top_logprobs=integer(self.top_logprobs, "top_logprobs", 0, INT32_MAX),
            special=flag(self.special, "special"),
            sampled_probs=flag(self.sampled_probs, "sampled_probs"),
            n_indent=integer(self.n_indent, "n_indent", 0, INT32_MAX),
            line_seconds=real(self.line_seconds, "line_seconds", 0.0, 1e9),
            max_tokens=integer(self.max_tokens, "max_tokens", 1),
            temperature=real(self.temperature, "temperature", 0.0, 1e6),
            top_k=integer(self.top_k, "top_k", 0, INT32_MAX),
            top_p=real(self.top_p, "top_p", 0.0, 1.0),
            min_p=real(self.min_p, "min_p", 0.0, 1.0),
            seed=None if self.seed is None else integer(self.seed, "seed", 0, MAX_SEED),
            stop=strings(self.stop, "stop"),
            typical_p=real(self.typical_p, "typical_p", 0.0, 1.0),
            top_n_sigma=real(self.top_n_sigma, "top_n_sigma", -1e6, 1e6),
            xtc_probability=real(self.xtc_probability, "xtc_probability", 0.0, 1.0),
            xtc_threshold=real(self.xtc_threshold, "xtc_threshold", 0.0, 1e6),
            dynatemp_range=real(self.dynatemp_range, "dynatemp_range", 0.0, 1e6),
            dynatemp_exponent=real(self.dynatemp_exponent, "dynatemp_exponent", 0.0, 1e6),
            repeat_penalty=real(self.repeat_penalty, "repeat_penalty", 1e-6, 1e6),
            frequency_penalty=real(self.frequency_penalty, "frequency_penalty", -1e6, 1e6),
            presence_penalty=real(self.presence_penalty, "presence_penalty", -1e6, 1e6),
            penalty_last_n=integer(self.penalty_last_n, "penalty_last_n", 0, _MAX_LAST_N),
            dry_multiplier=real(self.dry_multiplier, "dry_multiplier", 0.0, 1e6),
            dry_base=real(self.dry_base, "dry_base", 0.0, 1e6),
            dry_allowed_length=integer(self.dry_allowed_length, "dry_allowed_length", 0, _MAX_LAST_N),
            dry_penalty_last_n=integer(self.dry_penalty_last_n, "dry_penalty_last_n", 0, _MAX_LAST_N),
            dry_sequence_breakers=_breakers(self.dry_sequence_breakers),
            mirostat=integer(self.mirostat, "mirostat", 0, 2),
            mirostat_tau=real(self.mirostat_tau, "mirostat_tau", 0.0, 1e6),
            mirostat_eta=real(self.mirostat_eta, "mirostat_eta", 0.0, 1e6),
            min_keep=integer(self.min_keep, "min_keep", 0, INT32_MAX),
            samplers=_samplers(self.samplers),
            adaptive_target=real(self.adaptive_target, "adaptive_target", -1e6, 1.0),
            adaptive_decay=real(self.adaptive_decay, "adaptive_decay", 0.0, 0.99),
            logit_bias=checked_biases(self.logit_bias),
            grammar=_grammar(self.grammar),
            json_schema=_json_text(self.json_schema),
        )
        if not isinstance(self.thoughts, ThoughtLimit | None):
            raise InvalidArgumentError(f"thoughts must be a ThoughtLimit, got {shown(self.thoughts)}")
        if self.grammar is not None and self.json_schema is not None:
            raise InvalidArgumentError(
                "grammar and json_schema: give one of them, a schema becomes a grammar"
            )
        if self.beam_width > 1:
            self._require_beams()

    @property
    def n_seqs(self) -> int:
        """How many sequences of the cache a request takes: one for each text, or for each beam."""
        return self.n if self.beam_width == 1 else self.beam_width

    def _require_beams(self) -> None:
        """Raises InvalidArgumentError for what a beam search has no use for, or would be spoiled by."""
        if self.n > self.beam_width:
            raise InvalidArgumentError(
                f"n: a search with beam_width {self.beam_width} can't find {self.n} texts: raise beam_width"
            )
        for name in _NOT_WITH_BEAMS:
            if getattr(self, name) != getattr(SamplingParams, name):
                raise InvalidArgumentError(
                    f"{name}: beams are ranked by the model's own probabilities, so {name} can't be "
                    f"{shown(getattr(self, name))} with beam_width; leave one of the two out"
                )

    def of_sample(self, number: int) -> SamplingParams:
        """Those of one of the n texts, from 0 on."""
        if self.seed is None or not number:
            return self
        return dataclasses.replace(self, seed=(self.seed + number) % (MAX_SEED + 1))


P = TypeVar("P", ContextParams, SamplingParams)


def params_of(kind: type[P], arguments: Mapping[str, Any]) -> P:
    """The parameters among a function's arguments, which have the names of the fields."""
    return kind(**{field.name: arguments[field.name] for field in fields(kind) if field.name in arguments})


def default_threads(n_params: int) -> int:
    """The number of CPUs that this process may use; 1 for a small model, which more threads make slower."""
    return 1 if n_params < _SMALL_MODEL else min(usable_cpus(), _MAX_THREADS)


def _set(params: object, **checked: Any) -> None:
    """Sets fields of a frozen dataclass; only for __post_init__."""
    for name, value in checked.items():
        object.__setattr__(params, name, value)


def _stage(layers: range) -> range:
    stage = indices(layers, "layers")
    if not stage:
        raise InvalidArgumentError(f"layers: {layers} has no layer; a stage has one or more")
    return stage


def _shares(tensor_split: Any) -> tuple[float, ...] | None:
    if tensor_split is None:
        return None
    if isinstance(tensor_split, (str, bytes)):
        raise InvalidArgumentError(f"tensor_split must be numbers, got {shown(tensor_split)}")
    try:
        values = list(tensor_split)
    except TypeError:
        raise InvalidArgumentError(f"tensor_split must be numbers, got {shown(tensor_split)}") from None
    return tuple(real(value, f"tensor_split[{i}]", 0, 1e30) for i, value in enumerate(values))


def _breakers(values: Any) -> tuple[str, ...]:
    """libllama looks through its whole vocabulary for each."""
    breakers = strings(values, "dry_sequence_breakers")
    if len(breakers) > _MOST_BREAKERS:
        raise InvalidArgumentError(
            f"dry_sequence_breakers: {len(breakers)} are too many, over {_MOST_BREAKERS}"
        )
    return breakers


def _samplers(values: Any) -> tuple[str, ...]:
    names = strings(values, "samplers")
    unknown = [name for name in names if name not in SAMPLERS]
    if unknown:
        raise InvalidArgumentError(f"samplers: {shown(unknown[0])} is none of {', '.join(SAMPLERS)}")
    if len(names) > _MOST_SAMPLERS:
        raise InvalidArgumentError(f"samplers: {len(names)} are too many, over {_MOST_SAMPLERS}")
    return names


def _grammar(text: Any) -> str | None:
    if text is not None and (not isinstance(text, str) or not text.strip() or "\0" in text):
        raise InvalidArgumentError(f"grammar must be a text in GBNF or Lark, got {shown(text)}")
    if text is not None and len(text) > _LONGEST_GRAMMAR:
        raise InvalidArgumentError(f"the grammar has {len(text)} characters, over {_LONGEST_GRAMMAR}")
    try:
        (text or "").encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"the grammar has half a character: {error}") from None
    return text


def _json_text(schema: Any) -> str | None:
    """A JSON schema as JSON text. Raises InvalidArgumentError for what is no JSON object."""
    if schema is None:
        return None
    try:
        with importing:
            import json
        value = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(value, Mapping):
            raise ValueError("it is no object")
        return json.dumps(dict(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(
            f"json_schema must be a JSON schema, got {shown(schema)}: {error}"
        ) from None


def _choice(value: Any, name: str, choices: dict[Any, int]) -> Any:
    """`value`, in lower case if it is a string. Raises InvalidArgumentError if `choices` lacks it."""
    chosen = value.lower() if isinstance(value, str) else value
    if not isinstance(value, (str, bool)) or chosen not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        raise InvalidArgumentError(f"{name} must be one of {expected}, got {shown(value)}")
    return chosen
