"""Random weights of whole models. Attention is peaked, so that a wrong window, rotation or expert shows."""

from __future__ import annotations

import numpy as np

from support.arch_altup import altup_frame, altup_layer
from support.arch_random import Random, Tensors
from support.arch_spec import (
    BERTS,
    BIASES,
    CHOICE_BIAS,
    DELTA_NETS,
    ENCODERS,
    GATED_IN_ONE,
    GATES,
    HEAD_GATES,
    HEAD_NORMS,
    LATENT_HEADS,
    NO_FFN_NORM,
    NO_PRE_NORMS,
    NORM_BIASES,
    POST_NORMS,
    SHORT_CONV,
    SINKS,
    TIED,
    UNGATED,
    WIDE_NORMS,
    ArchSpec,
)
from support.arch_states import state_tensors
from support.models import N_VOCAB


def random_tensors(spec: ArchSpec) -> Tensors:
    """Weights by GGUF name, shaped (rows, columns)."""
    random = Random(spec)
    tensors = {"token_embd.weight": random.matrix(N_VOCAB, spec.n_embd, gain=2.0)}
    for layer in range(spec.n_block):
        parts = _norms(random, layer)
        if spec.attends(layer):
            parts |= _latent_attention(random, layer) if spec.rank else _attention(random, layer)
        elif spec.arch == "deci" and layer % 3 == 1:
            parts["attn_output.weight"] = random.matrix(spec.n_embd, spec.n_embd)
        if spec.has_state(layer):
            parts |= state_tensors(random)
        if spec.feeds(layer):
            parts |= _experts(random) if spec.routes(layer) else _dense(random, layer)
            parts |= _dense_beside(random)
        if spec.arch == "gemma4":
            parts |= _parts_of_gemma4(random, layer)
        elif spec.arch == "gemma3n":
            parts |= altup_layer(random)
        if layer >= spec.n_layer:
            parts |= _draft_head(random)
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in parts.items()}
    is_first = spec.arch in (*SHORT_CONV, *BERTS)
    last = "enc.output_norm.weight" if spec.arch == "neo-bert" else "output_norm.weight"
    if spec.arch != "olmo":
        tensors["token_embd_norm.weight" if is_first else last] = random.norm(spec.n_embd)
    tensors |= _frame_of_encoder(random) | _classifier(random)
    if _has_norm_biases(spec):
        tensors["output_norm.bias"] = random.bias(spec.n_embd)
    if spec.arch in ("phi2", "phimoe"):
        tensors["output.bias"] = random.bias(N_VOCAB)
    if spec.arch in ("gpt2", "bert", "starcoder"):
        tensors["position_embd.weight"] = random.matrix(spec.n_ctx_train, spec.n_embd, gain=2.0)
    if spec.arch not in TIED:
        tensors["output.weight"] = random.matrix(N_VOCAB, spec.n_embd, gain=3.0)
    if spec.arch == "gemma4":
        tensors |= _frame_of_gemma4(random)
    elif spec.arch == "gemma3n":
        tensors |= altup_frame(random)
    if spec.scaling == "longrope":
        pairs = (spec.n_behind if spec.rank else spec.n_rot or spec.head_dim) // 2
        tensors["rope_factors_short.weight"] = np.linspace(1.0, 1.5, pairs, dtype=np.float32)
        tensors["rope_factors_long.weight"] = np.linspace(1.0, 12.0, pairs, dtype=np.float32)
    return tensors


def _has_norm_biases(spec: ArchSpec) -> bool:
    return spec.arch in NORM_BIASES or (spec.arch == "mpt" and spec.biases)


def _draft_head(random: Random) -> Tensors:
    """What a draft head has beside its layer."""
    n = random.spec.n_embd
    parts: Tensors = {
        "nextn.eh_proj.weight": random.matrix(n, 2 * n, gain=1.5),
        "nextn.enorm.weight": random.norm(n),
        "nextn.hnorm.weight": random.norm(n),
    }
    if random.spec.arch == "nemotron_h_moe":
        parts["post_attention_norm.weight"] = random.norm(n)
        parts["nextn.shared_head_norm.weight"] = random.norm(n)
    if random.spec.draft_output:
        parts |= {
            "nextn.embed_tokens.weight": random.matrix(N_VOCAB, n, gain=2.0),
            "nextn.shared_head_norm.weight": random.norm(n),
            "nextn.shared_head_head.weight": random.matrix(N_VOCAB, n, gain=3.0),
        }
    return parts


