"""Metadata of random models, under the keys that converters write."""

from __future__ import annotations

import gguf

from support.arch_spec import (
    BERTS,
    BY_KV_HEADS,
    DELTA_NETS,
    ENCODERS,
    FIRST_DENSE,
    GRANITES,
    HEAD_GATES,
    LATENT_HEADS,
    LATENTS,
    LAYER_NORMS,
    NEMOTRONS,
    NORMED_EXPERTS,
    SCALED_EXPERTS,
    SHARED_COUNT,
    SHORT_CONV,
    SIGMOID,
    VARYING,
    ArchSpec,
)
from support.models import N_VOCAB


def add_metadata(writer: gguf.GGUFWriter, spec: ArchSpec) -> None:
    writer.add_block_count(spec.n_block)
    if spec.draft_head:
        writer.add_nextn_predict_layers(1)
    writer.add_context_length(spec.n_ctx_train)
    writer.add_embedding_length(spec.n_embd)
    widths = [spec.n_ff_of(layer) * spec.feeds(layer) for layer in range(spec.n_block)]
    widths = [2 * width for width in widths] if spec.arch == "qwen" else widths
    writer.add_feed_forward_length(widths if len(set(widths)) > 1 else widths[0])
    if spec.arch != "cohere2moe":  # it says which norms there are
        writer.add_layer_norm_rms_eps(1e-9 if spec.arch == "qwen2vl" else 1e-5)  # libllama reads none there
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
        if spec.arch not in ("llama", "nomic-bert-moe"):
            writer.add_expert_feed_forward_length(spec.n_ff)
        add_experts(writer, spec)
    if spec.n_ff_shared:
        one = spec.arch == "bailingmoe2"  # whose key is the width of one of them
        writer.add_expert_shared_feed_forward_length(spec.n_ff if one else spec.n_ff_shared)
    if spec.state_heads:
        add_states(writer, spec)
    if spec.arch == "gptneox":
        writer.add_parallel_residual(spec.parallel)
    if spec.arch in ("command-r", "cohere2", "cohere2moe", "muse-glimmer"):
        writer.add_logit_scale(0.25)
    if spec.arch in GRANITES:
        writer.add_logit_scale(2.0)
        writer.add_residual_scale(0.7)
        writer.add_embedding_scale(3.0)
        writer.add_attention_scale(0.3)
        writer.add_rope_scaling_finetuned(spec.n_rot >= 0)
    if spec.temperature:
        writer.add_attn_temperature_scale(spec.temperature)
        writer.add_attn_temperature_length(spec.n_ctx_orig)
    if spec.yarn_gain:
        writer.add_rope_scaling_yarn_log_mul(spec.yarn_gain)
    if spec.arch == "mistral3" and spec.scaling == "yarn":
        writer.add_rope_scaling_yarn_beta_fast(8.0)
        writer.add_rope_scaling_yarn_beta_slow(2.0)
    if spec.arch == "hunyuan-dense" and spec.scaling == "":
        writer.add_float32("hunyuan-dense.rope.scaling.alpha", 4.0)
    if spec.arch == "apertus":
        add_xielu(writer, spec.n_layer)
    if spec.sections:
        writer.add_rope_dimension_sections(list(spec.sections))
    if spec.pooling >= 0:
        writer.add_pooling_type(gguf.PoolingType(spec.pooling))
    if spec.arch in ENCODERS:
        writer.add_causal_attention(False)
    if spec.arch in BERTS:
        writer.add_token_type_count(2)
    if spec.n_classes > 1:
        writer.add_classifier_output_labels([f"class {i}" for i in range(spec.n_classes)])
    if spec.class_pooling >= 0:
        writer.add_uint32(f"{spec.arch}.classifier.pooling_type", spec.class_pooling)
    if spec.activation:
        writer.add_string(f"{spec.arch}.hidden_activation", spec.activation)
    if spec.n_dense:
        writer.add_dense_features_dims("dense_2", spec.n_embd, spec.n_dense)
        writer.add_dense_features_dims("dense_3", spec.n_dense, spec.n_embd)
    if spec.arch == "nomic-bert-moe":
        writer.add_moe_every_n_layers(2)
    if spec.arch == "gemma4":
        add_gemma4(writer, spec)
    elif spec.window:
        add_windows(writer, spec)
    add_older(writer, spec)
    add_scaling(writer, spec)


