"""Random GGUF files of every architecture that has a recipe, with what llama.cpp's own files leave out.

Shapes are small; attention is peaked, so that a wrong window, rotation or expert shows in the logits.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from support.models import N_VOCAB, WeightType, add_vocabulary, quantize_by_libllama

DELTA_NETS = ("qwen35", "qwen35moe", "qwen3next")
SHORT_CONV = ("lfm2", "lfm2moe")
# what converters leave in F32
KEPT = ("_q_norm", "_k_norm", ".ssm_a", ".ssm_d", ".ssm_conv1d", ".ssm_norm", ".shortconv.conv")
# a layer without KV heads has a state
BY_KV_HEADS = (*SHORT_CONV, "granitehybrid", "nemotron_h", "kimi-linear")

# norms behind attention and feed-forward, alone or beside those before them; norms of Q and K, of each head
# or of all of a token's
LAYER_NORMS = ("command-r", "cohere2", "phi2", "stablelm", "starcoder2", "nemotron", "gptneox")
NORM_BIASES = ("phi2", "phimoe", "stablelm", "starcoder2", "nemotron", "gptneox")
BIASES = ("phi2", "phimoe", "starcoder2", "gptneox")  # of all matrices
POST_NORMS = ("gemma2", "gemma3", "gemma4", "olmo2", "exaone4", "glm4")
NO_PRE_NORMS = ("olmo2", "exaone4")
HEAD_NORMS = ("qwen3", "qwen3moe", "gemma3", "gemma4", "exaone4", "bailingmoe2", *DELTA_NETS, *SHORT_CONV)
WIDE_NORMS = ("olmo2", "olmoe", "minimax-m2")
NO_FFN_NORM = ("nemotron_h", "falcon-h1", "mamba2", "command-r", "cohere2", "phi2", *NO_PRE_NORMS)
# gate and up are one matrix; there is no gate
GATED_IN_ONE = ("phi3", "glm4")
UNGATED = ("nemotron_h", "arcee", "phi2", "starcoder2", "nemotron", "gptneox")
TIED = ("gemma", "gemma2", "command-r", "cohere2")
GRANITES = ("granite", "granitemoe", "granitehybrid")

# the first layer has no experts
FIRST_DENSE = ("lfm2moe", "kimi-linear", "bailingmoe2", "glm4moe", "ernie4_5-moe")
CHOICE_BIAS = ("minimax-m2", *FIRST_DENSE)
# an expert that every token goes to, as wide as so many of the others
SHARED_COUNT = ("kimi-linear", "bailingmoe2", "glm4moe")
SIGMOID = ("lfm2moe", "kimi-linear", "bailingmoe2", "glm4moe", "minimax-m2")

Array = npt.NDArray[np.float32]
Tensors = dict[str, Array]
# the first with some matrices in Q6_K, as people have it
K_QUANTS = {
    WeightType.Q4_K: "LLAMA_FTYPE_MOSTLY_Q4_K_M",
    WeightType.Q6_K: "LLAMA_FTYPE_MOSTLY_Q6_K",
}


@dataclass(frozen=True)
class ArchSpec:
    """What a random model looks like. Zeros: without."""

    arch: str
    n_layer: int = 3
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 32
    n_ff: int = 96
    n_expert: int = 0
    n_expert_used: int = 2
    n_group: int = 0  # of experts: two may be chosen from
    window: int = 0
    period: int = 2  # every so many layers, one attends to everything
    scaling: str = ""  # "linear", "yarn" or "longrope"
    factor: float = 4.0
    n_ctx_orig: int = 64
    n_rot: int = 0
    fused: bool = False
    # Gemma 4's: heads of layers with a window, layers that read the K and V of others, and have matrices of
    # their own that nothing uses; V made of K's matrix; what each layer has of its own for each token
    head_dim_window: int = 0
    n_head_kv_window: int = 0
    n_shared: int = 0
    spare_kv: bool = False
    v_of_k: bool = False
    n_embd_layer: int = 0
    # of layers with a state: heads of V, heads of K, both of state_dim; inputs that the convolution sees
    state_heads: int = 0
    state_heads_k: int = 2
    state_dim: int = 16
    n_taps: int = 4
    n_ff_shared: int = 0
    older: bool = False  # qwen3next: one matrix makes Q, K, V and gate of a state
    # kimi-linear's attention: the latent, what lies behind it, and a head's V
    rank: int = 0
    n_behind: int = 16
    head_dim_out: int = 24
    biases: bool = False
    parallel: bool = False  # the feed-forward sees what attention sees
    norms_by_head: bool = False
    sections: tuple[int, ...] = ()  # of rope's pairs, in files that also see pictures
    silent: tuple[int, ...] = ()  # layers whose attention adds nothing: later ones know no other token
    weights: WeightType = WeightType.F32
    expert_weights: WeightType | None = None
    seed: int = 0

    def has_window(self, layer: int) -> bool:
        return self.window > 0 and (layer + 1) % self.period > 0

    def has_state(self, layer: int) -> bool:
        """All layers but every period-th, or all beside attention; Nemotron's third kind feeds forward."""
        if self.arch == "nemotron_h":
            return bool(layer % 3 == 0)
        if self.arch == "mamba2":
            return True
        return self.state_heads > 0 and (self.arch == "falcon-h1" or (layer + 1) % self.period > 0)

    def attends(self, layer: int) -> bool:
        if self.arch == "nemotron_h":
            return layer % 3 == 1
        return self.arch == "falcon-h1" or not self.has_state(layer)

    def feeds(self, layer: int) -> bool:
        return self.arch not in ("nemotron_h", "mamba2") or (self.arch == "nemotron_h" and layer % 3 == 2)

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Width of the layer's heads, and how many it has of K and V."""
        if not self.has_window(layer):
            return self.head_dim, self.n_head_kv
        return self.head_dim_window or self.head_dim, self.n_head_kv_window or self.n_head_kv

    def __str__(self) -> str:
        shown = [self.arch]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                text = value.name if isinstance(value, WeightType) else value
                text = "".join(map(str, text)) if isinstance(text, tuple) else text
                shown.append(f"{field.name.removeprefix('n_').replace('_', '')}{text}")
        return "-".join(map(str, shown))


