"""An engine, a Llama and a server of an encoder: vectors of many texts, and no text."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.architectures import ArchSpec
from support.embedder import cosine, vectors_by_libllama
from support.engines import random_ids
from support.gguf_parts import take_apart
from support.models import N_VOCAB
from support.served import served
from support.vocabularies import of_kind

import pykvgraph as kvg
from pykvgraph.chat import Conversation

Architecture = Callable[[ArchSpec], Path]
BERT = ArchSpec("bert", head_dim=16, n_head_kv=4, pooling=2)
EMBEDDERS = [BERT, ArchSpec("gemma-embedding", window=24, pooling=1), ArchSpec("qwen3", pooling=3)]
WORDS = ["the cat sat", "a", "hello there cat " * 9, "cat"]


@pytest.fixture
def words(architecture: Architecture, tmp_path: Path) -> Path:
    """BERT with the vocabulary of its kind, WordPiece."""
    path = tmp_path / "bert.gguf"
    of_kind(take_apart(architecture(BERT).read_bytes()), b"bert").raw().write(path)
    return path


def test_many_texts_in_few_batches(architecture: Architecture) -> None:
    texts = [random_ids(n, N_VOCAB, seed=n) for n in (20, 3, 30, 32, 1, 1, 1, 1, 9)]
    path = architecture(BERT)
    with (
        kvg.Model(path, device="cpu") as model,
        kvg.Engine(model, n_ctx=64, n_batch=32, n_seq_max=4, background=False) as engine,
    ):
        found = engine.embed_all(texts, "first")
        theirs = vectors_by_libllama(path, texts)
        assert all(cosine(a, b) > 1 - 1e-6 for a, b in zip(found, theirs, strict=True))
        assert np.allclose(engine.embed(texts[2], "first"), found[2], atol=1e-4)
        assert engine.embed_all([]) == []
        for wrong in (None, 7, "a text"):
            with pytest.raises(kvg.InvalidArgumentError, match="list of prompts"):
                engine.embed_all(wrong)  # type: ignore[arg-type]
        with pytest.raises(kvg.InvalidArgumentError, match=r"text 1 has 33 tokens.*n_batch"):
            engine.embed_all([[1], [1] * 33])
        with pytest.raises(kvg.UnsupportedError, match="encoder"):
            engine.submit([1, 2])


def test_nobody_talks_with_an_encoder(words: Path) -> None:
    """And hears so at once, not with the first message."""
    with (
        kvg.Model(words, device="cpu") as model,
        kvg.Context(model, n_ctx=64) as ctx,
        pytest.raises(kvg.UnsupportedError, match="encoder"),
    ):
        Conversation(ctx)


def test_an_encoder_drafts_nothing(architecture: Architecture) -> None:
    plain = ArchSpec("qwen3", pooling=3)
    with (
        kvg.Model(architecture(plain), device="cpu") as model,
        kvg.Model(architecture(BERT), device="cpu") as encoder,
        pytest.raises(kvg.UnsupportedError, match="encoder"),
    ):
        kvg.Engine(model, n_ctx=64, draft=encoder)


@pytest.mark.parametrize("spec", EMBEDDERS, ids=str)
def test_llamas_embed(architecture: Architecture, spec: ArchSpec) -> None:
    """Vectors and counts are llama-cpp-python's, pooled as the file says."""
    llama_cpp: Any = importlib.import_module("llama_cpp")
    path = str(architecture(spec))
    theirs = llama_cpp.Llama(path, embedding=True, n_gpu_layers=0, verbose=False)
    with kvg.Llama(path, embedding=True, n_batch=128) as ours:
        assert ours.pooling_type() == spec.pooling
        vectors, n_tokens = ours.embed(WORDS, return_count=True)
        assert n_tokens == sum(len(theirs.tokenize(text.encode())) for text in WORDS)
        for text, vector in zip(WORDS, vectors, strict=True):
            assert cosine(np.array(vector), np.array(theirs.embed(text))) > 1 - 1e-6
        told = ours.create_embedding(WORDS[:2])
        assert np.allclose([each["embedding"] for each in told["data"]], vectors[:2], atol=1e-4)
        unit = np.linalg.norm(ours.embed("cat", normalize=True))
        assert unit == pytest.approx(1, abs=1e-6)
        assert len(ours.embed("cat " * 500)) == 64  # cut
        with pytest.raises(kvg.InvalidArgumentError, match="exceeds 128"):
            ours.embed("cat " * 500, truncate=False)
        if spec.arch != "qwen3":
            with pytest.raises(kvg.UnsupportedError, match="encoder"):
                ours("cat")
    theirs.close()


def test_the_server(words: Path) -> None:
    """/v1/embeddings without --embeddings, as there is nothing else; what WordPiece puts around texts."""

    def load() -> kvg.Engine:
        return kvg.Engine(kvg.Model(words, device="cpu"), n_ctx=256, n_seq_max=4)

    with served(load, n_ctx_slot=256) as (url, _), kvg.Llama(str(words), embedding=True) as llama:
        told = httpx.post(f"{url}/v1/embeddings", json={"input": WORDS}).json()
        expected = llama.embed(WORDS, normalize=True)
        assert np.allclose([each["embedding"] for each in told["data"]], expected, atol=1e-4)
        assert told["usage"]["prompt_tokens"] == sum(len(llama.tokenize(text.encode())) for text in WORDS)
        for path, body in [
            ("/completion", {"prompt": "cat"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "cat"}]}),
        ]:
            reply = httpx.post(url + path, json=body)
            assert (reply.status_code, reply.json()["error"]["type"]) == (501, "not_supported_error")
            assert "/v1/embeddings" in reply.json()["error"]["message"]
