"""LoRA adapters: logits against libllama's with the same adapters on the same file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from support import where
from support.adapters import LATENTS, judged, merged, write_adapter
from support.architectures import ArchSpec
from support.engines import OurEngine, open_context, prompt_then_singles, random_ids
from support.judge import FLOOR, nmse
from support.models import N_VOCAB, SMALL, ModelSpec, WeightType

import pykvgraph as kvg

Architecture = Callable[[ArchSpec], Path]
N_PROMPT, N_TOKENS = 40, 60

DEEPSEEK = ArchSpec("deepseek2", 3, n_head_kv=1, n_expert=8, n_ff_shared=96, rank=48, q_rank=40, seed=1)
SPECS = [
    ArchSpec("llama", fused=True),
    ArchSpec("llama", n_expert=8),
    ArchSpec("qwen2", head_dim=16),
    ArchSpec("qwen2moe", head_dim=16, n_expert=8, n_ff_shared=48),
    ArchSpec("gemma3", n_layer=3, window=24),
    ArchSpec("gpt-oss", window=24, n_expert=8),
    # of which each token takes both: rounded rows choose others of many
    ArchSpec("gpt-oss", window=24, n_expert=2, expert_weights=WeightType.Q8_0),
    ArchSpec("phi3", head_dim=16, fused=True),
    ArchSpec("command-r", head_dim=16),
    ArchSpec("qwen35", n_layer=4, period=4, state_heads=4, n_rot=8, n_head=8),
    ArchSpec("lfm2", head_dim=16, n_layer=4, period=2, state_heads=1, n_taps=3),
    ArchSpec("falcon-h1", n_layer=3, state_heads=8),
    DEEPSEEK,
    ArchSpec("llama", weights=WeightType.Q8_0),
]


def scenario(engine: object) -> np.ndarray:
    return prompt_then_singles(engine, random_ids(N_TOKENS, N_VOCAB), N_PROMPT)  # type: ignore[arg-type]


def ours(
    model: kvg.Model, adapters: Sequence[tuple[kvg.Adapter, float]], flash_attn: str = "auto"
) -> np.ndarray:
    with open_context(model, n_ctx=512, n_batch=512, flash_attn=flash_attn) as ctx:
        ctx.set_adapters(adapters)
        return scenario(OurEngine(ctx))


def check(path: Path, adapters: Sequence[tuple[Path, float]]) -> None:
    """The rule, and that the adapters matter at all."""
    flash, plain = judged(path, adapters, scenario)
    without, _ = judged(path, [], scenario)
    assert nmse(without, flash) > 1e-3
    allowed = where.rule(max(FLOOR, 2 * nmse(flash, plain)))
    with kvg.Model(path, device=where.device) as model:
        loaded = [(model.load_adapter(adapter), scale) for adapter, scale in adapters]
        for flash_attn, theirs in (("on", flash), ("auto", plain)):
            error = nmse(ours(model, loaded, flash_attn), theirs)
            assert error <= allowed, f"{flash_attn}: NMSE {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.any_device
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_logits_are_libllamas(architecture: Architecture, spec: ArchSpec, tmp_path: Path) -> None:
    path = architecture(spec)
    check(path, [(write_adapter(tmp_path / "a.gguf", path), 0.7)])


@pytest.mark.any_device
@pytest.mark.parametrize("kind", [WeightType.F16, WeightType.Q8_0])
def test_types_of_adapters(model_file: Callable[[ModelSpec], Path], kind: WeightType, tmp_path: Path) -> None:
    path = model_file(SMALL)
    check(path, [(write_adapter(tmp_path / "a.gguf", path, kind=kind, rank=32), 1.0)])


@pytest.mark.any_device
def test_embeddings_and_output(model_file: Callable[[ModelSpec], Path], tmp_path: Path) -> None:
    path = model_file(SMALL)
    frame = ("token_embd.weight", "output.weight")
    check(path, [(write_adapter(tmp_path / "a.gguf", path, names=(), frame=frame), 1.0)])


@pytest.mark.any_device
def test_several_with_scales_of_their_own(model_file: Callable[[ModelSpec], Path], tmp_path: Path) -> None:
    path = model_file(SMALL)
    first = write_adapter(tmp_path / "a.gguf", path, seed=1)
    second = write_adapter(tmp_path / "b.gguf", path, seed=2, rank=9, alpha=0.0, names=("attn_q.", "ffn_up."))
    check(path, [(first, -0.5), (second, 0.25)])


def test_where_libllama_leaves_adapters_out(architecture: Architecture, tmp_path: Path) -> None:
    """The judge is libllama on a file whose weights have the adapter in them."""
    path = architecture(DEEPSEEK)
    adapter = write_adapter(tmp_path / "a.gguf", path, names=LATENTS, frame=["output.weight"])
    flash, plain = judged(merged(tmp_path / "merged.gguf", path, adapter, 0.7), [], scenario)
    with kvg.Model(path, device="cpu") as model:
        error = nmse(ours(model, [(model.load_adapter(adapter), 0.7)]), plain)
    assert error <= max(FLOOR, 2 * nmse(flash, plain))


def test_a_tied_output_keeps_its_weights(model_file: Callable[[ModelSpec], Path], tmp_path: Path) -> None:
    """libllama ends the process there; so the judge is NumPy, on the output's own matrix."""
    path = model_file(replace(SMALL, tied=True))
    adapter = write_adapter(tmp_path / "a.gguf", path, names=(), frame=("token_embd.weight",))
    weights = next(t.data for t in gguf.GGUFReader(path).tensors if t.name == "token_embd.weight")
    with kvg.Model(path, device="cpu") as model, open_context(model, n_ctx=64) as ctx:
        ctx.set_adapters([(model.load_adapter(adapter), 1.0)])
        logits = scenario(OurEngine(ctx))
        assert nmse(ctx.embeddings() @ np.asarray(weights).T, logits[-1:]) <= 1e-6


def test_hot(model_file: Callable[[ModelSpec], Path], tmp_path: Path) -> None:
    """With, without, with another scale: each is what a context of its own says, to the bit."""
    path = model_file(SMALL)
    with kvg.Model(path, device=where.device) as model, open_context(model, n_ctx=512, n_batch=512) as ctx:
        adapter = model.load_adapter(write_adapter(tmp_path / "a.gguf", path))
        for pairs in ([], [(adapter, 1.0)], [(adapter, 0.5)], [(adapter, 0.0)], [(adapter, 1.0)], []):
            ctx.set_adapters(pairs)
            ctx.reset()
            assert np.array_equal(scenario(OurEngine(ctx)), ours(model, pairs))
            assert ctx.adapters == tuple(pair for pair in pairs if pair[1])