def write_architecture(spec: ArchSpec, directory: Path) -> Path:
    """Writes the model, or finds it where an earlier call left it."""
    path = directory / f"{spec}.gguf"
    if not path.exists() and spec.weights in K_QUANTS:
        source = write_architecture(replace(spec, weights=WeightType.F32), directory)
        quantize_by_libllama(source, path, K_QUANTS[spec.weights], pure=False)
    elif not path.exists():
        writer = gguf.GGUFWriter(path, spec.arch)
        add_metadata(writer, spec)
        add_vocabulary(writer)
        for name, tensor in random_tensors(spec).items():
            kind = spec.expert_weights or spec.weights if "_exps.weight" in name else spec.weights
            if tensor.ndim == 1 or name.endswith("bias") or any(part in name for part in KEPT):
                writer.add_tensor(name, tensor)
            else:
                writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path


def add_metadata(writer: gguf.GGUFWriter, spec: ArchSpec) -> None:
    writer.add_block_count(spec.n_layer)
    writer.add_context_length(4096)
    writer.add_embedding_length(spec.n_embd)
    widths = [spec.n_ff * spec.feeds(layer) for layer in range(spec.n_layer)]
    writer.add_feed_forward_length(widths if spec.arch == "nemotron_h" else widths[0])
    writer.add_layer_norm_rms_eps(1e-5)
    if spec.arch in LAYER_NORMS:
        writer.add_layer_norm_eps(1e-5)
    writer.add_vocab_size(N_VOCAB)
    if spec.arch == "mamba2":
        writer.add_head_count(0)
    else:
        add_heads(writer, spec)
    if spec.n_expert:
        writer.add_expert_count(spec.n_expert)
        writer.add_expert_used_count(spec.n_expert_used)
        if spec.arch != "llama":
            writer.add_expert_feed_forward_length(spec.n_ff)
        add_experts(writer, spec)
    if spec.n_ff_shared:
        one = spec.arch == "bailingmoe2"  # whose key is the width of one of them
        writer.add_expert_shared_feed_forward_length(spec.n_ff if one else spec.n_ff_shared)
    if spec.state_heads:
        add_states(writer, spec)
    if spec.arch == "gptneox":
        writer.add_parallel_residual(spec.parallel)
    if spec.arch in ("command-r", "cohere2"):
        writer.add_logit_scale(0.25)
    if spec.arch in GRANITES:
        writer.add_logit_scale(2.0)
        writer.add_residual_scale(0.7)
        writer.add_embedding_scale(3.0)
        writer.add_attention_scale(0.3)
        writer.add_rope_scaling_finetuned(spec.n_rot >= 0)
    if spec.sections:
        writer.add_rope_dimension_sections(list(spec.sections))
    if spec.arch == "gemma4":
        add_gemma4(writer, spec)
    elif spec.window:
        writer.add_sliding_window(spec.window)
        writer.add_sliding_window_pattern(spec.period)
    add_scaling(writer, spec)


