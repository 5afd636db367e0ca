"""A recipe in words: what a model is made of, line by line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pykvgraph.checks import size_text

if TYPE_CHECKING:
    from pykvgraph.model.tokenizer import Tokenizer
    from pykvgraph.types import LayerSpec, ModelInfo, TensorInfo

_KINDS = {
    "llama": "SentencePiece",
    "gpt2": "byte-level BPE",
    "gemma4": "BPE",
    "hybriddna": "BPE",
    "whitespace": "BPE",
    "bert": "WordPiece",
    "t5": "unigram SentencePiece",
    "rwkv": "longest match",
    "plamo2": "unigram",
}


def recipe_lines(
    recipe: ModelInfo,
    layers: Sequence[LayerSpec],
    metadata: Mapping[str, Any],
    tensors: Sequence[TensorInfo],
) -> list[tuple[str, str]]:
    """What runs the model, each line with its subject in front."""
    keys = {
        key.removeprefix(f"{recipe.arch}."): value
        for key, value in metadata.items()
        if key.startswith(f"{recipe.arch}.")
    }
    lines = [
        ("layers", f"{recipe.n_layer} of width {recipe.n_embd:,}"),
        ("heads", _heads(layers)),
        *(("cells", line) for line in _kept(recipe, layers)),
        *(("K and V", line) for line in _borrowed(layers)),
        *(("states", line) for line in _states(layers, keys)),
        ("rope", _rope(layers, keys, tensors)),
    ]
    if keys.get("expert_count"):
        lines.append(
            ("experts", f"{keys['expert_count']}, {keys.get('expert_used_count', '?')} run for a token")
        )
    return [
        *lines,
        ("vocabulary", f"{recipe.n_vocab:,} tokens"),
        ("trained for", f"{recipe.n_ctx_train:,} positions"),
        ("weights", f"{recipe.n_params:,} in {size_text(recipe.weight_bytes)}: {_types(tensors)}"),
    ]


def _kept(recipe: ModelInfo, layers: Sequence[LayerSpec]) -> list[str]:
    if recipe.encodes:
        return ["nothing stays: it makes vectors of texts"]
    if recipe.n_embd_target:
        target = recipe.arch.removesuffix("-assistant")
        return [f"those of a {target} model of width {recipe.n_embd_target:,}, for which it drafts (-md)"]
    return _cells(layers)


def tokenizer_text(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> str:
    """What turns text into tokens."""
    kind = str(metadata.get("tokenizer.ggml.model"))
    pre = metadata.get("tokenizer.ggml.pre")
    name = f"{_KINDS[kind]} ({kind})" if kind in _KINDS else kind
    split = f", texts split as {pre} does" if pre and kind == "gpt2" else ""
    return f"{name} of {tokenizer.n_vocab:,} tokens{split}"


def ranges(numbers: Sequence[int]) -> str:
    """Numbers that rise, in short: "0-4, 6, 8-9"."""
    runs = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(runs)


def _by_layer(layers: Sequence[LayerSpec], describe: Any) -> list[tuple[str, list[int]]]:
    """What `describe` says of the layers that attend, and of which it says it."""
    found: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer.group >= 0:
            found.setdefault(describe(layer), []).append(index)
    return list(found.items())


def _all_or_each(parts: Sequence[tuple[str, list[int]]]) -> str:
    if not parts:
        return "none"
    if len(parts) == 1:
        return parts[0][0]
    return "; ".join(f"{_named(layers)}: {text}" for text, layers in parts)


def _named(layers: Sequence[int]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {ranges(layers)}"


def _heads(layers: Sequence[LayerSpec]) -> str:
    def describe(layer: LayerSpec) -> str:
        size = f"{layer.head_dim_k}"
        if layer.head_dim_v != layer.head_dim_k:
            size += f" (V: {layer.head_dim_v})"
        shared = layer.n_head // max(layer.n_head_kv, 1)
        return f"{layer.n_head} of {size}, on {layer.n_head_kv} of K and V" + (
            f", each for {shared}" if shared > 1 else ""
        )

    return _all_or_each(_by_layer(layers, describe))


def _cells(layers: Sequence[LayerSpec]) -> list[str]:
    """A line for each group of cells."""
    lines = []
    for group in sorted({layer.group for layer in layers if layer.group >= 0}):
        members = [i for i, layer in enumerate(layers) if layer.group == group and layer.kv_from == i]
        window = layers[members[0]].window
        kept = f"a window of {window:,} positions" if window else "every position"
        which = "all layers" if len(members) == len(layers) else _named(members)
        lines.append(f"group {group}: {kept}, {which}")
    return lines


_STATES = {
    "short_conv": "the last inputs of a short convolution",
    "delta_net": "a gated delta net",
    "mamba2": "Mamba-2",
}


def _states(layers: Sequence[LayerSpec], keys: Mapping[str, Any]) -> list[str]:
    """A line for each kind of state that recurs."""
    lines = []
    for kind, name in _STATES.items():
        members = [i for i, layer in enumerate(layers) if kind in layer.kind]
        if members:
            size = keys.get("ssm.state_size")
            heads = f", {keys.get('ssm.time_step_rank')} heads of width {size}" if size else ""
            lines.append(f"{name}{heads}: {_named(members)}")
    return lines


def _borrowed(layers: Sequence[LayerSpec]) -> list[str]:
    """A line for each layer whose K and V others read."""
    return [
        f"{_named(readers)}: those of layer {owner}"
        for owner in range(len(layers))
        if (readers := [i for i, layer in enumerate(layers) if layer.kv_from == owner != i])
    ]


def _rope(layers: Sequence[LayerSpec], keys: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> str:
    def describe(layer: LayerSpec) -> str:
        if layer.rope == 0:
            return "none"
        return f"{layer.rope} of {layer.head_dim_k} dimensions"

    text = _all_or_each(_by_layer(layers, describe))
    if not any(layer.rope for layer in layers):
        return text
    for name, key in (("base", "rope.freq_base"), ("base in windows", "rope.freq_base_swa")):
        if isinstance(keys.get(key), (int, float)):
            text += f", {name} {keys[key]:,.10g}"
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear")
    kind = keys.get("rope.scaling.type", "linear" if factor else "none")
    if kind != "none":
        text += f", scaled: {kind}" + (f" by {factor:g}" if isinstance(factor, (int, float)) else "")
        original = keys.get("rope.scaling.original_context_length")
        text += f" from {original:,} positions" if isinstance(original, int) else ""
    if any(tensor.name.startswith(("rope_freqs.", "rope_factors_")) for tensor in tensors):
        text += ", a factor for each frequency"
    return text


def _types(tensors: Sequence[TensorInfo]) -> str:
    """How many tensors there are of each type, the type with most bytes first."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.type] += tensor.size
    count = Counter(tensor.type for tensor in tensors)
    return ", ".join(f"{count[name]} {name}" for name, _ in sizes.most_common())
