"""The types of a cache: their names, ggml's numbers, and which pairs of them the tests of the cache use."""

from __future__ import annotations

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from support.models import ModelSpec

# by the names of type_k and type_v
GGML_TYPES: dict[str, GGMLQuantizationType] = {
    name.lower(): GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
}
QUANTIZED = ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]

FLOAT_PAIRS = [("f32", "f32"), ("f16", "f16"), ("f16", "f32"), ("bf16", "bf16")]
QUANTIZED_PAIRS = [("q8_0", "q8_0"), ("q4_0", "q4_1"), ("f16", "q5_0"), ("q5_1", "bf16")]
KV_TYPES = FLOAT_PAIRS + QUANTIZED_PAIRS

# Heads of one block. Three of them are no whole words of 4 bytes in q8_0, q5_0 and q4_0; two always are.
BLOCKS = ModelSpec(n_head=3, n_head_kv=3, head_dim=32)
EVEN_BLOCKS = ModelSpec(n_head=4, n_head_kv=2, head_dim=32)


def row_bytes(kv_type: str, n: int) -> int:
    """What n values take."""
    block, size = GGML_QUANT_SIZES[GGML_TYPES[kv_type]]
    return n // block * size