def add_experts(writer: gguf.GGUFWriter, spec: ArchSpec) -> None:
    if spec.arch in FIRST_DENSE:
        writer.add_leading_dense_block_count(1)
    if spec.arch in SIGMOID:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if spec.arch in SHARED_COUNT:
        writer.add_expert_shared_count(spec.n_ff_shared // spec.n_ff)
        writer.add_expert_weights_scale(2.446)
    if spec.arch in ("bailingmoe2", "glm4moe"):
        writer.add_expert_weights_norm(spec.arch == "glm4moe")
    if spec.arch == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(1)
    if spec.n_group:
        writer.add_expert_group_count(spec.n_group)
        writer.add_expert_group_used_count(2)


def add_heads(writer: gguf.GGUFWriter, spec: ArchSpec) -> None:
    writer.add_head_count(spec.n_head)
    if spec.arch in BY_KV_HEADS:
        writer.add_head_count_kv([spec.n_head_kv * spec.attends(layer) for layer in range(spec.n_layer)])
    elif spec.n_head_kv_window:
        writer.add_head_count_kv([spec.heads_of(layer)[1] for layer in range(spec.n_layer)])
    else:
        writer.add_head_count_kv(spec.n_head_kv)
    writer.add_key_length(spec.rank + spec.n_behind if spec.rank else spec.head_dim)
    writer.add_value_length(spec.rank or spec.head_dim)
    writer.add_rope_dimension_count(spec.n_behind if spec.rank else max(spec.n_rot, 0) or spec.head_dim)
    writer.add_rope_freq_base(10000.0)


def add_states(writer: gguf.GGUFWriter, spec: ArchSpec) -> None:
    if spec.arch in SHORT_CONV:
        writer.add_shortconv_l_cache(spec.n_taps)
    else:
        writer.add_ssm_conv_kernel(spec.n_taps)
        writer.add_ssm_inner_size(spec.state_heads * spec.state_dim)
        writer.add_ssm_state_size(spec.state_dim)
        writer.add_ssm_time_step_rank(spec.state_heads)
        writer.add_ssm_group_count(spec.state_heads_k)
    if spec.arch in DELTA_NETS:
        writer.add_full_attention_interval(spec.period)
    if spec.arch in ("qwen35", "qwen35moe"):
        pairs = (spec.n_rot or spec.head_dim) // 2
        writer.add_rope_dimension_sections([-(-pairs // 3)] * 3 + [0])
    if spec.arch == "kimi-linear":
        writer.add_kda_head_dim(spec.state_dim)
        writer.add_kv_lora_rank(spec.rank)
        writer.add_key_length_mla(spec.head_dim)
        writer.add_value_length_mla(spec.head_dim_out)
    if spec.arch == "nemotron_h":
        writer.add_layer_norm_eps(1e-5)


def add_gemma4(writer: gguf.GGUFWriter, spec: ArchSpec) -> None:
    head_dim_window = spec.head_dim_window or spec.head_dim
    writer.add_sliding_window(spec.window)
    writer.add_sliding_window_pattern([spec.has_window(layer) for layer in range(spec.n_layer)])
    writer.add_key_length_swa(head_dim_window)
    writer.add_value_length_swa(head_dim_window)
    writer.add_rope_dimension_count_swa(head_dim_window)
    writer.add_rope_freq_base_swa(5000.0)
    writer.add_shared_kv_layers(spec.n_shared)
    writer.add_embedding_length_per_layer_input(spec.n_embd_layer)
    writer.add_final_logit_softcapping(30.0)


def add_scaling(writer: gguf.GGUFWriter, spec: ArchSpec) -> None:
    if not spec.scaling:
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(spec.scaling))
    writer.add_rope_scaling_orig_ctx_len(spec.n_ctx_orig)
    if spec.scaling == "longrope":
        writer.add_rope_scaling_attn_factors(1.19)
    else:
        writer.add_rope_scaling_factor(spec.factor)


class _Random:
    """Weights with the widths of a spec."""

    def __init__(self, spec: ArchSpec) -> None:
        self.spec = spec
        self.rng = np.random.default_rng(spec.seed)

    def matrix(self, *shape: int, gain: float = 1.0) -> Array:
        weights = self.rng.standard_normal(shape, dtype=np.float32)
        weights *= gain / np.sqrt(shape[-1])
        return weights

    def bias(self, *shape: int, scale: float = 0.1) -> Array:
        weights = self.rng.standard_normal(shape, dtype=np.float32)
        weights *= scale
        return weights

    def norm(self, n: int) -> Array:
        weights = self.bias(n)
        weights += 1
        return weights


def random_tensors(spec: ArchSpec) -> Tensors:
    """Weights by GGUF name, shaped (rows, columns)."""
    random = _Random(spec)
    tensors = {"token_embd.weight": random.matrix(N_VOCAB, spec.n_embd, gain=2.0)}
    for layer in range(spec.n_layer):
        parts = _norms(random, layer)
        if spec.attends(layer):
            parts |= _latent_attention(random) if spec.rank else _attention(random, layer)
        if spec.has_state(layer):
            parts |= _state(random)
        if spec.feeds(layer):
            routed = spec.n_expert and spec.arch != "gemma4" and (spec.arch not in FIRST_DENSE or layer > 0)
            parts |= _experts(random) if routed else _dense(random)
        if spec.arch == "gemma4":
            parts |= _parts_of_gemma4(random, layer)
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in parts.items()}
    tensors["token_embd_norm.weight" if spec.arch in SHORT_CONV else "output_norm.weight"] = random.norm(
        spec.n_embd
    )
    if spec.arch in NORM_BIASES:
        tensors["output_norm.bias"] = random.bias(spec.n_embd)
    if spec.arch in ("phi2", "phimoe"):
        tensors["output.bias"] = random.bias(N_VOCAB)
    if spec.arch not in TIED:
        tensors["output.weight"] = random.matrix(N_VOCAB, spec.n_embd, gain=3.0)
    if spec.arch == "gemma4":
        tensors |= _frame_of_gemma4(random)
    if spec.scaling == "longrope":
        pairs = (spec.n_rot or spec.head_dim) // 2
        tensors["rope_factors_short.weight"] = np.linspace(1.0, 1.5, pairs, dtype=np.float32)
        tensors["rope_factors_long.weight"] = np.linspace(1.0, 12.0, pairs, dtype=np.float32)
    return tensors


def _attention(random: _Random, layer: int) -> Tensors:
    spec = random.spec
    head_dim, n_head_kv = spec.heads_of(layer)
    q_rows, kv_rows = spec.n_head * head_dim, n_head_kv * head_dim
    gate_rows = q_rows if spec.arch in DELTA_NETS else 0
    q, k = (random.matrix(rows, spec.n_embd, gain=1.5) for rows in (q_rows + gate_rows, kv_rows))
    v = random.matrix(kv_rows, spec.n_embd)
    split: Tensors = {"attn_q.weight": q, "attn_k.weight": k, "attn_v.weight": v}
    parts: Tensors = {"attn_qkv.weight": np.concatenate([q, k, v])} if spec.fused else split
    if layer >= spec.n_layer - spec.n_shared and not spec.spare_kv and not spec.fused:
        parts = {"attn_q.weight": q}
    elif spec.v_of_k:
        del parts["attn_v.weight"]
    gain = 0.0 if layer in spec.silent else 1.0
    parts["attn_output.weight"] = random.matrix(spec.n_embd, q_rows, gain=gain)
    if spec.biases or spec.arch in ("qwen2", "gpt-oss", *BIASES):
        biases = {name: random.bias(rows) for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))}
        if spec.fused:
            parts["attn_qkv.bias"] = np.concatenate(list(biases.values()))
        else:
            parts |= {f"attn_{name}.bias": bias for name, bias in biases.items()}
    if spec.arch in ("gpt-oss", *BIASES):
        parts["attn_output.bias"] = random.bias(spec.n_embd)
    if spec.arch == "gpt-oss":
        parts["attn_sinks.weight"] = random.bias(spec.n_head, scale=2.0)
    return parts