def _frame_of_encoder(random: Random) -> Tensors:
    """What BERT and BLOOM have before their layers, and EmbeddingGemma behind pooled states."""
    spec = random.spec
    parts: Tensors = {}
    if spec.arch == "bloom":
        parts |= {
            "token_embd_norm.weight": random.norm(spec.n_embd),
            "token_embd_norm.bias": random.bias(spec.n_embd),
        }
    if spec.arch in BERTS:
        parts |= {
            "token_embd_norm.bias": random.bias(spec.n_embd),
            "token_types.weight": random.bias(2, spec.n_embd),
        }
    if spec.arch == "modern-bert":
        parts["token_embd_norm.weight"] = random.norm(spec.n_embd)
    if spec.n_dense:
        parts |= {
            "dense_2.weight": random.matrix(spec.n_dense, spec.n_embd),
            "dense_3.weight": random.matrix(spec.n_embd, spec.n_dense),
        }
    return parts


def _classifier(random: Random) -> Tensors:
    """Of a reranker."""
    spec, n = random.spec, random.spec.n_classes
    if n == 0:
        return {}
    if spec.arch == "jina-bert-v2":
        return {"cls.weight": random.matrix(n, spec.n_embd), "cls.bias": random.bias(n)}
    parts: Tensors = {"cls.output.weight": random.matrix(n, spec.n_embd)}
    if spec.arch != "qwen3":
        parts["cls.output.bias"] = random.bias(n)
    if spec.arch in ENCODERS and spec.class_hidden:
        parts["cls.weight"] = random.matrix(spec.n_embd, spec.n_embd)
        if spec.arch == "modern-bert":
            parts["cls.norm.weight"] = random.norm(spec.n_embd)
        else:
            parts["cls.bias"] = random.bias(spec.n_embd)
    return parts


def _attention(random: Random, layer: int) -> Tensors:
    spec = random.spec
    head_dim, n_head_kv = spec.heads_of(layer)
    q_rows, kv_rows = spec.n_head_of(layer) * head_dim, n_head_kv * head_dim
    gate_rows = q_rows if spec.arch in DELTA_NETS else 0
    q, k = (random.matrix(rows, spec.n_embd, gain=1.5) for rows in (q_rows + gate_rows, kv_rows))
    v = random.matrix(kv_rows, spec.n_embd)
    split: Tensors = {"attn_q.weight": q, "attn_k.weight": k, "attn_v.weight": v}
    parts: Tensors = {"attn_qkv.weight": np.concatenate([q, k, v])} if spec.fused else split
    if spec.reads_another(layer) and not spec.spare_kv and not spec.fused:
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
    if spec.arch in ("gpt-oss", "pangu-embedded", *BIASES) or (
        spec.arch in ("mpt", "paddleocr") and spec.biases
    ):
        parts["attn_output.bias"] = random.bias(spec.n_embd)
    if spec.arch in SINKS:
        parts["attn_sinks.weight"] = random.bias(spec.n_head, scale=2.0)
    if spec.arch in (*GATES, *HEAD_GATES):
        by_head = spec.arch in HEAD_GATES and not spec.wide_gate
        rows = q_rows // head_dim if by_head else q_rows
        parts["attn_gate.weight"] = random.matrix(rows, spec.n_embd)
    if spec.arch == "bitnet":
        parts["attn_sub_norm.weight"] = random.norm(q_rows)
    return parts


