"""Writes a checkpoint as GGUF: `python training/export.py CHECKPOINT pykvgraph/models/NAME.gguf`."""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from model import Llama
from recipes import RECIPES
from tokenizer import BOS, EOS, UNK, Tokenizer
from train import load_model

N_CTX_TRAIN = 4096


def write_gguf(name: str, model: Llama, path: Path) -> None:
    """Matrices as F16, norms as F32; the embedding is also the output matrix (no `output.weight`).

    `rope_freqs.weight` is by how much each pair turns more slowly than the usual frequency.
    """
    writer = gguf.GGUFWriter(path, "llama")
    recipe = RECIPES[name]
    writer.add_name(name)
    writer.add_description(recipe.description)
    writer.add_license("mit")
    _add_shape(writer, model)
    _add_tokenizer(writer, recipe.build_tokenizer())
    if recipe.chat_template is not None:
        writer.add_chat_template(recipe.chat_template)
    usual = model.shape.rope_base ** -(np.arange(0, model.shape.head_dim, 2) / model.shape.head_dim)
    writer.add_tensor(
        "rope_freqs.weight", (usual / model.shape.rope_frequencies().numpy()).astype(np.float32)
    )
    for name, weight in model.state_dict().items():
        if name.startswith("subject"):  # only training asks for it
            continue
        values = weight.numpy()
        writer.add_tensor(name, values.astype(np.float16 if values.ndim == 2 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, model: Llama) -> None:
    shape = model.shape
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    normal, byte = gguf.TokenType.NORMAL, gguf.TokenType.BYTE
    types = [byte if tokenizer.is_byte(i) else normal for i in range(len(tokenizer))]
    types[UNK] = gguf.TokenType.UNKNOWN
    types[BOS : len(tokenizer.control)] = [gguf.TokenType.CONTROL] * (len(tokenizer.control) - BOS)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokenizer.pieces)
    writer.add_token_scores(tokenizer.scores())
    writer.add_token_types(types)
    writer.add_unk_token_id(UNK)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(tokenizer.space_prefix)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("gguf", type=Path)
    arguments = parser.parse_args()
    name, model = load_model(arguments.checkpoint)
    write_gguf(name, model, arguments.gguf)
    print(f"{arguments.gguf}: {arguments.gguf.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