def _latent_attention(random: _Random) -> Tensors:
    spec = random.spec
    plain = spec.head_dim - spec.n_behind
    return {
        "attn_q.weight": random.matrix(spec.n_head * spec.head_dim, spec.n_embd, gain=1.5),
        "attn_kv_a_mqa.weight": random.matrix(spec.rank + spec.n_behind, spec.n_embd, gain=1.5),
        "attn_kv_a_norm.weight": random.norm(spec.rank),
        "attn_k_b.weight": random.matrix(spec.n_head, spec.rank, plain),
        "attn_v_b.weight": random.matrix(spec.n_head, spec.head_dim_out, spec.rank),
        "attn_output.weight": random.matrix(spec.n_embd, spec.n_head * spec.head_dim_out),
    }


def _norms(random: _Random, layer: int) -> Tensors:
    spec = random.spec
    head_dim, _ = spec.heads_of(layer)
    names = {} if spec.arch in NO_PRE_NORMS else {"attn_norm": spec.n_embd}
    if spec.arch in ("gpt-oss", "seed_oss", "glm4moe", *DELTA_NETS):
        names["post_attention_norm"] = spec.n_embd
    elif spec.arch not in NO_FFN_NORM and not (spec.arch == "stablelm" and spec.parallel):
        names["ffn_norm"] = spec.n_embd
    if spec.arch in WIDE_NORMS:
        names |= {"attn_q_norm": spec.n_head * head_dim, "attn_k_norm": spec.n_head_kv * head_dim}
    if spec.arch in HEAD_NORMS and spec.attends(layer):
        names["attn_q_norm"] = head_dim
        if layer < spec.n_layer - spec.n_shared or spec.spare_kv:
            names["attn_k_norm"] = head_dim
    if spec.arch in POST_NORMS:
        names |= {"post_attention_norm": spec.n_embd, "post_ffw_norm": spec.n_embd}
    norms = {f"{name}.weight": random.norm(n) for name, n in names.items()}
    if spec.arch in NORM_BIASES:
        norms |= {f"{name}.bias": random.bias(n) for name, n in names.items()}
    if spec.norms_by_head:
        norms["attn_q_norm.weight"] = random.norm(spec.n_head * head_dim).reshape(-1, head_dim)
        norms["attn_k_norm.weight"] = random.norm(spec.n_head_kv * head_dim).reshape(-1, head_dim)
    if spec.arch == "falcon-h1":
        norms["ffn_norm"] = random.norm(spec.n_embd)
    if spec.arch == "gemma4":  # nothing else scales its scores
        norms["attn_q_norm.weight"] *= np.float32(2.5 / np.sqrt(head_dim))
    return norms


