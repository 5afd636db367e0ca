"""Compares a GGUF with its checkpoint in libllama: `python training/check.py DIR/checkpoint.pt FILE.gguf`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from corpus import JUNK, PREFIX, Corpus
from dialogues import DialogueCorpus
from evaluate import spell
from model import Llama
from recipes import RECIPES
from tokenizer import BOS, EOS, Tokenizer
from train import load_model
from views import Cache, Run, stack

from pykvgraph.bench.libllama import LibllamaContext, LibllamaModel, on_cpu
from pykvgraph.chat.chat_template import ChatTemplate
from pykvgraph.params.params import ContextParams

N_DOCUMENTS = 100
LARGEST_NMSE = 1e-5
ODD_TEXTS = ["a", "  two  spaces ", "yellow.blue go. 12ab34", "w\u00f6rld \u65e5\n\t\U0001f389", "<s> </s>"]


def count_differences(reference: LibllamaModel, tokenizer: Tokenizer, texts: list[str]) -> int:
    """Texts that the two tokenizers split differently."""
    return sum(reference.encode(text) != tokenizer.encode(text, start=True) for text in texts)


def texts_of(tokenizer: Tokenizer) -> list[str]:
    """What the passkey model reads."""
    corpus = Corpus(tokenizer, np.random.default_rng(0))
    texts = [tokenizer.decode(corpus.draw(200).ids).lstrip() for _ in range(N_DOCUMENTS)]
    return [*texts, PREFIX + JUNK * 3]


def count_chat_differences(reference: LibllamaModel, tokenizer: Tokenizer, template: str) -> int:
    """Dialogues that the template and libllama's tokenizer make other tokens of than the corpus did."""
    jinja = ChatTemplate(template, eos_token="</s>")
    corpus = DialogueCorpus(tokenizer, np.random.default_rng(0))
    n_different = 0
    for _ in range(N_DOCUMENTS):
        ids = corpus.draw([200])[0].ids
        ids = ids[ids[0] == BOS : len(ids) - ids[::-1].index(EOS)]  # whole turns
        text = jinja.render(messages_of(tokenizer, ids), add_generation_prompt=False)
        n_different += reference.encode(text, parse_special=True) != [BOS, *ids]
    return n_different


def messages_of(tokenizer: Tokenizer, ids: list[int]) -> list[dict[str, str]]:
    messages = []
    while ids:
        end = ids.index(EOS)
        role = tokenizer.control[ids[0]].strip("<|>")
        messages.append({"role": role, "content": tokenizer.decode(ids[1:end])})
        ids = ids[end + 1 :]
    return messages


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
    name, model = load_model(arguments.checkpoint)
    template, tokenizer = RECIPES[name].chat_template, RECIPES[name].build_tokenizer()
    params = ContextParams(n_ctx=512, n_threads=1, type_k="f32", type_v="f32")
    with on_cpu(arguments.gguf, params) as (their_model, their_context):
        n_different = count_differences(their_model, tokenizer, ODD_TEXTS)
        if template is None:
            n_different += count_differences(their_model, tokenizer, texts_of(tokenizer))
            prompt, answer = spell(tokenizer, Run(n_junk=8, i_pos=4), key=40312)
            ids = prompt + answer
        else:
            n_different += count_chat_differences(their_model, tokenizer, template)
            ids = DialogueCorpus(tokenizer, np.random.default_rng(1)).draw([200])[0].ids
        error = nmse(their_context, model, ids)
    print(f"texts split differently: {n_different}; NMSE of {len(ids)} logits: {error:.1e}")
    sys.exit(n_different > 0 or error > LARGEST_NMSE)


if __name__ == "__main__":
    main()
