"""Answers a question by documents: an encoder finds them, a reranker may order them, a chat model answers.

    make real   # SmolLM2, MiniLM and 300 news articles
    cd build/real && python ../../examples/rag.py -m smollm2.gguf -e minilm.gguf -f news.txt QUESTION

With -r, a reranker's GGUF, four times as many documents are looked for, and the reranker takes the best.
What the prompt begins with stays in the cache: a second question decodes only what is new.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np

import pykvgraph as kvg

ASKED = "Answer the question by these documents alone.\n\n{documents}\n\nQuestion: {question}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Answers questions by documents.")
    parser.add_argument("-m", metavar="MODEL", required=True, help="a GGUF file that chats")
    parser.add_argument("-e", metavar="ENCODER", required=True, help="a GGUF file that embeds")
    parser.add_argument("-r", metavar="RERANKER", help="a GGUF file that reranks")
    parser.add_argument("-f", metavar="FILE", required=True, help="a text file: a document in each line")
    parser.add_argument("-k", type=int, default=3, help="documents that the model reads (default: 3)")
    parser.add_argument("-n", type=int, default=128, help="most tokens of an answer (default: 128)")
    parser.add_argument("-ngl", type=int, default=-1, help="layers on devices (default: all)")
    parser.add_argument("questions", nargs="+", metavar="QUESTION")
    args = parser.parse_args()
    documents = [line for line in Path(args.f).read_text(encoding="utf-8").split("\n") if line.strip()]
    found = nearest(args.e, documents, args.questions, args.k * (4 if args.r else 1), args.ngl)
    if args.r:
        found = reranked(args.r, found, args.questions, args.k, args.ngl)
    with kvg.Llama(args.m, n_ctx=4096, n_gpu_layers=args.ngl) as chat:
        for question, read in zip(args.questions, found, strict=True):
            for document in read:
                print(f"[{document[:100]}]", file=sys.stderr)
            print(answer(chat, question, read, args.n))


def nearest(path: str, documents: list[str], questions: list[str], k: int, ngl: int) -> list[list[str]]:
    """The k documents of each question whose vectors are nearest to its own."""
    with (
        kvg.Model(path, n_gpu_layers=ngl) as model,
        kvg.Engine(model, n_ctx=4096, n_batch=4096, n_seq_max=16) as encoder,
    ):
        most = min(model.n_ctx_train, 4096)
        texts = [model.tokenizer.encode(text)[:most] for text in [*documents, *questions]]
        vectors = np.stack(encoder.embed_all(texts, "mean"))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    alike = vectors[len(documents) :] @ vectors[: len(documents)].T
    return [[documents[i] for i in np.argsort(-row)[:k]] for row in alike]


def reranked(path: str, found: list[list[str]], questions: list[str], k: int, ngl: int) -> list[list[str]]:
    """The k best of each question's documents, as a reranker says."""
    with kvg.Model(path, n_gpu_layers=ngl) as model, kvg.Engine(model, n_ctx=4096, n_batch=4096) as reranker:
        best = []
        for question, documents in zip(questions, found, strict=True):
            scores = reranker.rank(question, documents)
            best.append([documents[i] for i in np.argsort(np.negative(scores))[:k]])
    return best


def answer(chat: kvg.Llama, question: str, documents: list[str], n: int) -> str:
    """By the model's own chat template, if it has one."""
    asked = ASKED.format(documents="\n\n".join(documents), question=question)
    said = chat.create_chat_completion([{"role": "user", "content": asked}], max_tokens=n, temperature=0)
    return str(said["choices"][0]["message"]["content"])


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone: nothing is left to say, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (kvg.KVGraphError, OSError, UnicodeDecodeError) as error:
        sys.exit(f"rag.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
