"""Random weights of layers that have a state."""

from __future__ import annotations

import numpy as np

from support.arch_random import Random, Tensors
from support.arch_spec import DELTA_NETS, SHORT_CONV


def state_tensors(random: Random) -> Tensors:
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


def _kimi_state(random: Random) -> Tensors:
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