def _dense(random: _Random) -> Tensors:
    spec = random.spec
    rows = {"ffn_gate": spec.n_ff, "ffn_up": spec.n_ff}
    if spec.arch in (*GATED_IN_ONE, *UNGATED):
        rows = {"ffn_up": spec.n_ff * (2 if spec.arch in GATED_IN_ONE else 1)}
    parts = {f"{name}.weight": random.matrix(n, spec.n_embd) for name, n in rows.items()}
    if spec.arch in BIASES:
        parts |= {"ffn_up.bias": random.bias(spec.n_ff), "ffn_down.bias": random.bias(spec.n_embd)}
    return parts | {"ffn_down.weight": random.matrix(spec.n_embd, spec.n_ff)}


def _experts(random: _Random) -> Tensors:
    spec = random.spec
    n = spec.n_expert
    parts = {
        "ffn_gate_inp.weight": random.matrix(n, spec.n_embd, gain=2.0),
        "ffn_gate_exps.weight": random.matrix(n, spec.n_ff, spec.n_embd),
        "ffn_up_exps.weight": random.matrix(n, spec.n_ff, spec.n_embd),
        "ffn_down_exps.weight": random.matrix(n, spec.n_embd, spec.n_ff),
    }
    if spec.fused and spec.arch not in ("kimi-linear", "bailingmoe2"):  # theirs is that of Q, K and V
        both = [parts.pop(f"ffn_{name}_exps.weight") for name in ("gate", "up")]
        parts["ffn_gate_up_exps.weight"] = np.concatenate(both, axis=1)
    if spec.arch in CHOICE_BIAS:
        parts["exp_probs_b.bias"] = random.bias(n)
    if spec.n_ff_shared:
        if spec.arch in ("qwen2moe", *DELTA_NETS):
            parts["ffn_gate_inp_shexp.weight"] = random.bias(spec.n_embd)
        parts |= {
            "ffn_gate_shexp.weight": random.matrix(spec.n_ff_shared, spec.n_embd),
            "ffn_up_shexp.weight": random.matrix(spec.n_ff_shared, spec.n_embd),
            "ffn_down_shexp.weight": random.matrix(spec.n_embd, spec.n_ff_shared),
        }
    if spec.arch == "gpt-oss":
        parts |= {
            "ffn_gate_inp.bias": random.bias(n),
            "ffn_gate_exps.bias": random.bias(n, spec.n_ff),
            "ffn_up_exps.bias": random.bias(n, spec.n_ff),
            "ffn_down_exps.bias": random.bias(n, spec.n_embd),
        }
    return parts


