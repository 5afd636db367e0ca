"""Compares a GGUF with its checkpoint in libllama: `python training/check.py DIR/checkpoint.pt FILE.gguf`."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt
import torch
from corpus import JUNK, PREFIX, Corpus, build_tokenizer
from evaluate import spell
from model import Llama
from tokenizer import Tokenizer
from train import load_model
from views import Cache, Run, stack

N_DOCUMENTS = 100
LARGEST_NMSE = 1e-5
ODD_TEXTS = ["a", "  two  spaces ", "yellow.blue go. 12ab34", "w\u00f6rld \u65e5\n\t\U0001f389", "<s> </s>"]


class Reference:
    """The file in libllama, with plain CPU buffers, one thread, and the cache in F32."""

    def __init__(self, path: Path, n_ctx: int) -> None:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = False
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = n_ctx
        settings.n_threads = settings.n_threads_batch = 1
        settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
        self.context = llama_cpp.llama_init_from_model(self.model, settings)

    def encode(self, text: str) -> list[int]:
        raw = text.encode()
        ids = (llama_cpp.llama_token * (len(raw) + 8))()
        n = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), ids, len(ids), True, False)
        return list(ids[:n])

    def logits(self, ids: list[int], n_vocab: int) -> npt.NDArray[np.float32]:
        """(len(ids), n_vocab)"""
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, True
            batch.seq_id[i][0] = 0
        if llama_cpp.llama_decode(self.context, batch) != 0:
            raise RuntimeError("libllama could not decode the prompt")
        rows = [llama_cpp.llama_get_logits_ith(self.context, i) for i in range(len(ids))]
        return np.stack([np.ctypeslib.as_array(row, (n_vocab,)).copy() for row in rows])


def count_differences(reference: Reference, tokenizer: Tokenizer) -> int:
    """Texts that the two tokenizers split differently."""
    corpus = Corpus(tokenizer, np.random.default_rng(0))
    texts = [tokenizer.decode(corpus.draw(200).ids).lstrip() for _ in range(N_DOCUMENTS)]
    texts += [PREFIX + JUNK * 3, *ODD_TEXTS]
    return sum(reference.encode(text) != tokenizer.encode(text, start=True) for text in texts)


@torch.no_grad()
def nmse(reference: Reference, model: Llama, ids: list[int]) -> float:
    cache = Cache()
    cache.decode(len(ids))
    ours = model.logits(model(torch.tensor([ids]), stack([cache])))[0].numpy()
    theirs = reference.logits(ids, model.shape.n_vocab)
    return float(((ours - theirs) ** 2).sum() / (ours**2).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("gguf", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL + 1)  # libllama has much to say
    tokenizer, model = build_tokenizer(), load_model(arguments.checkpoint)
    prompt, answer = spell(tokenizer, Run(n_junk=8, i_pos=4), key=40312)
    reference = Reference(arguments.gguf, n_ctx=512)
    n_different = count_differences(reference, tokenizer)
    error = nmse(reference, model, prompt + answer)
    print(f"texts split differently: {n_different}; NMSE of {len(prompt + answer)} logits: {error:.1e}")
    sys.exit(n_different > 0 or error > LARGEST_NMSE)


if __name__ == "__main__":
    main()
