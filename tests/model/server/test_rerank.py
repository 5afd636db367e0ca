"""/rerank: llama-server's order and scores, in Jina's form and in TEI's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.architectures import ArchSpec
from support.embedder import break_classifier
from support.gguf_bytes import STRING
from support.gguf_parts import take_apart
from support.hostile_requests import ODD
from support.served import llama_server, served
from support.vocabularies import of_kind

import pykvgraph as kvg
from pykvgraph.server.run import Server, listen
from pykvgraph.server.settings import Settings

Architecture = Callable[[ArchSpec], Path]
BERT = ArchSpec("bert", head_dim=16, n_head_kv=4, pooling=4, n_classes=1)
QWEN = ArchSpec("qwen3", pooling=4, n_classes=2)
QUERY = "the cat"
DOCUMENTS = ["hello there cat", "a", "the cat sat on the cat", "cat", "hello there cat " * 9]
MOST = 1e-4  # between scores
F32 = ("-ctk", "f32", "-ctv", "f32", "-fa", "off")
PATHS = ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking")
FORMS = {"documents": "relevance_score", "texts": "score"}


def loaded(path: Path) -> Callable[[], kvg.Engine]:
    """With K and V in F32, as llama-server has them in encoders without flash attention."""
    types: dict[str, Any] = {"type_k": "f32", "type_v": "f32"}
    return lambda: kvg.Engine(kvg.Model(path, device="cpu"), n_ctx=512, n_seq_max=4, **types)


@pytest.fixture
def bert(architecture: Architecture, tmp_path: Path) -> Path:
    path = tmp_path / "bert.gguf"
    of_kind(take_apart(architecture(BERT).read_bytes()), b"bert").raw().write(path)
    return path


@pytest.fixture
def qwen(architecture: Architecture, tmp_path: Path) -> Path:
    """With the prompt of its own that rerankers of this kind have."""
    path = tmp_path / "qwen.gguf"
    parts = take_apart(architecture(QWEN).read_bytes())
    parts.set("tokenizer.chat_template.rerank", STRING, b"a {query} the {document} cat")
    parts.raw().write(path)
    return path


@pytest.fixture
def client(bert: Path) -> Iterator[httpx.Client]:
    with served(loaded(bert), aliases=("tiny",)) as (url, _), httpx.Client(base_url=url) as client:
        yield client


def told(reply: httpx.Response, form: str) -> list[tuple[int, float]]:
    """The documents and their scores, in the order of the answer."""
    assert reply.status_code == 200, reply.text
    body = reply.json()
    return [(each["index"], each[FORMS[form]]) for each in (body["results"] if form == "documents" else body)]


@pytest.mark.parametrize("kind", ["bert", "qwen"])
def test_order_and_scores_are_llama_servers(kind: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(kind)
    arguments = ("-c", "512", "-np", "1", "-b", "512", "-ub", "512", "--reranking", "-a", "tiny", *F32)
    with (
        llama_server(path, *arguments) as url,
        served(loaded(path), pooling="rank", aliases=("tiny",)) as (own, _),
    ):
        for form in FORMS:
            asked = {"query": QUERY, form: DOCUMENTS}
            replies = [httpx.post(f"{each}/v1/rerank", json=asked, timeout=30) for each in (own, url)]
            ours, theirs = (told(reply, form) for reply in replies)
            assert [index for index, _ in ours] == [index for index, _ in theirs]
            for (_, mine), (_, other) in zip(ours, theirs, strict=True):
                assert mine == pytest.approx(other, abs=MOST)
            assert len({round(score, 4) for _, score in theirs}) == len(DOCUMENTS)
            if form == "documents":
                bodies = [reply.json() for reply in replies]
                assert {**bodies[0], "results": 0} == {**bodies[1], "results": 0}
        for body in WRONG:
            statuses = [httpx.post(f"{each}/rerank", json=body).status_code for each in (own, url)]
            assert statuses == [400, 400], body
        for path_of in ("/embeddings", "/v1/embeddings"):  # llama-server's newer versions do so, too
            refused = httpx.post(f"{own}{path_of}", json={"input": "cat"})
            assert refused.status_code == 400 and "rerank" in refused.json()["error"]["message"]


WRONG: list[dict[str, Any]] = [
    {"documents": ["cat"]},
    {"query": 7, "documents": ["cat"]},
    {"query": QUERY},
    {"query": QUERY, "documents": []},
    {"query": QUERY, "documents": None},
    {"query": QUERY, "documents": 123},
    {"query": QUERY, "documents": [1, 2, 3]},
    {"query": QUERY, "texts": "cat"},
]


def test_by_every_name_and_with_the_files_own_pooling(client: httpx.Client) -> None:
    asked = {"query": QUERY, "documents": DOCUMENTS}
    first = client.post(PATHS[0], json=asked).json()
    assert first["model"] == "tiny" and first["object"] == "list"
    scores = [each["relevance_score"] for each in first["results"]]
    assert scores == sorted(scores, reverse=True) and len(scores) == len(DOCUMENTS)
    assert all(client.post(path, json=asked).json() == first for path in PATHS[1:])


def test_the_best_ones_and_their_texts(client: httpx.Client) -> None:
    for form in FORMS:
        whole = told(client.post("/rerank", json={"query": QUERY, form: DOCUMENTS}), form)
        for n in (1, 2, 99):
            some = client.post("/rerank", json={"query": QUERY, form: DOCUMENTS, "top_n": n})
            assert told(some, form) == whole[:n]
        assert client.post("/rerank", json={"query": QUERY, form: DOCUMENTS, "top_n": 0}).status_code == 400
    of_tei = client.post("/rerank", json={"query": QUERY, "texts": DOCUMENTS, "return_text": True}).json()
    assert all(each["text"] == DOCUMENTS[each["index"]] for each in of_tei)
    asked = {"query": QUERY, "documents": DOCUMENTS, "return_documents": True}
    results = client.post("/rerank", json=asked).json()["results"]
    assert all(each["document"]["text"] == DOCUMENTS[each["index"]] for each in results)


def test_many_documents_and_long_ones(client: httpx.Client) -> None:
    documents = [" ".join(["cat"] * (1 + i % 20)) for i in range(60)]
    results = told(client.post("/rerank", json={"query": QUERY, "documents": documents}), "documents")
    assert sorted(index for index, _ in results) == list(range(60))
    alone = client.post("/rerank", json={"query": QUERY, "documents": documents[7:8]})
    assert dict(results)[7] == pytest.approx(told(alone, "documents")[0][1], abs=MOST)
    refused = client.post("/rerank", json={"query": QUERY, "documents": ["cat " * 600]})
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "exceed_context_size_error"
    refused = client.post("/rerank", json={"query": QUERY, "documents": ["cat"] * 2049})
    assert refused.status_code == 400 and "--max-prompts" in refused.text


def test_a_text_that_one_decode_has_no_room_for(bert: Path) -> None:
    """An encoder's has n_batch tokens at most. The others' scores are not told."""

    def load() -> kvg.Engine:
        return kvg.Engine(kvg.Model(bert, device="cpu"), n_ctx=512, n_batch=32)

    long = "cat " * 40
    with served(load) as (url, _):
        refused = httpx.post(f"{url}/rerank", json={"query": QUERY, "documents": ["a"] * 20 + [long]})
    with served(load, pooling="mean") as (url, _):
        embedded = httpx.post(f"{url}/v1/embeddings", json={"input": ["a"] * 20 + [long]})
    for reply in (refused, embedded):
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["type"] == "exceed_context_size_error"
        assert error["n_ctx"] == 32 and "-b" in error["message"]


def test_hostile_bodies(client: httpx.Client) -> None:
    """Each part of a body replaced by each odd thing."""
    body = {"query": QUERY, "documents": ["cat", "a"], "top_n": 2, "return_documents": True, "model": "a"}
    before = client.post("/rerank", json=body).json()
    codes = set[int]()
    for name in (*body, "texts", "lora", "return_text"):
        for odd in ODD:
            reply = client.post("/rerank", content=json.dumps({**body, name: odd}))
            codes.add(reply.status_code)
            told = reply.json()
            assert "results" in told or isinstance(told, list) or isinstance(told["error"]["message"], str)
    assert codes == {200, 400}
    assert client.post("/rerank", json=body).json() == before


def test_scores_that_are_no_numbers_are_not_told(bert: Path) -> None:
    break_classifier(bert)
    with served(loaded(bert)) as (url, _):
        reply = httpx.post(f"{url}/rerank", json={"query": QUERY, "documents": DOCUMENTS})
    assert reply.status_code == 500 and "weights are broken" in reply.json()["error"]["message"]


def test_a_pooling_that_is_no_number(qwen: Path) -> None:
    parts = take_apart(qwen.read_bytes())
    parts.set("qwen3.pooling_type", STRING, b"rank")
    parts.raw().write(qwen)
    with served(loaded(qwen)) as (url, _):
        reply = httpx.post(f"{url}/rerank", json={"query": QUERY, "documents": DOCUMENTS})
        assert reply.status_code == 501 and "--reranking" in reply.text
    with (
        kvg.Llama(str(qwen), embedding=True, n_gpu_layers=0, verbose=False) as llama,
        pytest.raises(kvg.UnsupportedError, match="pooling_type: the file's is no number"),
    ):
        llama.embed("cat")


def test_a_server_that_embeds(bert: Path) -> None:
    with served(loaded(bert), pooling="mean") as (url, _):
        assert httpx.post(f"{url}/v1/embeddings", json={"input": "cat"}).status_code == 200
        refused = httpx.post(f"{url}/rerank", json={"query": QUERY, "documents": DOCUMENTS})
        assert refused.status_code == 501 and "--reranking" in refused.text


def test_a_model_that_is_no_reranker(architecture: Architecture, tmp_path: Path) -> None:
    path = tmp_path / "plain.gguf"
    plain = ArchSpec("bert", head_dim=16, n_head_kv=4, pooling=2)
    of_kind(take_apart(architecture(plain).read_bytes()), b"bert").raw().write(path)
    server = Server(Settings(pooling="rank"), loaded(path))
    with listen("127.0.0.1", 0) as listener, pytest.raises(kvg.UnsupportedError, match="no reranker"):
        server.run(sockets=[listener])
