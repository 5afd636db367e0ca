"""MiniLM-L6, the sentence encoder, as a GGUF file: of its published weights and word list, in F32.

python tools/minilm_gguf.py WEIGHTS.safetensors VOCAB.txt OUT.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
from gguf.utility import SafetensorsLocal

# which published files have beside the layers, and sentences don't use
UNUSED = ("embeddings.position_ids", "pooler.")
# of the model; its package's config.json says the same
N_LAYER, N_EMBD, N_FF, N_HEAD, N_CTX, N_TYPES, EPSILON = 6, 384, 1536, 12, 512, 2, 1e-12
SPECIAL = {"[PAD]": "pad", "[UNK]": "unk", "[CLS]": "bos", "[SEP]": "sep", "[MASK]": "mask"}
WORD = "\u2581"  # begins a word in a GGUF's word list; in a published one, "##" begins what goes on


def write_minilm(weights: Path, vocabulary: Path, path: Path) -> None:
    """The file has its name only when it is whole. Raises ValueError for a tensor that BERT hasn't."""
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "bert")
    writer.add_name("all-MiniLM-L6-v2")
    writer.add_block_count(N_LAYER)
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_layer_norm_eps(EPSILON)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    add_words(writer, vocabulary.read_text(encoding="utf-8").splitlines())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, N_LAYER)
    for name, tensor in SafetensorsLocal(weights).tensors.items():
        if name.startswith(UNUSED):
            continue
        known = names.get_name(name, (".weight", ".bias"))
        if known is None or tensor.dtype != "F32":
            raise ValueError(f"{weights} has a tensor {name} in {tensor.dtype}, which BERT in F32 hasn't")
        values = np.frombuffer(tensor.mmap_bytes(), np.float32).reshape(tensor.shape)
        writer.add_tensor(known, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(path)


def add_words(writer: gguf.GGUFWriter, words: list[str]) -> None:
    """WordPiece: words, and what goes on with one."""
    kinds = [gguf.TokenType.CONTROL if word in SPECIAL else gguf.TokenType.NORMAL for word in words]
    writer.add_token_type_count(N_TYPES)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([word if word in SPECIAL else _told(word) for word in words])
    writer.add_token_types(kinds)
    for word, name in SPECIAL.items():
        getattr(writer, f"add_{name}_token_id")(words.index(word))


def _told(word: str) -> str:
    return word.removeprefix("##") if word.startswith("##") else WORD + word


if __name__ == "__main__":
    write_minilm(*map(Path, sys.argv[1:4]))