def add_windows(writer: gguf.GGUFWriter, spec: ArchSpec) -> None:
    writer.add_sliding_window(spec.window)
    layers = [spec.has_window(layer) for layer in range(spec.n_layer)]
    writer.add_sliding_window_pattern(
        layers if spec.arch in ("spark2_5", "granite_swa", "mimo2") else spec.period
    )
    if spec.arch in ("modern-bert", "muse-glimmer", "afmoe", "smallthinker", "plamo3", "mimo2", *HEAD_GATES):
        writer.add_rope_freq_base_swa(5000.0)
    if spec.arch in HEAD_GATES:
        writer.add_rope_dimension_count_swa(spec.head_dim // 2)
    if spec.arch == "granite_swa":
        writer.add_array("granite_swa.attention.rope_pattern", layers)


def add_older(writer: gguf.GGUFWriter, spec: ArchSpec) -> None:
    """Bounds and biases of attention, and caps."""
    if spec.arch in ("olmo", "dbrx", "mpt"):
        writer.add_clamp_kqv(1.5)
    if spec.arch in ("mpt", "jais"):
        writer.add_max_alibi_bias(8.0)
    if spec.arch == "mimo2":
        writer.add_float32("mimo2.attention.value_scale", 0.7)
    if spec.arch == "muse-glimmer":
        writer.add_final_logit_softcapping(20.0)
    if spec.n_latent:
        writer.add_moe_latent_size(spec.n_latent)


def add_xielu(writer: gguf.GGUFWriter, n_layer: int) -> None:
    """Another curve in each layer."""
    writer.add_xielu_alpha_p([0.6 + 0.2 * layer for layer in range(n_layer)])
    writer.add_xielu_alpha_n([0.3 + 0.3 * layer for layer in range(n_layer)])
    writer.add_xielu_beta([0.5 + 0.1 * layer for layer in range(n_layer)])
    writer.add_xielu_eps([-1e-6] * n_layer)


def add_experts(writer: gguf.GGUFWriter, spec: ArchSpec) -> None:
    if spec.arch in FIRST_DENSE:
        writer.add_leading_dense_block_count(1)
    if spec.arch in SIGMOID or (spec.arch in LATENTS and spec.n_group):  # DeepSeek V3
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if spec.arch in SHARED_COUNT:
        writer.add_expert_shared_count(spec.n_ff_shared // spec.n_ff)
    if spec.arch in SCALED_EXPERTS:
        writer.add_expert_weights_scale(2.446)
    if spec.arch in ("bailingmoe2", *NORMED_EXPERTS, *LATENTS):
        writer.add_expert_weights_norm(spec.arch in NORMED_EXPERTS or spec.n_group > 0)
    if spec.arch in ("ernie4_5-moe", "llama4"):
        writer.add_interleave_moe_layer_step(2 if spec.arch == "llama4" else 1)
    if spec.n_group:
        writer.add_expert_group_count(spec.n_group)
        writer.add_expert_group_used_count(2)


def add_heads(writer: gguf.GGUFWriter, spec: ArchSpec) -> None:
    heads = [spec.n_head_of(layer) for layer in range(spec.n_layer)]
    if spec.arch == "deci":
        heads = [spec.n_head * (layer % 3 < 2) for layer in range(spec.n_layer)]
    writer.add_head_count(heads if spec.arch in (*VARYING, "deci") else spec.n_head)
    if spec.arch in (*BY_KV_HEADS, "deci"):
        writer.add_head_count_kv([spec.n_head_kv * spec.attends(layer) for layer in range(spec.n_block)])
    elif spec.n_head_kv_window:
        writer.add_head_count_kv([spec.heads_of(layer)[1] for layer in range(spec.n_layer)])
    else:
        writer.add_head_count_kv(spec.n_head_kv)
    if spec.arch in LATENT_HEADS:
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim_out)
    else:
        writer.add_key_length(spec.rank + spec.n_behind if spec.rank else spec.head_dim)
        writer.add_value_length(spec.rank or spec.head_dim)
    writer.add_rope_dimension_count(spec.n_behind if spec.rank else max(spec.n_rot, 0) or spec.head_dim)
    writer.add_rope_freq_base(10000.0)
    if spec.rank:
        writer.add_kv_lora_rank(spec.rank)
    if spec.rank and spec.arch not in LATENT_HEADS:
        writer.add_key_length_mla(spec.head_dim)
        writer.add_value_length_mla(spec.head_dim_out)
    if spec.q_rank:
        writer.add_q_lora_rank(spec.q_rank)


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
    if spec.arch in NEMOTRONS:
        writer.add_layer_norm_eps(1e-3)  # of the draft head's last norm; all others are RMS norms


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
