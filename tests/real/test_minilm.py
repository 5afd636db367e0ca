"""A published sentence encoder: its GGUF's vectors beside those of the weights that it was made of."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import real
from support.embedder import cosine, vectors_by_libllama
from support.minilm import MiniLm

import pykvgraph as kvg

EXAMPLE = Path(__file__).parents[2] / "examples" / "rag.py"
LEAST = 0.9999  # cosine that people ask for
MOST = 1e-5  # of 1 - cosine: ggml's GELU, and sums in F32
N_SENTENCES = 100


@pytest.fixture(scope="module")
def engine() -> Iterator[kvg.Engine]:
    with (
        kvg.Model(real.MINILM, device="cpu") as model,
        kvg.Engine(model, n_ctx=2048, n_batch=2048, n_seq_max=16, background=False) as engine,
    ):
        yield engine


@pytest.fixture(scope="module")
def original() -> MiniLm:
    return MiniLm(real.MINILM_WEIGHTS, real.MINILM_WORDS)


def sentences() -> list[str]:
    """The first of each of the first articles."""
    return [article.partition(". ")[0] + "." for article in real.articles()[:N_SENTENCES]]


def test_vectors_are_the_originals(engine: kvg.Engine, original: MiniLm) -> None:
    texts = sentences()
    encode = engine.model.tokenizer.encode
    ids = [encode(text) for text in texts]
    assert ids == [original.tokens(text) for text in texts]
    ours = engine.embed_all(ids, "mean")
    originals = [original.vector(text).astype(np.float32) for text in texts]
    worst = min(cosine(a, b) for a, b in zip(ours, originals, strict=True))
    assert worst >= max(LEAST, 1 - MOST)
    theirs = vectors_by_libllama(real.MINILM, ids[:16])
    assert min(cosine(a, b) for a, b in zip(ours, theirs, strict=False)) >= 1 - MOST


def test_the_nearest_article(engine: kvg.Engine) -> None:
    """Which sentence a question is about."""
    texts = sentences()
    vectors = np.stack(engine.embed_all(texts, "mean"))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    asked = {"Where did hundreds of people leave their homes because of fire?": "homes", "cricket": "Test"}
    for question, word in asked.items():
        nearest = texts[int((vectors @ engine.embed(question, "mean")).argmax())]
        assert word in nearest, nearest


def test_an_answer_by_the_news(tmp_path: Path) -> None:
    """The example: documents are found for a question, and a chat model answers by them."""
    command = [sys.executable, str(EXAMPLE), "-m", str(real.SMOLLM2), "-e", str(real.MINILM), "-ngl", "0"]
    few = tmp_path / "news.txt"
    few.write_text("\n".join(real.articles()[:30]), encoding="utf-8")
    command += ["-f", str(few), "-k", "1", "-n", "16", "Which highway did the bushfire near Hill Top close?"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert said.returncode == 0, said.stderr
    assert "Hundreds of people" in said.stderr and len(said.stdout.strip()) > 5
