"""K and V in every type: logits against libllama's, rows against what the type itself costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.engines import OurEngine, decode, open_context, prompt_then_singles, random_ids, run_of
from support.judge import nmse
from support.kv_types import EVEN_BLOCKS, GGML_TYPES, QUANTIZED
from support.models import N_VOCAB, SMALL, ModelSpec
from support.referee import Referee

import pykvgraph as kvg

ModelFile = Callable[[ModelSpec], Path]

SPECS = [
    EVEN_BLOCKS,
    ModelSpec(n_layer=2, n_embd=192, n_head=2, n_head_kv=1, seed=4),  # heads of 96
    # heads of which libllama keeps quantized rows rotated
    ModelSpec(n_layer=2, n_embd=256, n_head=4, n_head_kv=2, seed=4),  # 64
    ModelSpec(n_layer=2, n_embd=256, n_head=2, n_head_kv=1, seed=5),  # 128
    ModelSpec(n_layer=2, n_embd=128, n_head=2, n_head_kv=1, head_dim=192, seed=6),
]
# against libllama's logits with the same types
ALLOWED = {"bf16": 1e-4, "q8_0": 1e-3, "q5_1": 1e-2, "q5_0": 1e-2, "q4_1": 2e-2, "q4_0": 2e-2}
N_PROMPT, N_SINGLE = 50, 64


@pytest.mark.parametrize("flash_attn", ["auto", "on"])
@pytest.mark.parametrize("kv_type", ALLOWED)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_logits(model_file: ModelFile, spec: ModelSpec, kv_type: str, flash_attn: str) -> None:
    """Near libllama's with these types, and no farther than its own from those of a cache in F32.

    libllama doesn't rotate rows of heads that aren't a multiple of 64: then the first is asked for unrotated.
    """
    path = model_file(spec)
    ids = random_ids(N_PROMPT + N_SINGLE, N_VOCAB, 1)
    theirs = {}
    for kind in (kv_type, "f32"):
        with Referee(path, flash=True, kv_type=kind) as referee:
            theirs[kind] = prompt_then_singles(referee, ids, N_PROMPT)
    options = {"n_ctx": 512, "type_k": kv_type, "type_v": kv_type, "flash_attn": flash_attn}
    with kvg.Model(path, device="cpu") as model:
        with open_context(model, **options) as ctx:
            ours = prompt_then_singles(OurEngine(ctx), ids, N_PROMPT)
        alike = ours
        if spec.k_dim % 64:
            with open_context(model, **options, hadamard=False) as ctx:
                alike = prompt_then_singles(OurEngine(ctx), ids, N_PROMPT)
    assert nmse(alike, theirs[kv_type]) <= ALLOWED[kv_type]
    for logits in (ours, alike):
        assert nmse(logits, theirs["f32"]) <= 1.25 * nmse(theirs[kv_type], theirs["f32"])


@pytest.mark.parametrize("type_v", GGML_TYPES)
@pytest.mark.parametrize("type_k", GGML_TYPES)
def test_any_two_types(model_file: ModelFile, type_k: str, type_v: str) -> None:
    """What is in the cache is as far from a cache in F32 as the gguf package's rounding would put it."""
    path = model_file(EVEN_BLOCKS)
    tokens = run_of(random_ids(40, N_VOCAB))
    with kvg.Model(path, device="cpu") as model:
        with open_context(model, n_ctx=64, type_k="f32", type_v="f32") as exact:
            logits = decode(exact, tokens)
            k, v = exact.kv.read_k(0), exact.kv.read_v(0)
        with open_context(model, n_ctx=64, type_k=type_k, type_v=type_v, hadamard=False) as ctx:
            assert nmse(decode(ctx, tokens), logits) <= 0.2
            for name, rows, read in (("K", k, ctx.kv.read_k(0)), ("V", v, ctx.kv.read_v(0))):
                kind = type_k if name == "K" else type_v
                own = np.square(rounded(rows, kind) - rows).sum()
                assert np.square(read - rows).sum() <= 1.02 * own + 1e-9, name
                assert np.square(read - rows).sum() >= 0.98 * own - 1e-9, name


def rounded(values: np.ndarray, kv_type: str) -> np.ndarray:
    """What a type keeps of them, by the gguf package."""
    kind = GGML_TYPES[kv_type]
    rows = values.reshape(-1, values.shape[-1])
    return gguf.dequantize(gguf.quantize(rows, kind), kind).reshape(values.shape)


@pytest.mark.parametrize("name", ["type_k", "type_v"])
@pytest.mark.parametrize("kv_type", QUANTIZED)
def test_blocks_that_do_not_fit_a_head(small: kvg.Model, name: str, kv_type: str) -> None:
    with pytest.raises(kvg.UnsupportedError, match=f'{name}="{kv_type}" .*32 .*heads of 16'):
        open_context(small, n_ctx=64, **{name: kv_type})


@pytest.mark.parametrize("name", ["type_k", "type_v"])
@pytest.mark.parametrize("value", ["q4_K", "iq4_nl", "f64", "", 1, None])
def test_what_is_no_cache_type(small: kvg.Model, name: str, value: object) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match=f"{name} .*'bf16'"):
        open_context(small, n_ctx=64, **{name: value})


