"""Scores of cells beside kvpress, on the same random weights in transformers.

Needs torch, transformers and kvpress, which aren't among the packages of development: `pip install
torch==2.13.0 transformers kvpress` into an environment that has those.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import arch_tensors, models
from support.architectures import ArchSpec
from support.engines import open_context, random_ids
from support.judge import nmse
from support.models import N_VOCAB, SMALL, ModelSpec
from support.naive_scores import Floats, lowest

import pykvgraph as kvg
from pykvgraph.context.cell_scores import POLICIES, TextCells
from pykvgraph.context.forgetting import N_RECENT, N_SINKS
from pykvgraph.context.second_reading import read_again

torch: Any = pytest.importorskip("torch", reason="kvpress is compared where torch is installed")
transformers: Any = pytest.importorskip("transformers", reason="kvpress is compared where it is installed")
kvpress: Any = pytest.importorskip("kvpress", reason="kvpress is compared where it is installed")

N = 200
IDS = random_ids(N, N_VOCAB)
OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_batch": 256, "type_k": "f32", "type_v": "f32"}
QWEN3 = ArchSpec("qwen3", n_layer=3)
NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def name_of(tensor: str) -> str:
    """What transformers calls a tensor of a GGUF file."""
    outside = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not tensor.startswith("blk."):
        return outside.get(tensor, "lm_head.weight")
    _, layer, name, kind = tensor.split(".")
    return f"model.layers.{layer}.{NAMES[name]}.{kind}"


def halved(rows: Any, n_head: int) -> Any:
    """Of a matrix of Q or K whose pairs are neighbours, the one whose pairs are half a head apart."""
    return rows.reshape(n_head, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def theirs(spec: ModelSpec | ArchSpec) -> Any:
    """The model in transformers."""
    sizes = {
        "vocab_size": N_VOCAB,
        "hidden_size": spec.n_embd,
        "intermediate_size": spec.n_ff,
        "num_hidden_layers": spec.n_layer,
        "num_attention_heads": spec.n_head,
        "num_key_value_heads": spec.n_head_kv,
        "head_dim": spec.k_dim if isinstance(spec, ModelSpec) else spec.head_dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    if isinstance(spec, ModelSpec):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        tensors = models.random_tensors(spec)
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
        tensors = arch_tensors.random_tensors(spec)
    state = {}
    for name, tensor in tensors.items():
        n_head = {"attn_q.weight": spec.n_head, "attn_k.weight": spec.n_head_kv}.get(name.split(".", 2)[-1])
        rows = halved(tensor, n_head) if n_head and isinstance(spec, ModelSpec) else tensor
        state[name_of(name)] = torch.tensor(np.ascontiguousarray(rows))
    model.load_state_dict(state, strict=True)
    return model.eval()


def scores_of(press: Any, model: Any) -> tuple[Floats, Any]:
    """By position, the mean over heads and layers; and the next token's logits, without compression."""
    found = []

    class Recording(press):  # type: ignore[misc]
        def score(self, *arguments: Any, **others: Any) -> Any:
            found.append(super().score(*arguments, **others))
            return found[-1]

    with torch.no_grad(), Recording(compression_ratio=0.01)(model):
        logits = model(torch.tensor([IDS])).logits[0, -1].numpy()
    stacked = torch.stack(found).double().numpy()  # (n_layer, 1, n_head_kv, n)
    assert stacked.shape[0] == model.config.num_hidden_layers and stacked.shape[-1] == N
    return stacked.mean(axis=(0, 1, 2)), logits


@pytest.mark.parametrize("spec", [SMALL, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize(
    ("policy", "press", "n_scored"),
    [("keydiff", "KeyDiffPress", N), ("snapkv", "SnapKVPress", N - 64), ("tova", "TOVAPress", N - 1)],
)
def test_as_kvpress(
    model_file: Callable[[ModelSpec], Path],
    architecture: Callable[[ArchSpec], Path],
    spec: ModelSpec | ArchSpec,
    policy: str,
    press: str,
    n_scored: int,
) -> None:
    """The same scores, and so the same cells are kept."""
    expected, logits = scores_of(getattr(kvpress, press), theirs(spec))
    path = model_file(spec) if isinstance(spec, ModelSpec) else architecture(spec)
    with kvg.Model(path, device="cpu") as model, open_context(model, **OPTIONS) as ctx:
        text = kvg.Sequence(ctx)
        assert text.set(IDS).last.logits == pytest.approx(logits, abs=1e-3)
        read_again(ctx, 0, IDS[-(N - n_scored or 1) :])
        ours = POLICIES[policy].score(TextCells(ctx, 0))
        assert ours[:n_scored] == pytest.approx(expected[:n_scored], abs=1e-6, rel=1e-3)
        gone = text.forget(N // 2, policy).positions
        assert gone == tuple(lowest(expected, N // 2))


@pytest.mark.parametrize("spec", [SMALL, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize(("policy", "press"), [("keydiff", "KeyDiffPress"), ("snapkv", "SnapKVPress")])
def test_logits_as_with_kvpress(
    model_file: Callable[[ModelSpec], Path],
    architecture: Callable[[ArchSpec], Path],
    spec: ModelSpec | ArchSpec,
    policy: str,
    press: str,
) -> None:
    """It lets each head of each layer choose, as composite cells do: the same logits behind half of them.

    The first 4 and the last 64 tokens stay, by scores that nothing reaches. (TOVA chooses once for all heads
    of a layer there.)
    """

    class Keeping(getattr(kvpress, press)):  # type: ignore[misc]
        def score(self, *arguments: Any, **others: Any) -> Any:
            found = super().score(*arguments, **others).clone()
            found[..., :N_SINKS] = found[..., -N_RECENT:] = torch.inf
            return found

    model, cache = theirs(spec), transformers.DynamicCache()
    with torch.no_grad():
        with Keeping(compression_ratio=0.5)(model):
            model(torch.tensor([IDS]), past_key_values=cache)
        assert cache.get_seq_length() == N // 2
        at = torch.tensor([N])
        rows = model(torch.tensor([[7]]), past_key_values=cache, position_ids=at[None], cache_position=at)
    path = model_file(spec) if isinstance(spec, ModelSpec) else architecture(spec)
    with kvg.Model(path, device="cpu") as loaded, open_context(loaded, **OPTIONS) as ctx:
        text = kvg.Sequence(ctx)
        before = text.set([*IDS, 7]).last.logits
        text.go_back(N)
        assert text.forget(N // 2, policy, composite=True).n_left == N // 2
        found = text.set([*IDS, 7]).last.logits
    expected = rows.logits[0, -1].numpy()
    assert nmse(found, expected) < 1e-8
    assert nmse(before, expected) > 1e-4  # forgetting is seen