def _latent_attention(random: Random, layer: int) -> Tensors:
    spec = random.spec
    plain = spec.head_dim - spec.n_behind
    q_rows = spec.n_head * spec.head_dim
    queries = {"attn_q.weight": random.matrix(q_rows, spec.n_embd, gain=1.5)}
    if spec.q_rank:
        queries = {
            "attn_q_a.weight": random.matrix(spec.q_rank, spec.n_embd),
            "attn_q_a_norm.weight": random.norm(spec.q_rank),
            "attn_q_b.weight": random.matrix(q_rows, spec.q_rank, gain=1.5),
        }
    queries |= {
        "attn_kv_a_mqa.weight": random.matrix(spec.rank + spec.n_behind, spec.n_embd, gain=1.5),
        "attn_kv_a_norm.weight": random.norm(spec.rank),
    }
    if spec.arch in LATENT_HEADS:
        gathered = spec.n_head * spec.head_dim_out
        return queries | {
            "attn_kv_b.weight": random.matrix(spec.n_head * (plain + spec.head_dim_out), spec.rank),
            "attn_output.weight": random.matrix(spec.n_embd, gathered),
        }
    return queries | {
        "attn_k_b.weight": random.matrix(spec.n_head, spec.rank, plain),
        "attn_v_b.weight": random.matrix(spec.n_head, spec.head_dim_out, spec.rank),
        "attn_output.weight": random.matrix(
            spec.n_embd, spec.n_head * spec.head_dim_out, gain=0.0 if layer in spec.silent else 1.0
        ),
    }


def _norms(random: Random, layer: int) -> Tensors:
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
        if not spec.reads_another(layer) or spec.spare_kv:
            names["attn_k_norm"] = head_dim
    if spec.arch == "deci" and layer % 3 == 2:
        del names["attn_norm"]
    if spec.arch in POST_NORMS:
        names |= {"post_attention_norm": spec.n_embd, "post_ffw_norm": spec.n_embd}
    if spec.arch == "grok":
        names |= {"attn_output_norm": spec.n_embd, "layer_output_norm": spec.n_embd}
    if spec.arch == "dbrx":
        names["attn_output_norm"] = spec.n_embd
    if spec.arch == "arctic":
        names["ffn_norm_exps"] = spec.n_embd
    if spec.arch in BERTS:
        names = {"attn_output_norm": spec.n_embd, "layer_output_norm": spec.n_embd}
    if spec.two_norms:
        names["attn_norm_2"] = spec.n_embd
    if spec.two_norms and spec.arch == "jina-bert-v2":
        names |= {"attn_q_norm": spec.n_head * head_dim, "attn_k_norm": spec.n_head_kv * head_dim}
    if spec.arch == "modern-bert" and layer == 0:
        del names["attn_norm"]
    norms = {f"{name}.weight": random.norm(n) for name, n in names.items()}
    if _has_norm_biases(spec) or spec.arch in BERTS:
        norms |= {f"{name}.bias": random.bias(n) for name, n in names.items()}
    if spec.norms_by_head:
        norms["attn_q_norm.weight"] = random.norm(spec.n_head * head_dim).reshape(-1, head_dim)
        norms["attn_k_norm.weight"] = random.norm(spec.n_head_kv * head_dim).reshape(-1, head_dim)
    if spec.arch == "plamo3":
        norms |= {name: random.norm(spec.n_embd) for name in ("post_attention_norm", "post_ffw_norm")}
    if spec.arch == "falcon-h1":
        norms["ffn_norm"] = random.norm(spec.n_embd)
    if spec.arch in ("gemma3n", "gemma4"):  # nothing else scales its scores
        norms["attn_q_norm.weight"] *= np.float32(2.5 / np.sqrt(head_dim))
    return norms


