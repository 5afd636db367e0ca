"""An engine, a Llama and the verb `rerank`: one order of documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.architectures import ArchSpec
from support.embedder import break_classifier, vectors_by_libllama
from support.gguf_bytes import STRING
from support.gguf_parts import take_apart
from support.vocabularies import of_kind

import pykvgraph as kvg
from pykvgraph.cli import main

Architecture = Callable[[ArchSpec], Path]
BERT = ArchSpec("bert", head_dim=16, n_head_kv=4, pooling=4, n_classes=1)
QUERY = "the cat"
DOCUMENTS = ["hello there cat", "a", "the cat sat", "cat cat cat"]
MOST, ROUNDED = 1e-4, 2e-3  # with K and V in F32, and in F16
F32: dict[str, Any] = {"type_k": "f32", "type_v": "f32"}


@pytest.fixture
def reranker(architecture: Architecture, tmp_path: Path) -> Path:
    path = tmp_path / "bert.gguf"
    of_kind(take_apart(architecture(BERT).read_bytes()), b"bert").raw().write(path)
    return path


def judged(path: Path) -> list[float]:
    """By libllama, of BERT's pairs: begin, query, separator, document."""
    with kvg.Model(path, device="cpu") as model:
        encode = model.tokenizer.encode
        begin, separator = model.metadata["tokenizer.ggml.bos_token_id"], 1
        pairs = [[begin, *encode(QUERY, False), separator, *encode(each, False)] for each in DOCUMENTS]
    return [float(each[0]) for each in vectors_by_libllama(path, pairs)]


def test_engine_and_llama(reranker: Path) -> None:
    expected = pytest.approx(judged(reranker), abs=MOST)
    with (
        kvg.Model(reranker, device="cpu") as model,
        kvg.Engine(model, n_ctx=64, n_batch=32, n_seq_max=2, background=False, **F32) as engine,
    ):
        assert engine.rank(QUERY, DOCUMENTS) == expected
        assert engine.rank(QUERY, []) == []
        for wrong in ("a text", None, 7):
            with pytest.raises(kvg.InvalidArgumentError, match="list of texts"):
                engine.rank(QUERY, wrong)  # type: ignore[arg-type]
        with pytest.raises(kvg.InvalidArgumentError, match="n_batch"):
            engine.rank(QUERY, ["cat " * 40])
    with kvg.Llama(str(reranker), embedding=True, n_gpu_layers=0, verbose=False) as llama:
        assert llama.pooling_type() == 4
        assert llama.rank(QUERY, DOCUMENTS) == pytest.approx(judged(reranker), abs=ROUNDED)
        assert llama.rank(QUERY, []) == []
        with pytest.raises(kvg.UnsupportedError, match="reranker"):
            llama.embed("cat")
    with (
        kvg.Llama(str(reranker), n_gpu_layers=0, verbose=False) as llama,
        pytest.raises(RuntimeError, match="embedding=True"),
    ):
        llama.rank(QUERY, DOCUMENTS)


def test_what_is_no_text_is_refused(architecture: Architecture, tmp_path: Path) -> None:
    """Also where the file has a prompt for pairs. A text that is too long for the cache is told so."""
    path = tmp_path / "qwen.gguf"
    parts = take_apart(architecture(ArchSpec("qwen3", pooling=4, n_classes=2)).read_bytes())
    parts.set("tokenizer.chat_template.rerank", STRING, b"a {query} the {document} cat")
    parts.raw().write(path)
    wrong: list[tuple[Any, Any]] = [(None, ["a"]), (7, ["a"]), (b"a", ["a"]), ("a", [None]), ("a", ["a", 5])]
    with (
        kvg.Model(path, device="cpu") as model,
        kvg.Engine(model, n_ctx=64, n_batch=16, background=False) as engine,
        kvg.Llama(str(path), embedding=True, n_ctx=64, n_gpu_layers=0, verbose=False) as llama,
    ):
        for query, documents in wrong:
            for rank in (engine.rank, llama.rank):
                with pytest.raises(kvg.InvalidArgumentError, match=r"the (query|document) must be a text"):
                    rank(query, documents)
        for documents in (None, 7, "a"):
            with pytest.raises(kvg.InvalidArgumentError, match="documents must be a list of texts"):
                llama.rank(QUERY, documents)  # type: ignore[arg-type]
        with pytest.raises(kvg.CacheFullError, match=r"tokens, and the cache 64 cells: .*n_ctx"):
            engine.rank(QUERY, ["cat " * 60])


def test_scores_that_are_no_numbers(reranker: Path) -> None:
    """They have no order."""
    break_classifier(reranker)
    with (
        kvg.Model(reranker, device="cpu") as model,
        kvg.Engine(model, n_ctx=64, background=False) as engine,
        kvg.Llama(str(reranker), embedding=True, n_gpu_layers=0, verbose=False) as llama,
    ):
        for rank in (engine.rank, llama.rank):
            with pytest.raises(kvg.KVGraphError, match="weights are broken"):
                rank(QUERY, DOCUMENTS)


def test_an_embedder_ranks_nothing(architecture: Architecture) -> None:
    plain = ArchSpec("bert", head_dim=16, n_head_kv=4, pooling=2)
    with (
        kvg.Model(architecture(plain), device="cpu") as model,
        kvg.Engine(model, n_ctx=64, background=False) as engine,
        pytest.raises(kvg.UnsupportedError, match="no reranker"),
    ):
        engine._rank_all([[1, 2]], None, lambda: True)


def test_the_verb(reranker: Path, tmp_path: Path) -> None:
    expected = judged(reranker)
    order = sorted(range(len(expected)), key=lambda i: -expected[i])
    listed = tmp_path / "docs.txt"
    listed.write_text("\n\n".join(DOCUMENTS) + "\n", encoding="utf-8")
    given = ["rerank", "-m", str(reranker), "-ngl", "0", "-q", QUERY]
    result = CliRunner().invoke(main, [*given, "-f", str(listed)])
    assert result.exit_code == 0, result.output
    lines = [line.split(maxsplit=2) for line in result.stdout.splitlines()]
    assert [int(index) for _, index, _ in lines] == order
    assert [text for *_, text in lines] == [DOCUMENTS[i] for i in order]
    told = CliRunner().invoke(main, [*given, "-f", "-", "--json", "--top-n", "2"], input="\n".join(DOCUMENTS))
    found = json.loads(told.stdout)
    assert found["query"] == QUERY
    assert [each["index"] for each in found["results"]] == order[:2]
    assert [each["score"] for each in found["results"]] == pytest.approx(
        [expected[i] for i in order[:2]], abs=ROUNDED
    )
    listed.write_bytes(b"\xff\xfe")
    broken = CliRunner().invoke(main, [*given, "-f", str(listed)])
    assert broken.exit_code == 1 and "UTF-8" in broken.output