def test_memory_follows_the_types(model_file: ModelFile) -> None:
    with kvg.Model(model_file(SMALL), device="cpu") as model:
        with open_context(model, n_ctx=256) as ctx:
            half = ctx.kv.bytes
        with open_context(model, n_ctx=256, type_k="f32", type_v="f32") as ctx:
            assert ctx.kv.bytes == 2 * half
    with kvg.Model(model_file(EVEN_BLOCKS), device="cpu") as model:
        with open_context(model, n_ctx=256) as ctx:
            half = ctx.kv.bytes
        with open_context(model, n_ctx=256, type_k="q8_0", type_v="q4_0") as ctx:
            assert ctx.kv.bytes * 128 == half * (34 + 18)


@pytest.mark.parametrize("kv_type", QUANTIZED)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
def test_rows_read_as_if_never_rotated(model_file: ModelFile, head_dim: int, kv_type: str) -> None:
    """Rotated or not, K and V are a cache's in F32, to the rounding of their type."""
    path = model_file(ModelSpec(n_head=4, n_head_kv=1, head_dim=head_dim, seed=7))
    tokens = run_of(random_ids(60, N_VOCAB))
    with kvg.Model(path, device="cpu") as model:
        with open_context(model, n_ctx=64, type_k="f32", type_v="f32") as exact:
            decode(exact, tokens)
            rows = [exact.kv.read_k(0), exact.kv.read_v(0)]
        for hadamard in (True, False):
            with open_context(model, n_ctx=64, type_k=kv_type, type_v=kv_type, hadamard=hadamard) as ctx:
                decode(ctx, tokens)
                for row, read in zip(rows, (ctx.kv.read_k(0), ctx.kv.read_v(0)), strict=True):
                    own = np.square(rounded(row, kv_type) - row).sum()
                    assert np.square(read - row).sum() <= 1.2 * own


@pytest.mark.parametrize("head_dim", [32, 64, 96])
def test_rows_are_rotated_unless_told_not_to(model_file: ModelFile, head_dim: int) -> None:
    """K and V of a context that is told to are those of one that is told nothing."""
    path = model_file(ModelSpec(n_layer=1, n_head=2, n_head_kv=1, head_dim=head_dim, seed=8))
    tokens = run_of(random_ids(60, N_VOCAB))
    kept = []
    with kvg.Model(path, device="cpu") as model:
        for options in ({}, {"hadamard": True}, {"hadamard": False}):
            with open_context(model, n_ctx=64, type_k="q4_0", type_v="q4_0", **options) as ctx:
                decode(ctx, tokens)
                kept.append([ctx.kv.read_k(0), ctx.kv.read_v(0)])
    for told_nothing, told_to, told_not_to in zip(*kept, strict=True):
        assert np.array_equal(told_nothing, told_to)
        assert not np.array_equal(told_nothing, told_not_to)


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
@pytest.mark.parametrize("head_dim", [32, 96, 128])
def test_what_the_rotation_is_for(model_file: ModelFile, head_dim: int, kv_type: str) -> None:
    """A pair of dimensions of K that is 30 times the others costs them their precision, else."""
    path = model_file(ModelSpec(n_layer=1, n_head=2, n_head_kv=1, head_dim=head_dim, outliers=30, seed=8))
    tokens = run_of(random_ids(60, N_VOCAB))
    k = {}
    with kvg.Model(path, device="cpu") as model:
        for name, options in (
            ("exact", {"type_k": "f32"}),
            ("rotated", {"type_k": kv_type}),
            ("plain", {"type_k": kv_type, "hadamard": False}),
        ):
            with open_context(model, n_ctx=64, **options) as ctx:
                decode(ctx, tokens)
                k[name] = ctx.kv.read_k(0)
    assert np.square(k["rotated"] - k["exact"]).sum() <= 0.6**2 * np.square(k["plain"] - k["exact"]).sum()


def test_what_is_no_choice_of_rotation(small: kvg.Model) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match="hadamard must be True or False, got 'off'"):
        open_context(small, n_ctx=64, hadamard="off")


@pytest.mark.parametrize("kv_types", [("q8_0", "f16"), ("f16", "q8_0")])
def test_a_state_of_rotated_rows_goes_into_such_a_cache(
    model_file: ModelFile, kv_types: tuple[str, str]
) -> None:
    options = {"n_ctx": 64, "type_k": kv_types[0], "type_v": kv_types[1]}
    with (
        kvg.Model(model_file(EVEN_BLOCKS), device="cpu") as model,
        open_context(model, **options, hadamard=True) as rotated,
        open_context(model, **options, hadamard=False) as plain,
    ):
        decode(rotated, run_of(random_ids(20, N_VOCAB)))
        rows = rotated.kv.read_k(0), rotated.kv.read_v(0)
        blob = rotated.kv.save()
        with pytest.raises(kvg.StateError, match="= q8_0 with hadamard; this one has q8_0:"):
            plain.kv.load(blob)
        rotated.reset()
        rotated.kv.load(blob)
        assert np.array_equal(rows[0], rotated.kv.read_k(0))
        assert np.array_equal(rows[1], rotated.kv.read_v(0))
