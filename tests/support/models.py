"""Random llama-architecture GGUF files, small enough that a test runs in a second."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

WeightType = gguf.GGMLQuantizationType

N_BYTE_TOKENS = 256
WORDS = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "th", "he"]
N_VOCAB = 3 + N_BYTE_TOKENS + len(WORDS)  # 288


@dataclass(frozen=True)
class ModelSpec:
    """What a random model looks like. `head_dim` 0 means n_embd / n_head; `rope_scale` is a linear factor."""

    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    kv_heads: tuple[int, ...] = ()  # of each layer, where they differ: then cells are in several groups
    head_dim: int = 0
    value_dim: int = 0  # of V, where it differs from K
    n_ff: int = 128
    weights: WeightType = WeightType.F32
    tied: bool = False
    rope_base: float = 10000.0
    rope_scale: float = 1.0
    rope_factors: bool = False
    biases: bool = False  # in every place where the recipe allows one
    outliers: float = 1.0  # what the first two dimensions of each head's K are multiplied by
    seed: int = 0
    arch: str = "llama"  # "deci", for libllama, which wants llama's layers alike, is the same otherwise

    def heads_of(self, layer: int) -> int:
        """KV heads of a layer."""
        return self.kv_heads[layer] if self.kv_heads else self.n_head_kv

    @property
    def k_dim(self) -> int:
        """Elements of one head's K row."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def v_dim(self) -> int:
        """Elements of one head's V row."""
        return self.value_dim or self.k_dim

    def __str__(self) -> str:
        kv_heads = "-".join(str(self.heads_of(layer)) for layer in range(self.n_layer))
        dims = f"{self.k_dim}d{self.value_dim or ''}"
        gqa = f"{self.n_head}h{kv_heads if self.kv_heads else self.n_head_kv}kv{dims}"
        extras = "".join(
            f"-{name}"
            for name, wanted in (("tied", self.tied), ("factors", self.rope_factors), ("biases", self.biases))
            if wanted
        )
        scale = f"-scale{self.rope_scale:g}" if self.rope_scale != 1 else ""
        base = f"-base{self.rope_base:g}" if self.rope_base != 10000 else ""
        outliers = f"-outliers{self.outliers:g}" if self.outliers != 1 else ""
        varied = f"{extras}{scale}{base}{outliers}"
        arch = "" if self.arch == "llama" else f"{self.arch}-"
        return f"{arch}{self.n_layer}x{self.n_embd}-{gqa}-{self.weights.name}{varied}-{self.seed}"


TINY = ModelSpec(n_layer=1, n_embd=16, n_head=2, n_head_kv=1, n_ff=32)
SMALL = ModelSpec()
# two groups of cells, whose rows are of different widths
TWO_GROUPS = ModelSpec(n_layer=3, kv_heads=(2, 4, 2))
# of layers that are given one when the model is loaded
WINDOW = 8
# rows of 64 KiB as F32: the update graphs' scratch takes 256 of them at a time
WIDE = ModelSpec(n_layer=1, n_embd=16, n_head=64, n_head_kv=64, head_dim=256, n_ff=32)


def write_model(spec: ModelSpec, directory: Path) -> Path:
    """Writes the model, or finds it where an earlier call left it."""
    path = directory / f"{spec}.gguf"
    if not path.exists():
        if spec.weights == WeightType.Q4_K:
            source = write_model(replace(spec, weights=WeightType.F32), directory)
            quantize_by_libllama(source, path, "LLAMA_FTYPE_MOSTLY_Q4_K_S", pure=True)
        else:
            write_gguf(spec, path)
    return path


def write_split(spec: ModelSpec, directory: Path, most_tensors: int = 5) -> list[Path]:
    """The model in files of at most so many tensors; the last one has what is left."""
    write_gguf(spec, directory / f"{spec}.gguf", most_tensors)
    return sorted(directory.glob(f"{spec}-*-of-*.gguf"))


def write_gguf(spec: ModelSpec, path: Path, most_tensors: int = 0) -> None:
    writer = gguf.GGUFWriter(path, spec.arch, split_max_tensors=most_tensors)
    add_metadata(writer, spec)
    add_vocabulary(writer)
    add_tensors(writer, random_tensors(spec), spec.weights)
    write_out(writer)


def add_tensors(
    writer: gguf.GGUFWriter, tensors: Mapping[str, npt.NDArray[np.float32]], weights: WeightType
) -> None:
    """Matrices in the type of the weights; norms and frequency factors, of one dimension, as they are."""
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, weights), raw_dtype=weights)