def _state(random: _Random) -> Tensors:
    """Decays of a few tokens to hundreds, so that a wrong state shows at once and later."""
    spec = random.spec
    if spec.arch in SHORT_CONV:
        return {
            "shortconv.in_proj.weight": random.matrix(3 * spec.n_embd, spec.n_embd, gain=1.5),
            "shortconv.conv.weight": random.matrix(spec.n_embd, spec.n_taps, gain=2.0),
            "shortconv.out_proj.weight": random.matrix(spec.n_embd, spec.n_embd),
        }
    if spec.arch == "kimi-linear":
        return _kimi_state(random)
    heads = spec.state_heads
    v_width = heads * spec.state_dim
    channels = v_width + 2 * spec.state_heads_k * spec.state_dim
    decays = -np.geomspace(0.005, 0.5, heads).astype(np.float32)
    parts = {
        "ssm_conv1d.weight": random.matrix(channels, spec.n_taps, gain=2.0),
        "ssm_dt.bias": random.bias(heads, scale=1.0),
        "ssm_out.weight": random.matrix(spec.n_embd, v_width),
    }
    if spec.arch in DELTA_NETS:
        parts |= {
            "attn_qkv.weight": random.matrix(channels, spec.n_embd, gain=1.5),
            "attn_gate.weight": random.matrix(v_width, spec.n_embd),
            "ssm_a": decays,
            "ssm_norm.weight": random.norm(spec.state_dim),
        }
        if spec.older:
            del parts["attn_qkv.weight"], parts["attn_gate.weight"]
            parts["ssm_in.weight"] = random.matrix(channels + v_width, spec.n_embd, gain=1.5)
        if spec.arch == "qwen3next":
            return parts | {"ssm_ba.weight": random.matrix(2 * heads, spec.n_embd)}
        return parts | {f"ssm_{name}.weight": random.matrix(heads, spec.n_embd) for name in ("alpha", "beta")}
    return parts | {
        "ssm_in.weight": random.matrix(v_width + channels + heads, spec.n_embd, gain=1.5),
        "ssm_conv1d.bias": random.bias(channels),
        "ssm_a": decays[:, None],
        "ssm_d": random.bias(heads, 1),
        "ssm_norm.weight": random.norm(v_width).reshape(spec.state_heads_k, -1),
    }


