"""A llama in float64, by its definition: the judge of files that libllama refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from support.models import ModelSpec, random_tensors

Floats = npt.NDArray[np.float64]


# K, rotated, and V of a layer: (n, n_head_kv, dims)
Rows = tuple[Floats, Floats]


def naive_logits(
    spec: ModelSpec,
    ids: Sequence[int],
    attended: list[Floats] | None = None,
    past: Sequence[Rows] = (),
    pos0: int = 0,
    rows: list[Rows] | None = None,
    stored: Callable[[Floats], Floats] = lambda rows: rows,
) -> Floats:
    """Of one text, all its rows: (n, n_vocab).

    attended: what the tokens of each layer attend to, (n_head, n, n), is appended to it. past: K and V of
    each layer that all tokens see besides; the tokens begin at position pos0 then. rows: K and V of the
    tokens are appended to it, layer by layer. stored: what becomes of K and of V, (n, n_head_kv, dims), when
    they are stored; heads see that.
    """
    weights = {name: tensor.astype(np.float64) for name, tensor in random_tensors(spec).items()}
    x = weights["token_embd.weight"][list(ids)]
    for layer in range(spec.n_layer):
        w = {
            name.split(".", 2)[2]: tensor
            for name, tensor in weights.items()
            if name.startswith(f"blk.{layer}.")
        }
        k, v = _rows(spec, w, normed(x, w["attn_norm.weight"]), pos0)
        own = stored(k), stored(v)
        if rows is not None:
            rows.append(own)
        seen = [np.concatenate(pair) for pair in zip(past[layer], own, strict=True)] if past else own
        out, shares = _attention(spec, layer, w, normed(x, w["attn_norm.weight"]), seen[0], seen[1], pos0)
        if attended is not None:
            attended.append(shares)
        x = x + out @ w["attn_output.weight"].T
        h = normed(x, w["ffn_norm.weight"])
        gate = h @ w["ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up.weight"].T)) @ w["ffn_down.weight"].T
    logits: Floats = normed(x, weights["output_norm.weight"]) @ weights["output.weight"].T
    return logits


def normed(x: Floats, weight: Floats) -> Floats:
    y: Floats = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight
    return y


def turned(spec: ModelSpec, heads: Floats, positions: npt.NDArray[np.int64]) -> Floats:
    """(n, n_heads, k_dim), each at its own position: neighbours are a pair."""
    angles = positions[:, None] * spec.rope_base ** (-np.arange(0, spec.k_dim, 2) / spec.k_dim)
    pairs = (heads[..., 0::2] + 1j * heads[..., 1::2]) * np.exp(1j * angles)[:, None]
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(heads.shape)


def _rows(spec: ModelSpec, w: dict[str, Floats], x: Floats, pos0: int) -> Rows:
    """K and V of these tokens."""
    k = turned(
        spec, (x @ w["attn_k.weight"].T).reshape(len(x), -1, spec.k_dim), np.arange(pos0, pos0 + len(x))
    )
    return k, (x @ w["attn_v.weight"].T).reshape(len(x), -1, spec.v_dim)


def _attention(
    spec: ModelSpec, layer: int, w: dict[str, Floats], x: Floats, k: Floats, v: Floats, pos0: int
) -> tuple[Floats, Floats]:
    """What heads gather, (n, n_head * v_dim), and from where, (n_head, n, n_rows).

    k, v: the rows of what comes before, which all tokens see, and then theirs.
    """
    n = len(x)
    group = spec.n_head // spec.heads_of(layer)
    q = turned(spec, (x @ w["attn_q.weight"].T).reshape(n, -1, spec.k_dim), np.arange(pos0, pos0 + n))
    scores = np.einsum("ihd,jhd->hij", q, k.repeat(group, axis=1)) / np.sqrt(spec.k_dim)
    scores = np.where(np.tri(n, len(k), len(k) - n, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", weights, v.repeat(group, axis=1)).reshape(n, -1), weights
