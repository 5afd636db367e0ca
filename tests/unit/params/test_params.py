"""The parameters: each default once, and checks that name the field."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import click
import numpy as np
import pytest

from pykvgraph._native.ffi import KvgType
from pykvgraph.cli import main
from pykvgraph.context.context import Context
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.model.model import Model
from pykvgraph.params.biases import Biases
from pykvgraph.params.cache_type import CACHE_TYPES
from pykvgraph.params.params import ContextParams, ModelParams, SamplingParams, ThoughtLimit
from pykvgraph.plan.memory import plan_memory
from pykvgraph.sampling.sampler import Sampler
from pykvgraph.sequence.decode_loop import generate

GENERATED = {"max_tokens", "stop"}  # of a generation, not of a sampler
# of an engine's request alone
REQUESTED = {
    *("n", "priority", "top_logprobs", "special", "sampled_probs", "n_indent", "line_seconds"),
    *("beam_width", "length_penalty"),
}
SAMPLED = {field.name for field in dataclasses.fields(SamplingParams)} - GENERATED - REQUESTED


@pytest.mark.parametrize(
    ("params", "function", "names"),
    [
        (ModelParams, Model, None),
        (ModelParams, plan_memory, None),
        (ContextParams, Context, None),
        (SamplingParams, generate, SAMPLED | GENERATED),
        (SamplingParams, Sampler, SAMPLED),
    ],
)
def test_signatures_show_the_defaults(
    params: Any, function: Callable[..., Any], names: set[str] | None
) -> None:
    """Of every field, by its name."""
    shown = inspect.signature(function).parameters
    fields = [field for field in dataclasses.fields(params) if names is None or field.name in names]
    assert fields
    for field in fields:
        assert shown[field.name].default is field.default
    if function is Sampler:
        assert set(shown) == SAMPLED | {"tokenizer"}


# the values of options whose default is not the library's own, and why
OWN_DEFAULTS = {
    ("batch", "n_ctx"): "auto",  # many texts at once
    ("bench", "n_batch"): 2048,  # llama-bench's
    ("cells", "defrag_threshold"): -1.0,  # the script asks for it
    ("cells", "n_ctx"): 64,  # fits a terminal
    ("cells", "n_seq_max"): 4,  # of the demonstration
    ("chat", "max_tokens"): 512,  # of an answer
    ("chat", "temperature"): 0.8,  # a talk that says the same again would be dull
    ("passkey", "seed"): 1,  # of the task, not of a sampler
    ("quality", "seed"): 1,  # of the texts
    # llama-server's
    ("serve", "n_ctx"): "auto",
    ("serve", "temp"): 0.8,
    ("serve", "seed"): -1,
}


@pytest.mark.parametrize("verb", main.commands)
def test_options_have_the_same_defaults(verb: str) -> None:
    defaults = {
        field.name: field.default
        for params in (ModelParams, ContextParams, SamplingParams)
        for field in dataclasses.fields(params)
    }
    command = main.commands[verb]
    values = {option.name: option.get_default(click.Context(command)) for option in command.params}
    for name in defaults.keys() & {
        name for name, value in values.items() if isinstance(value, (str, int, float))
    }:
        expected = OWN_DEFAULTS.get((verb, name), defaults[name])
        assert values[name] == expected, name


NO_INTEGER = [1.5, "1", True, None]
NO_NUMBER = ["1", None, True, math.nan]


@pytest.mark.parametrize(
    ("params", "name", "values"),
    [
        (ModelParams, "device", [None, 0, "Gr\u00e4fin", "cpu\0"]),
        (ModelParams, "n_gpu_layers", [*NO_INTEGER, 2**63]),
        (ModelParams, "tensor_split", ["1,2", 5, [1, -1], [math.nan], [None]]),
        *((ContextParams, name, NO_INTEGER) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")),
        (ContextParams, "checkpoint_cells", NO_INTEGER),
        *((ContextParams, name, NO_INTEGER[:3]) for name in ("n_threads", "n_threads_batch")),
        *(
            (ContextParams, name, ["f12", "", None, 1, True, "f16:q4_0", "f16@9", "f16:q3@9", "f16:q4_0@0"])
            for name in ("type_k", "type_v")
        ),
        (ContextParams, "flash_attn", ["yes", None, 1]),
        *((ContextParams, name, [1, "on", None]) for name in ("hadamard", "offload_kqv", "swa_full")),
        (ContextParams, "defrag_threshold", NO_NUMBER),
        (SamplingParams, "max_tokens", [*NO_INTEGER, 0, -1]),
        (SamplingParams, "temperature", [*NO_NUMBER, -0.1, math.inf]),
        (SamplingParams, "top_k", [*NO_INTEGER, -1, 2**31]),
        *((SamplingParams, name, [*NO_NUMBER, -0.1, 1.1]) for name in ("top_p", "min_p", "typical_p")),
        (SamplingParams, "repeat_penalty", [*NO_NUMBER, 0.0, -1.0, math.inf]),
        *((SamplingParams, f"{name}_penalty", [*NO_NUMBER, math.inf]) for name in ("frequency", "presence")),
        (SamplingParams, "penalty_last_n", [*NO_INTEGER, -1]),
        (SamplingParams, "top_n_sigma", [*NO_NUMBER, math.inf]),
        (SamplingParams, "xtc_probability", [*NO_NUMBER, -0.1, 1.1]),
        *(
            (SamplingParams, name, [*NO_NUMBER, -0.1, math.inf])
            for name in (
                "xtc_threshold",
                "dynatemp_range",
                "dynatemp_exponent",
                "dry_multiplier",
                "dry_base",
            )
        ),
        *(
            (SamplingParams, f"dry_{name}", [*NO_INTEGER, -1])
            for name in ("allowed_length", "penalty_last_n")
        ),
        (SamplingParams, "dry_sequence_breakers", [5, None, [""], ["a", 1], ["a"] * 65]),
        (SamplingParams, "min_keep", [*NO_INTEGER, -1]),
        (SamplingParams, "adaptive_target", [*NO_NUMBER, 1.1]),
        (SamplingParams, "adaptive_decay", [*NO_NUMBER, -0.1, 1.0]),
        (SamplingParams, "thoughts", [5, "<think>"]),
        (SamplingParams, "beam_width", [*NO_INTEGER, 0, 4097]),
        (SamplingParams, "length_penalty", [*NO_NUMBER, 10.1, -10.1, math.inf]),
        (SamplingParams, "mirostat", [*NO_INTEGER, -1, 3]),
        *((SamplingParams, f"mirostat_{name}", [*NO_NUMBER, -1.0]) for name in ("tau", "eta")),
        (
            SamplingParams,
            "logit_bias",
            [5, None, "a", {1: "a"}, {-1: 0.0}, {1.5: 0.0}, {1: math.nan}, [1, 2]],
        ),
        (SamplingParams, "grammar", [5, "", " ", b"root", "root\0"]),
        (SamplingParams, "json_schema", [5, "", "[]", "{", [], {"a": object()}]),
        (SamplingParams, "seed", [1.5, True, -1, 2**32 - 1]),
        (SamplingParams, "stop", ["", [""], ["a", None], 5, None]),
    ],
)
def test_bad_values_are_named(params: Any, name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidArgumentError, match=name):
            params(**{name: value})


def test_types_that_age() -> None:
    """Fresh cells come in steps of 128, and no batch has more tokens than there are."""
    context = ContextParams(type_k="F16:Q4_0@1000", type_v="f16", n_batch=4096)
    assert (context.type_k, context.n_batch) == ("f16:q4_0@1000", 1024)
    native = context.native(1)
    types = KvgType.KVG_TYPE_F16, KvgType.KVG_TYPE_Q4_0, KvgType.KVG_TYPE_F16, KvgType.KVG_TYPE_F16
    assert (native.type_k, native.old_type_k, native.type_v, native.old_type_v) == types
    assert native.n_fresh == 1024
    assert ContextParams().native(1).n_fresh == 0
    with pytest.raises(InvalidArgumentError, match="same number of tokens"):
        ContextParams(type_k="f16:q4_0@1024", type_v="f16:q4_0@512")


def test_what_is_kept_is_plain() -> None:
    """Fields hold Python's own types, whatever was given, and can't be changed."""
    context = ContextParams(n_ctx=np.int64(64), type_k="F32", flash_attn="ON")  # type: ignore[arg-type]
    assert type(context.n_ctx) is int
    assert (context.n_ctx, context.type_k, context.flash_attn) == (64, "f32", "on")
    assert ModelParams(tensor_split=[1, 2]).tensor_split == (1.0, 2.0)
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=iter(["a", "b"])).stop == ("a", "b")
    assert SamplingParams(logit_bias={np.int64(3): -1}).logit_bias == ((3, -1.0),)
    assert SamplingParams(json_schema={"type": "string"}).json_schema == '{"type": "string"}'
    with pytest.raises(InvalidArgumentError, match="grammar and json_schema"):
        SamplingParams(grammar="root ::= []", json_schema={})
    again = SamplingParams(logit_bias={3: -1.0}, json_schema="{}")
    assert SamplingParams(**vars(again)) == again  # its fields are arguments
    # there may be as many as a model has tokens, which are looked at once
    assert dataclasses.replace(again, max_tokens=3).logit_bias is again.logit_bias
    for biases in (SamplingParams(**dataclasses.asdict(again)).logit_bias, copy.deepcopy(again).logit_bias):
        assert isinstance(biases, Biases) and biases.native.tolist() == [(3, -1.0)]
    assert hash(again)
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop=("a",)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.n_ctx = 1  # type: ignore[misc]


def test_cache_types_have_the_numbers_of_ggml() -> None:
    """By the gguf package: libllama, our referee, gets its types by these numbers, too."""
    gguf = pytest.importorskip("gguf")
    assert {name: gguf.GGMLQuantizationType[name.upper()] for name in CACHE_TYPES} == CACHE_TYPES


def test_threads_are_chosen_for_the_model() -> None:
    small, large = 1_000_000, 1_000_000_000
    assert ContextParams().native(small).n_threads == 1
    assert ContextParams().native(large).n_threads >= 1
    assert ContextParams(n_threads=3).native(small).n_threads_batch == 3
    native = ContextParams(n_threads=3, n_threads_batch=2).native(large)
    assert (native.n_threads, native.n_threads_batch) == (3, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 5),
        ("temperature", 0.1),
        ("typical_p", 0.9),
        ("xtc_probability", 0.1),
        ("dynatemp_range", 0.1),
        ("samplers", ["top_k"]),
        ("logit_bias", {1: 1.0}),
        ("repeat_penalty", 1.1),
        ("frequency_penalty", 0.1),
        ("presence_penalty", 0.1),
        ("dry_multiplier", 0.1),
        ("mirostat", 2),
        ("adaptive_target", 0.5),
        ("sampled_probs", True),
        ("thoughts", ThoughtLimit(5)),
        ("n_indent", 4),
        ("line_seconds", 1.0),
    ],
)
def test_what_beams_have_no_use_for_is_refused(name: str, value: Any) -> None:
    SamplingParams(**{name: value})
    with pytest.raises(InvalidArgumentError, match=f"^{name}: "):
        SamplingParams(beam_width=4, **{name: value})


def test_how_many_sequences_a_request_takes() -> None:
    assert [each.n_seqs for each in (SamplingParams(), SamplingParams(n=3))] == [1, 3]
    assert SamplingParams(beam_width=4, n=2).n_seqs == 4
