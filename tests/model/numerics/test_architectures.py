"""Every architecture that has a recipe: its logits against libllama's on the same file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import chance, random_archs
from support.arch_spec import NEMOTRONS
from support.arch_table import Judged, Record, leave
from support.architectures import ArchSpec
from support.engines import prompt_then_singles, random_ids
from support.gguf_bytes import STRING, RawGguf, text
from support.judge import EXACT, exact_error, judge, nmse
from support.models import N_VOCAB, WeightType

import pykvgraph as kvg
from pykvgraph.model.architectures import architectures

Architecture = Callable[[ArchSpec], Path]

N_PROMPT, N_TOKENS = 80, 200
N_FEW = 60

# dense, experts, and what llama.cpp's own random files leave out: query heads that share K and V, 8 experts
# of which 2 are used, fused matrices, rope that is scaled, and rotates a part of a head
SPECS = [
    ArchSpec("llama", n_expert=8),
    ArchSpec("llama", fused=True),
    ArchSpec("llama", scaling="yarn"),
    ArchSpec("llama", scaling="linear"),
    ArchSpec("llama", scaling="longrope"),
    ArchSpec("qwen2", head_dim=16),
    ArchSpec("qwen2", head_dim=16, scaling="yarn", fused=True),
    ArchSpec("qwen3", n_head=8, n_head_kv=1),
    ArchSpec("qwen3", scaling="yarn"),
    ArchSpec("qwen3moe", n_expert=8),
    ArchSpec("qwen3moe", n_expert=4, n_expert_used=1),
    ArchSpec("phi3", head_dim=16, fused=True),
    ArchSpec("gemma2", window=24),
    ArchSpec("gpt-oss", window=24, n_expert=8),
    ArchSpec("gpt-oss", window=24, n_expert=8, scaling="yarn"),
    ArchSpec("gpt-oss", window=24, n_expert=8, n_embd=128, n_ff=64, expert_weights=WeightType.MXFP4),
    ArchSpec("gemma3", n_layer=3, window=24, scaling="yarn"),
    ArchSpec("gemma3", n_layer=6, window=24, period=3),
    ArchSpec("gemma3", n_layer=3, window=24, scaling="linear", n_head=8, n_head_kv=1),
    ArchSpec("gemma3"),
    ArchSpec("gemma4", n_layer=4, window=24),
    ArchSpec("gemma4", n_layer=6, window=24, period=3, head_dim_window=16, n_head_kv_window=4),
    ArchSpec("gemma4", n_layer=6, window=24, head_dim_window=16, n_shared=2),
    ArchSpec("gemma4", n_layer=6, window=24, n_shared=4, spare_kv=True, n_embd_layer=32),
    ArchSpec("gemma4", n_layer=4, window=24, n_shared=2, fused=True, n_embd_layer=16),
    ArchSpec("gemma4", n_layer=4, window=24, v_of_k=True, n_embd_layer=32),
    ArchSpec("gemma4", n_layer=4, window=24, head_dim_window=16, n_expert=8),
    ArchSpec("gemma4", n_layer=4, window=24, n_expert=8, fused=True, n_shared=2, n_embd_layer=32),
    # with more than 20 layers, later ones read K and V of the twentieth and the one before it
    *(ArchSpec("gemma3n", n_layer=5, window=24, period=5, seed=seed) for seed in range(3)),
    ArchSpec("gemma3n", 24, 32, 4, 2, 16, 48, window=24, period=5),
    ArchSpec("gemma3n", 26, 32, 4, 1, 16, 48, window=24, period=5, fused=True, seed=1),
    ArchSpec("phi3", head_dim=16, fused=True, biases=True, n_rot=12),
    ArchSpec("phi3", head_dim=16, fused=True, scaling="longrope"),
    ArchSpec("phi3", head_dim=16, fused=True, scaling="longrope", n_ctx_orig=512),
]
# norms elsewhere than before, or wider than a head; layers that rotate nothing; scales; no gate
MORE = [
    ArchSpec("gemma", head_dim=16, n_head=8, n_head_kv=1),
    ArchSpec("qwen2moe", head_dim=16, n_expert=8, n_ff_shared=48),
    ArchSpec("olmo2", head_dim=16),
    ArchSpec("olmo2", head_dim=16, n_layer=8, window=24, period=4, scaling="yarn"),
    ArchSpec("olmoe", head_dim=16, n_head_kv=4, n_expert=8),
    ArchSpec("smollm3", n_layer=8),
    ArchSpec("smollm3", n_layer=4, fused=True),
    ArchSpec("seed_oss", biases=True),
    ArchSpec("arcee", scaling="yarn"),
    ArchSpec("exaone4", head_dim=16),
    ArchSpec("exaone4", 64, 32, 2, 1, 16, 32, window=24, period=4),
    ArchSpec("glm4", fused=True, n_rot=16, biases=True),
    ArchSpec("glm4", n_rot=16, sections=(4, 4, 4, 0)),
    ArchSpec("granite"),
    ArchSpec("granite", n_rot=-1),
    ArchSpec("granitemoe", n_expert=8, n_ff_shared=48, seed=1),  # with 0, two experts are as good for a token
    ArchSpec("granitemoe", n_rot=-1),  # it rotates all the same
    ArchSpec("ernie4_5"),
    ArchSpec("mistral3", scaling="yarn", temperature=0.5, yarn_gain=0.7),
    ArchSpec("mistral3", n_expert=8),
    ArchSpec("hunyuan-dense"),
    ArchSpec("hunyuan-dense", scaling="yarn", n_head=8, n_head_kv=1),
    ArchSpec("hunyuan-moe", n_expert=8, n_ff_shared=48),
    ArchSpec("apertus", scaling="linear"),
    *(ArchSpec("apertus", n_head=8, n_head_kv=1, seed=seed) for seed in range(3)),
]
# layer norms, and feed-forwards beside attention
LAYER_NORMS = [
    ArchSpec("falcon", head_dim=16, n_head_kv=1, fused=True),
    ArchSpec("falcon", head_dim=16, two_norms=True, fused=True),
    ArchSpec("gpt2", head_dim=16, n_head_kv=4, fused=True),
    ArchSpec("command-r", head_dim=16),
    ArchSpec("command-r", 64, 32, 2, 1, 16, 32, norms_by_head=True),
    ArchSpec("cohere2", head_dim=16, n_layer=8, window=24, period=4),
    ArchSpec("phi2", head_dim=16, n_rot=8),
    ArchSpec("phimoe", head_dim=16, n_expert=8, scaling="longrope"),
    ArchSpec("stablelm", head_dim=16, n_rot=4),
    ArchSpec("stablelm", head_dim=16, n_rot=8, parallel=True, norms_by_head=True),
    ArchSpec("starcoder2", head_dim=16),
    ArchSpec("nemotron", head_dim=16, n_rot=8),
    ArchSpec("gptneox", head_dim=16, n_rot=4, fused=True),
    ArchSpec("gptneox", head_dim=16, n_rot=4, fused=True, parallel=True),
]
# the text side of models that also see pictures
PICTURES = [
    ArchSpec("qwen2vl", head_dim=16, biases=True, sections=(2, 3, 3, 0)),
    ArchSpec("qwen3vl", sections=(6, 5, 5, 0)),
    ArchSpec("qwen3vlmoe", n_expert=8, sections=(6, 5, 5, 0), seed=1),
    ArchSpec("paddleocr", biases=True, sections=(6, 5, 5, 0)),
]
# a matrix, a rope, a norm or a scale other than Llama's; ALiBi; K and V made of a latent
LLAMA_LIKE = [
    ArchSpec("internlm2", head_dim=16),
    ArchSpec("xverse", head_dim=16),
    ArchSpec("baichuan", 32, 32, 2, 2, 16, 32),
    ArchSpec("baichuan", 40, 32, 2, 2, 16, 32),
    ArchSpec("exaone"),
    ArchSpec("pangu-embedded", biases=True),
    ArchSpec("plamo", head_dim=16),
    ArchSpec("maincoder"),
    ArchSpec("qwen", head_dim=16, n_head_kv=4, fused=True, biases=True),
    ArchSpec("chatglm", head_dim=16, n_rot=8, fused=True, biases=True),
    ArchSpec("refact"),
    ArchSpec("minicpm", scaling="longrope"),
    ArchSpec("minicpm3", n_head_kv=4, rank=48, q_rank=40, scaling="longrope"),
    ArchSpec("bitnet", head_dim=16),
    ArchSpec("openelm", fused=True),
    ArchSpec("plamo3", 4, window=24, period=4, fused=True),
    ArchSpec("mellum", 4, window=24, period=4, n_expert=8, scaling="yarn", seed=4),
    ArchSpec("deci", 4),
    ArchSpec("granite_swa", 4, window=24),
    ArchSpec("granite_swa", n_expert=8, n_ff_shared=48, window=24),
]
OLDER = [
    ArchSpec("starcoder", head_dim=16, n_head_kv=1, fused=True),
    ArchSpec("bloom", 3, 96, 6, 6, 16, 96, fused=True),
    ArchSpec("jais", 3, 96, 6, 6, 16, 96, fused=True),
    ArchSpec("mpt", head_dim=16, fused=True),
    ArchSpec("mpt", head_dim=16, fused=True, biases=True),
    ArchSpec("jais2"),
    ArchSpec("orion", head_dim=16),
    ArchSpec("codeshell", head_dim=16),
    ArchSpec("olmo", head_dim=16),
    ArchSpec("dbrx", head_dim=16, fused=True, n_expert=8, seed=2),
]
MIXTURES = [
    ArchSpec("deepseek", head_dim=16, n_expert=8, n_ff_shared=96, seed=1),
    ArchSpec("deepseek2-ocr", head_dim=16, n_head_kv=4, n_expert=8, n_ff_shared=96, seed=1),
    ArchSpec("bailingmoe", n_expert=8, n_ff_shared=192, seed=3),
    ArchSpec("exaone-moe", 4, window=24, period=4, n_expert=8, n_ff_shared=48),
    ArchSpec("cohere2moe", 5, window=24, period=4, n_expert=8, n_ff_shared=96),
    ArchSpec("hy_v3", n_expert=8, n_ff_shared=48, seed=9),
    ArchSpec("arctic", head_dim=16, n_expert=8, seed=2),
    ArchSpec("grok", head_dim=16, n_expert=8),
    ArchSpec("grok", head_dim=16, n_expert=8, n_ff_shared=96, seed=1),
    ArchSpec("smallthinker", 5, window=24, n_expert=8, seed=10),
    ArchSpec("mimo2", 4, window=24, n_expert=8, n_head_kv_window=4, n_rot=16),
]
GATED = [
    ArchSpec("muse-glimmer", 4, window=24, period=4),
    ArchSpec("afmoe", 4, window=24, period=4, n_expert=8, n_ff_shared=96),
    ArchSpec("laguna", 5, window=24, period=4, n_expert=8, n_ff_shared=48, scaling="yarn", seed=1),
    ArchSpec("laguna", n_expert=8, n_ff_shared=48, wide_gate=True, seed=1),
    ArchSpec("spark2_5", window=24),
]
NEMOTRON = ArchSpec("nemotron_h_moe", 6, state_heads=8, n_expert=8, n_ff_shared=48)
# of these a commit decodes fewer tokens: past windows, too
LATER = [
    *PICTURES,
    *LLAMA_LIKE,
    *OLDER,
    *MIXTURES,
    *GATED,
    NEMOTRON,
    replace(NEMOTRON, n_latent=32),
]
# experts behind a dense layer, in groups
EXPERTS = [
    ArchSpec("minimax-m2", n_rot=16, n_expert=8),
    ArchSpec("bailingmoe2", n_rot=16, n_expert=8, n_group=4, n_ff_shared=96, fused=True, head_dim=16),
    ArchSpec("bailingmoe2", n_expert=8, n_ff_shared=192, fused=True, head_dim=16),
    ArchSpec("glm4moe", n_rot=16, n_expert=8, n_ff_shared=96, biases=True),
    ArchSpec("dots1", n_head_kv=4, n_expert=8, n_ff_shared=192, seed=2),
    ArchSpec(
        "dots1", n_head_kv=4, n_expert=8, n_ff_shared=96, scaling="yarn", fused=True, biases=True, seed=3
    ),
    ArchSpec("ernie4_5-moe", n_expert=8, n_ff_shared=48),
]
# K and V are a latent: V2 Lite, V2, V3
DEEPSEEK = ArchSpec("deepseek2", 3, n_head_kv=1, n_expert=8, n_ff_shared=96, rank=48, q_rank=40)
LATENTS = [
    ArchSpec("deepseek2", 27, 32, 2, 1, 32, 32, n_expert=4, n_ff_shared=32, rank=32),
    replace(DEEPSEEK, scaling="yarn", yarn_gain=0.0707),
    replace(DEEPSEEK, scaling="yarn", yarn_gain=0.1, n_group=4, n_ff_shared=192, fused=True),
    replace(DEEPSEEK, scaling="yarn", n_head=8, head_dim=48, n_behind=32, rank=64),
    replace(DEEPSEEK, scaling="linear"),
    replace(DEEPSEEK, arch="mistral4", scaling="yarn", yarn_gain=0.0707, temperature=0.5, seed=1),
]
# experts' products of bytes: gate and up in one matrix or two, biases, scales, weights before and behind
OF_BYTES = [
    replace(spec, expert_weights=WeightType.Q8_0)
    for spec in [
        ArchSpec("gemma4", n_layer=4, window=24, n_expert=8, fused=True),
        ArchSpec("gemma4", n_layer=4, window=24, n_expert=8),
        ArchSpec("gpt-oss", window=24, n_expert=8),
        ArchSpec("qwen3moe", n_expert=4, n_expert_used=1),
        ArchSpec("llama4", 4, n_expert=8, n_ff_shared=96),
        DEEPSEEK,
    ]
]
CHUNKED = [
    ArchSpec("llama4", 4, n_expert=8, n_ff_shared=96),
    ArchSpec("llama4", 8, 32, 2, 1, 16, 32, n_expert=128, n_expert_used=1, n_ff_shared=32),
]
KIMI = ArchSpec("kimi-linear", 4, n_head_kv=1, state_heads=4, n_expert=8, n_ff_shared=96, rank=48)
# layers with a state: more heads of V than of K, groups, experts
STATES = [
    ArchSpec("qwen35", n_layer=4, period=4, state_heads=4, n_rot=8, n_head=8),
    ArchSpec("qwen35", n_layer=3, period=2, state_heads=6, state_dim=32),
    ArchSpec("qwen35moe", n_layer=4, period=4, state_heads=4, n_expert=8, n_ff_shared=48),
    ArchSpec("qwen3next", n_layer=4, period=2, state_heads=4, n_expert=8, n_ff_shared=48),
    ArchSpec("lfm2", head_dim=16, n_layer=4, period=2, state_heads=1, n_taps=3),
    ArchSpec("lfm2", head_dim=16, n_layer=4, period=2, state_heads=1, n_taps=3, window=24),
    ArchSpec("lfm2moe", head_dim=16, n_layer=4, period=2, state_heads=1, n_taps=3, n_expert=8),
    ArchSpec("granitehybrid", n_layer=4, period=3, state_heads=8),
    ArchSpec("granitehybrid", n_layer=4, period=3, state_heads=8, n_expert=8, n_ff_shared=48),
    ArchSpec("nemotron_h", n_layer=6, state_heads=8),
    ArchSpec("falcon-h1", n_layer=3, state_heads=8),
    ArchSpec("mamba2", n_layer=4, state_heads=8),
    ArchSpec("mamba2", n_layer=3, state_heads=12, state_heads_k=4, state_dim=32, n_taps=3),
    ArchSpec("mamba2", n_layer=3, state_heads=8, state_heads_k=1),
    ArchSpec("qwen3next", n_layer=4, period=2, state_heads=6, n_expert=8, n_ff_shared=48, older=True),
    KIMI,
    replace(KIMI, n_head=3, state_heads=3, n_taps=3, fused=True, n_ff_shared=192),
    replace(KIMI, state_heads=8, n_head=8, state_dim=32, head_dim=48, n_behind=32, rank=64),
]
# larger
LARGER = [
    ArchSpec("llama", 8, 256, 8, 2, 32, 512, n_expert=8),
    ArchSpec("qwen2", 8, 256, 8, 1, 32, 512),
    ArchSpec("qwen3", 8, 256, 8, 4, 64, 512),
    ArchSpec("qwen3moe", 8, 256, 8, 2, 64, 256, n_expert=8),
    ArchSpec("phi3", 8, 256, 8, 2, 32, 512, fused=True),
    ArchSpec("gpt-oss", 8, 256, 8, 2, 64, 256, n_expert=8, window=32),
    ArchSpec("gemma3", 8, 256, 4, 1, 128, 512, window=32, period=6),
    ArchSpec("gemma4", 12, 256, 4, 1, 128, 512, window=32, period=3, head_dim_window=64, n_shared=6),
    ArchSpec("gemma4", 8, 256, 8, 2, 64, 256, window=32, period=3, n_embd_layer=64, n_expert=8),
]
# in the types that people have
TYPES = [WeightType.Q8_0, WeightType.Q4_K, *([WeightType.F16, WeightType.Q6_K] if chance.THOROUGH else [])]
SEEDS = [1, 2, 3] if chance.THOROUGH else [1]  # of llama.cpp's random models
# llama.cpp's maker of random models makes no gemma3n and no gemma4, and these neither
UNMADE = ("apertus", "bitnet", "deepseek2-ocr")
# nor does it make these as their models are: layers without positions, heads that are rotated as a whole,
# tensors of which libllama uses one or the other, scales of activations
UNLIKELY = ("baichuan", "minicpm3", "hy_v3", "mimo2", "mpt", "refact-moe")
NAMES = ["llama", "qwen2", "qwen3", "qwen3moe", "phi3", "gemma2", "gemma3", "gpt-oss"]
NAMES += ["qwen35", "qwen35moe", "qwen3next", "lfm2", "lfm2moe", "granitehybrid", "nemotron_h"]
NAMES += ["falcon-h1", "mamba2", "kimi-linear"]
NAMES += [spec.arch for spec in MORE + LAYER_NORMS + EXPERTS + LATENTS + CHUNKED + LATER]
NAMES = [name for name in dict.fromkeys(NAMES) if name not in (*UNMADE, *UNLIKELY)]


def compare(
    record: Record, path: Path, n_vocab: int = N_VOCAB, exact: float = EXACT, n_tokens: int = N_TOKENS
) -> None:
    """The rule; and with F32 weights, how much is not rounding. exact: what that may be."""
    ids = random_ids(n_tokens, n_vocab, seed=1)
    scenario = partial(prompt_then_singles, ids=ids, n_prompt=min(N_PROMPT, n_tokens * 2 // 3))
    seen = judge(path, scenario, n_ctx=256)
    error = None
    with kvg.GgufFile(path) as file:
        is_rounded = any(tensor.type != "f32" for tensor in file.tensors)
    if not is_rounded:
        error = exact_error(path, scenario, n_ctx=256)
        assert error <= exact
    leave(record, path, Judged(error, seen.worst, seen.own))


@pytest.mark.parametrize(
    "spec", SPECS + MORE + LAYER_NORMS + EXPERTS + LATENTS + OF_BYTES + CHUNKED + STATES, ids=str
)
def test_logits(architecture: Architecture, spec: ArchSpec, record_property: Record) -> None:
    compare(record_property, architecture(spec))


@pytest.mark.parametrize("more", range(3) if chance.THOROUGH else [0])
@pytest.mark.parametrize("spec", LATER, ids=str)
def test_logits_of_later_rows(
    architecture: Architecture, spec: ArchSpec, more: int, record_property: Record
) -> None:
    """With seeds at which no two experts are as good for a token, and with others, where both are used."""
    n_expert = min(spec.n_expert, 2) if more else spec.n_expert
    path = architecture(replace(spec, seed=spec.seed + more, n_expert=n_expert))
    compare(record_property, path, n_tokens=N_TOKENS if chance.THOROUGH else N_FEW)


ALL = SPECS + MORE + LAYER_NORMS + EXPERTS + LATENTS + CHUNKED + STATES + LATER
# of a commit: every fifth architecture, cut in the middle
CUT = ALL if chance.THOROUGH else list({spec.arch: spec for spec in reversed(ALL)}.values())[::5]


@pytest.mark.parametrize("spec", CUT, ids=str)
def test_two_stages_are_one_model(architecture: Architecture, spec: ArchSpec) -> None:
    """To the bit: what the first stage hands on are the hidden states that the whole has there."""
    path = architecture(spec)
    options: dict[str, Any] = {"n_ctx": 64, "n_ubatch": 16, "n_threads": 1}
    tokens = random_ids(30, N_VOCAB, seed=2)
    with kvg.Model(path, device="cpu") as model:
        whole = stages_logits([kvg.Context(model, **options)], tokens)
        for cut in range(1, model.n_layer) if chance.THOROUGH else [model.n_layer // 2]:
            layers = range(cut), range(cut, model.n_layer)
            try:
                models = [kvg.Model(path, device="cpu", layers=each) for each in layers]
            except kvg.UnsupportedError:
                assert spec.arch in ("gemma3n", "gemma4", *NEMOTRONS)
                continue
            assert np.array_equal(
                stages_logits([kvg.Context(each, **options) for each in models], tokens), whole
            )


def stages_logits(stages: list[kvg.Context], tokens: list[int]) -> np.ndarray[Any, Any]:
    """Behind a prompt, and behind each of four more tokens."""
    rows = []
    for begin, end in [(0, len(tokens) - 4), *((i, i + 1) for i in range(len(tokens) - 4, len(tokens)))]:
        batch, hidden = kvg.Batch(), None
        batch.extend(tokens[begin:end], begin)
        for stage in stages:
            stage.decode(batch, hidden=hidden)
            hidden = stage.embeddings()
        rows.append(stages[-1].logits()[-1])
    return np.stack(rows)


@pytest.mark.parametrize(("kind", "bound"), [("q8_0", 1e-3), ("q4_0", 0.1)])
@pytest.mark.parametrize(
    "spec",
    [
        # K's rows are wider than V's; no expert is chosen by a rounding
        replace(KIMI, head_dim=64, n_behind=32, rank=96, n_expert=2),
        replace(DEEPSEEK, n_layer=2, head_dim=64, n_behind=32, rank=96, n_expert=2),
        # Q, K and V are parts of the same rows
        ArchSpec("phi3", fused=True),
        ArchSpec("llama", fused=True),
        # V is narrower than K; scores are less for tokens far away
        ArchSpec("minicpm3", 2, n_head_kv=4, rank=48, q_rank=40, head_dim=64, n_behind=32, head_dim_out=32),
        ArchSpec("bloom", 2, 128, n_head_kv=4, fused=True),
    ],
    ids=str,
)
def test_a_quantized_cache(architecture: Architecture, spec: ArchSpec, kind: str, bound: float) -> None:
    """Rows that Hadamard matrices mix, beside an F32 cache, which libllama judges."""
    ids = random_ids(60, N_VOCAB, seed=1)
    with kvg.Model(architecture(spec), device="cpu") as model:
        rows = []
        for each in ("f32", kind):
            with kvg.Context(model, n_ctx=64, type_k=each, type_v=each) as ctx:
                batch = kvg.Batch()
                batch.extend(ids, 0, (0,), logits="all")
                ctx.decode(batch)
                rows.append(ctx.logits())
    assert 0 < nmse(rows[1], rows[0]) < bound


@pytest.mark.slow
@pytest.mark.parametrize("weights", TYPES, ids=lambda weights: weights.name)
@pytest.mark.parametrize("spec", LARGER, ids=str)
def test_logits_of_larger_shapes(
    architecture: Architecture, spec: ArchSpec, weights: WeightType, record_property: Record
) -> None:
    experts = WeightType.MXFP4 if spec.arch == "gpt-oss" and weights == WeightType.Q8_0 else None
    path = architecture(replace(spec, weights=weights, expert_weights=experts))
    with kvg.GgufFile(path) as file:  # libllama takes another type where a row doesn't fit
        names = {tensor.type.upper() for tensor in file.tensors}
    assert (experts or weights).name in names
    compare(record_property, path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_llama_cpps_random_models(
    name: str, seed: int, tmp_path: Path, record_property: Record
) -> None:
    """Files with every tensor that llama.cpp reads, scales and unused ones among them.

    Their layers add little to what comes out: 1e-9 sees a wrong rope.
    """
    if not random_archs.PROGRAM.exists():
        pytest.skip(random_archs.ABSENT)
    paths = [
        path for path in random_archs.write_random_archs(name, seed, tmp_path) if path.stem not in UNLIKELY
    ]
    assert paths
    for path in paths:
        compare(record_property, path, random_archs.N_VOCAB, exact=1e-9)


def test_the_table_has_every_architecture(tmp_path: Path) -> None:
    """`pytest --write-architectures` is forgotten easily."""
    raw = RawGguf()
    raw.key("general.architecture", STRING, text("unheard-of"))
    path = raw.write(tmp_path / "model.gguf")
    with kvg.GgufFile(path) as file, pytest.raises(kvg.UnsupportedError) as refusal:
        file.model_info()
    names = str(refusal.value).partition("there are: ")[2].split(", ")
    assert [each.name for each in architectures()] == sorted(names)


@pytest.mark.parametrize(
    "spec",
    [
        ArchSpec("qwen3moe", n_expert=8),
        ArchSpec("gemma2", window=24),
        ArchSpec("gemma3", window=24, scaling="linear"),
        ArchSpec("gpt-oss", window=24, n_expert=8, scaling="yarn"),
        ArchSpec("gemma4", n_layer=4, window=24, head_dim_window=64, n_shared=2, n_embd_layer=32),
        ArchSpec("gemma3n", 22, 32, 4, 2, 16, 48, window=24, period=5),
    ],
    ids=str,
)
def test_the_batch_does_not_matter(architecture: Architecture, spec: ArchSpec) -> None:
    """However a text is cut into batches, the logits of its last token are the same to rounding."""
    ids = random_ids(60, N_VOCAB, seed=2)
    with kvg.Model(architecture(spec), device="cpu") as model:
        rows = []
        for n_batch in (1, 7, 25, 60):
            ctx = kvg.Context(model, n_ctx=64)
            for first in range(0, 60, n_batch):
                batch = kvg.Batch()
                batch.extend(ids[first : first + n_batch], first, (0,), logits="last")
                ctx.decode(batch)
            rows.append(ctx.logits())
    assert all(nmse(row, rows[0]) <= 1e-6 for row in rows)