def _kimi_state(random: _Random) -> Tensors:
    spec = random.spec
    heads, dim = spec.state_heads, spec.state_dim
    width = heads * dim
    names = ("q", "k", "v")
    split: Tensors = {f"attn_{name}.weight": random.matrix(width, spec.n_embd, gain=1.5) for name in names}
    parts: Tensors = {"attn_qkv.weight": np.concatenate(list(split.values()))} if spec.fused else split
    parts |= {f"ssm_conv1d_{name}.weight": random.matrix(width, 1, spec.n_taps, gain=2.0) for name in names}
    parts |= {f"ssm_{name}_a.weight": random.matrix(dim, spec.n_embd) for name in ("f", "g")}
    parts |= {f"ssm_{name}_b.weight": random.matrix(width, dim) for name in ("f", "g")}
    return parts | {
        "ssm_dt.bias": random.bias(width, scale=1.0),
        "ssm_a": -np.geomspace(0.005, 0.5, heads).astype(np.float32)[:, None],
        "ssm_beta.weight": random.matrix(heads, spec.n_embd),
        "ssm_norm.weight": random.norm(dim),
        "attn_output.weight": random.matrix(spec.n_embd, width),
    }


def _parts_of_gemma4(random: _Random, layer: int) -> Tensors:
    """What a layer has beside attention and a dense feed-forward. The first layer has no experts."""
    spec = random.spec
    parts: Tensors = {"layer_output_scale.weight": random.norm(1)}
    if spec.n_embd_layer:
        parts |= {
            "inp_gate.weight": random.matrix(spec.n_embd_layer, spec.n_embd),
            "proj.weight": random.matrix(spec.n_embd, spec.n_embd_layer),
            "post_norm.weight": random.norm(spec.n_embd),
        }
    if spec.n_expert and layer > 0:
        parts |= _experts(random)
        parts["ffn_gate_inp.scale"] = 4 * random.norm(spec.n_embd)
        parts["ffn_down_exps.scale"] = random.norm(spec.n_expert)
        for name in ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"):
            parts[f"{name}.weight"] = random.norm(spec.n_embd)
    return parts


def _frame_of_gemma4(random: _Random) -> Tensors:
    spec = random.spec
    pairs = np.arange(spec.head_dim // 2)
    # half of the pairs hardly turn, as in Gemma 4's own files
    factors = np.where(pairs < len(pairs) // 2, 1 + pairs / len(pairs), 1e30).astype(np.float32)
    any_full = not all(map(spec.has_window, range(spec.n_layer)))
    parts: Tensors = {"rope_freqs.weight": factors} if any_full else {}
    if spec.n_embd_layer:
        width = spec.n_embd_layer * spec.n_layer
        parts |= {
            "per_layer_token_embd.weight": random.matrix(N_VOCAB, width, gain=2.0 * spec.n_layer**0.5),
            "per_layer_model_proj.weight": random.matrix(width, spec.n_embd),
            "per_layer_proj_norm.weight": random.norm(spec.n_embd_layer),
        }
    return parts