def _dense(random: Random, layer: int) -> Tensors:
    spec = random.spec
    n_ff = spec.n_ff_of(layer)
    rows = {"ffn_gate": n_ff, "ffn_up": n_ff}
    if spec.arch in (*GATED_IN_ONE, *UNGATED):
        rows = {"ffn_up": n_ff * (2 if spec.arch in GATED_IN_ONE else 1)}
    elif spec.gates != "apart":
        rows = {"ffn_up": n_ff * (2 if spec.gates == "in one" else 1)}
    parts = {f"{name}.weight": random.matrix(n, spec.n_embd) for name, n in rows.items()}
    if spec.arch in BIASES or (spec.arch == "mpt" and spec.biases):
        biased = [name for name in rows if name == "ffn_up" or spec.arch == "jais"]
        parts |= {f"{name}.bias": random.bias(rows[name]) for name in biased}
        parts["ffn_down.bias"] = random.bias(spec.n_embd)
    if spec.arch == "bitnet":
        parts["ffn_sub_norm.weight"] = random.norm(n_ff)
    return parts | {"ffn_down.weight": random.matrix(spec.n_embd, n_ff)}


def _dense_beside(random: Random) -> Tensors:
    """Of the experts: as wide as embeddings in Arctic; Grok may have none."""
    spec = random.spec
    n = {"arctic": spec.n_embd, "grok": spec.n_ff if spec.n_ff_shared else 0}.get(spec.arch, 0)
    names = ("ffn_gate", "ffn_up") if n else ()
    parts: Tensors = {f"{name}.weight": random.matrix(n, spec.n_embd) for name in names}
    return parts | ({"ffn_down.weight": random.matrix(spec.n_embd, n)} if n else {})


def _experts(random: Random) -> Tensors:
    spec = random.spec
    n = spec.n_expert
    n_in = spec.n_latent or spec.n_embd
    parts = {
        "ffn_gate_inp.weight": random.matrix(n, spec.n_embd, gain=2.0),
        "ffn_gate_exps.weight": random.matrix(n, spec.n_ff, n_in),
        "ffn_up_exps.weight": random.matrix(n, spec.n_ff, n_in),
        "ffn_down_exps.weight": random.matrix(n, n_in, spec.n_ff),
    }
    if spec.n_latent:
        parts |= {
            "ffn_latent_down.weight": random.matrix(n_in, spec.n_embd),
            "ffn_latent_up.weight": random.matrix(spec.n_embd, n_in),
        }
    of_qkv = ("kimi-linear", "bailingmoe2", "dots1", "dbrx")  # what of theirs is fused
    if spec.arch in UNGATED:
        del parts["ffn_gate_exps.weight"]
    elif spec.fused and spec.arch not in of_qkv:
        both = [parts.pop(f"ffn_{name}_exps.weight") for name in ("gate", "up")]
        parts["ffn_gate_up_exps.weight"] = np.concatenate(both, axis=1)
    if spec.arch in CHOICE_BIAS:
        parts["exp_probs_b" if spec.arch == "hy_v3" else "exp_probs_b.bias"] = random.bias(n)
    if spec.arch == "granite_swa" and spec.n_ff_shared:
        parts |= {
            "ffn_up_shexp.weight": random.matrix(2 * spec.n_ff_shared, spec.n_embd),
            "ffn_down_shexp.weight": random.matrix(spec.n_embd, spec.n_ff_shared),
        }
    elif spec.n_ff_shared and spec.arch != "grok":
        if spec.arch in ("qwen2moe", *DELTA_NETS):
            parts["ffn_gate_inp_shexp.weight"] = random.bias(spec.n_embd)
        parts |= {
            "ffn_gate_shexp.weight": random.matrix(spec.n_ff_shared, spec.n_embd),
            "ffn_up_shexp.weight": random.matrix(spec.n_ff_shared, spec.n_embd),
            "ffn_down_shexp.weight": random.matrix(spec.n_embd, spec.n_ff_shared),
        }
        if spec.arch in UNGATED:
            del parts["ffn_gate_shexp.weight"]
    if spec.arch == "gpt-oss":
        parts |= {
            "ffn_gate_inp.bias": random.bias(n),
            "ffn_gate_exps.bias": random.bias(n, spec.n_ff),
            "ffn_up_exps.bias": random.bias(n, spec.n_ff),
            "ffn_down_exps.bias": random.bias(n, spec.n_embd),
        }
    return parts


def _parts_of_gemma4(random: Random, layer: int) -> Tensors:
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


def _frame_of_gemma4(random: Random) -> Tensors:
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
