"""Compares a GGUF with its checkpoint in libllama: `python training/check.py DIR/checkpoint.pt FILE.gguf`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from corpus import JUNK, PREFIX, Corpus, build_tokenizer
from evaluate import spell
from model import Llama
from tokenizer import Tokenizer
from train import load_model
from views import Cache, Run, stack

from pykvgraph.lab.libllama import LibllamaContext, LibllamaModel, on_cpu
from pykvgraph.params import ContextParams

N_DOCUMENTS = 100
LARGEST_NMSE = 1e-5
ODD_TEXTS = ["a", "  two  spaces ", "yellow.blue go. 12ab34", "w\u00f6rld \u65e5\n\t\U0001f389", "<s> </s>"]


def count_differences(reference: LibllamaModel, tokenizer: Tokenizer) -> int:
    """Texts that the two tokenizers split differently."""
    corpus = Corpus(tokenizer, np.random.default_rng(0))
    texts = [tokenizer.decode(corpus.draw(200).ids).lstrip() for _ in range(N_DOCUMENTS)]
    texts += [PREFIX + JUNK * 3, *ODD_TEXTS]
    return sum(reference.encode(text) != tokenizer.encode(text, start=True) for text in texts)


@torch.no_grad()
def nmse(reference: LibllamaContext, model: Llama, ids: list[int]) -> float:
    cache = Cache()
    cache.decode(len(ids))
    ours = model.logits(model(torch.tensor([ids]), stack([cache])))[0].numpy()
    reference.decode((token, pos, (0,), True) for pos, token in enumerate(ids))
    theirs = reference.logits()
    return float(((ours - theirs) ** 2).sum() / (ours**2).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("gguf", type=Path)
    arguments = parser.parse_args()
    tokenizer, model = build_tokenizer(), load_model(arguments.checkpoint)
    prompt, answer = spell(tokenizer, Run(n_junk=8, i_pos=4), key=40312)
    params = ContextParams(n_ctx=512, n_threads=1, type_k="f32", type_v="f32")
    with on_cpu(arguments.gguf, params) as (their_model, their_context):
        n_different = count_differences(their_model, tokenizer)
        error = nmse(their_context, model, prompt + answer)
    print(f"texts split differently: {n_different}; NMSE of {len(prompt + answer)} logits: {error:.1e}")
    sys.exit(n_different > 0 or error > LARGEST_NMSE)


if __name__ == "__main__":
    main()