def write_out(writer: gguf.GGUFWriter) -> None:
    """Writes the file, and closes it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: gguf.GGUFWriter, spec: ModelSpec) -> None:
    writer.add_block_count(spec.n_layer)
    writer.add_context_length(4096)
    writer.add_embedding_length(spec.n_embd)
    writer.add_feed_forward_length([spec.n_ff] * spec.n_layer if spec.kv_heads else spec.n_ff)
    writer.add_head_count([spec.n_head] * spec.n_layer if spec.kv_heads else spec.n_head)
    writer.add_head_count_kv(list(spec.kv_heads) or spec.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(spec.k_dim)
    writer.add_rope_freq_base(spec.rope_base)
    writer.add_vocab_size(N_VOCAB)
    if spec.head_dim:
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.v_dim)
    if spec.rope_scale != 1:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(spec.rope_scale)


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """A SentencePiece vocabulary: control tokens, every byte, letters, two merges."""
    kinds = gguf.TokenType
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(N_BYTE_TOKENS)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *byte_tokens, *WORDS])
    writer.add_token_scores([0.0] * (3 + N_BYTE_TOKENS) + [-float(i + 1) for i in range(len(WORDS))])
    writer.add_token_types(
        [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
        + [kinds.BYTE] * N_BYTE_TOKENS
        + [kinds.NORMAL] * len(WORDS)
    )
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def random_tensors(spec: ModelSpec) -> dict[str, npt.NDArray[np.float32]]:
    """Weights by GGUF name, shaped (rows, columns); attention is peaked and logits are lively."""
    rng = np.random.default_rng(spec.seed)
    q_rows = spec.n_head * spec.k_dim
    out_columns = spec.n_head * spec.v_dim

    def matrix(rows: int, columns: int, gain: float) -> npt.NDArray[np.float32]:
        weights = rng.standard_normal((rows, columns), dtype=np.float32)
        weights *= gain / np.sqrt(columns)  # in place, where NumPy can't make it float64
        return weights

    def norm() -> npt.NDArray[np.float32]:
        weights = bias(spec.n_embd)
        weights += 1
        return weights

    def bias(n: int) -> npt.NDArray[np.float32]:
        weights = rng.standard_normal(n, dtype=np.float32)
        weights *= 0.1
        return weights

    # a small embedding: else a tied model's logits are little more than the last token's own
    tensors = {"token_embd.weight": matrix(N_VOCAB, spec.n_embd, 2.0)}
    for layer in range(spec.n_layer):
        k_rows = spec.heads_of(layer) * spec.k_dim
        v_rows = spec.heads_of(layer) * spec.v_dim
        tensors |= {
            f"blk.{layer}.attn_norm.weight": norm(),
            f"blk.{layer}.attn_q.weight": matrix(q_rows, spec.n_embd, 1.5),
            f"blk.{layer}.attn_k.weight": matrix(k_rows, spec.n_embd, 1.5),
            f"blk.{layer}.attn_v.weight": matrix(v_rows, spec.n_embd, 1.0),
            f"blk.{layer}.attn_output.weight": matrix(spec.n_embd, out_columns, 1.0),
            f"blk.{layer}.ffn_norm.weight": norm(),
            f"blk.{layer}.ffn_gate.weight": matrix(spec.n_ff, spec.n_embd, 1.0),
            f"blk.{layer}.ffn_up.weight": matrix(spec.n_ff, spec.n_embd, 1.0),
            f"blk.{layer}.ffn_down.weight": matrix(spec.n_embd, spec.n_ff, 1.0),
        }
        by_head = tensors[f"blk.{layer}.attn_k.weight"].reshape(spec.heads_of(layer), spec.k_dim, -1)
        by_head[:, :2] *= spec.outliers
        if spec.biases:
            tensors |= {
                f"blk.{layer}.attn_q.bias": bias(q_rows),
                f"blk.{layer}.attn_k.bias": bias(k_rows),
                f"blk.{layer}.attn_v.bias": bias(v_rows),
                f"blk.{layer}.attn_output.bias": bias(spec.n_embd),
                f"blk.{layer}.ffn_gate.bias": bias(spec.n_ff),
                f"blk.{layer}.ffn_up.bias": bias(spec.n_ff),
                f"blk.{layer}.ffn_down.bias": bias(spec.n_embd),
            }
    tensors["output_norm.weight"] = norm()
    if not spec.tied:
        tensors["output.weight"] = matrix(N_VOCAB, spec.n_embd, 3.0)
    if spec.rope_factors:
        # as Llama 3.1 does: fast dimensions as they are, slow ones up to eight times slower
        tensors["rope_freqs.weight"] = np.linspace(1, 8, spec.k_dim // 2, dtype=np.float32)
    return tensors


def quantize_by_libllama(source: Path, target: Path, kind: str, *, pure: bool) -> None:
    """By libllama itself: the gguf package reads K-quants but doesn't write them.

    kind: a name of libllama's. pure: one type for all matrices; else the mix that people have.
    """
    from llama_cpp import llama_cpp as ll

    params = ll.llama_model_quantize_default_params()
    params.nthread = 1
    params.ftype = getattr(ll, kind)
    params.pure = pure
    status = ll.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if status != 0:
        raise RuntimeError(f"libllama could not quantize {source} (status {status})")
