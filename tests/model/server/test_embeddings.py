"""Embeddings: llama-server's vectors, in its form and in OpenAI's."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from support.served import llama_server, served, where_of

import pykvgraph as kvg
from pykvgraph.server.endpoints.embeddings import normalized
from pykvgraph.server.settings import POOLING_NAMES

from .conftest import STORIES, load

TEXTS = ["Once upon a time", "There was a dog. " * 20, [1, 403, 407]]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    settings: dict[str, Any] = {
        "n_ctx_slot": 512,
        "embeddings": True,
        "pooling": "mean",
        "aliases": ("tiny",),
    }
    with served(load, **settings) as (url, _), httpx.Client(base_url=url, timeout=30) as client:
        yield client


def vectors_of(reply: httpx.Response) -> np.ndarray[Any, Any]:
    assert reply.status_code == 200, reply.text
    return np.array([each["embedding"] for each in reply.json()["data"]])


@pytest.mark.parametrize("pooling", [name for name in POOLING_NAMES if name != "rank"])
def test_vectors_are_llama_servers(pooling: str) -> None:
    """Of one text at a time: of several in one body, llama-server's are others for mean and cls (2026-10)."""
    arguments = ("-c", "2048", "-np", "2", "--embeddings", "--pooling", pooling)
    with llama_server(STORIES, *arguments) as url, served(load, embeddings=True, pooling=pooling) as (own, _):
        for norm, text in [(2, TEXTS[0]), (2, TEXTS[1]), (2, TEXTS[2]), *((p, "a") for p in (-1, 0, 1, 3))]:
            asked = {"input": text, "embd_normalize": norm}
            ours, theirs = (httpx.post(f"{each}/embeddings", json=asked).json() for each in (own, url))
            assert [set(each) for each in ours] == [set(each) for each in theirs]
            for mine, other in zip(ours, theirs, strict=True):
                a, b = np.array(mine["embedding"]), np.array(other["embedding"])
                assert a.shape == b.shape
                assert np.abs(a - b).max() <= 2e-3 * np.abs(b).max()
        for path in ("/embedding", "/v1/embeddings"):
            ours, theirs = (httpx.post(f"{each}{path}", json={"input": "a"}) for each in (own, url))
            assert ours.status_code == theirs.status_code
            if ours.status_code == 200 and path.startswith("/v1"):
                assert set(ours.json()) == set(theirs.json())
                assert ours.json()["usage"] == theirs.json()["usage"]


@pytest.mark.client("openai", "embeddings")
def test_openais_form(client: httpx.Client) -> None:
    import openai

    told = client.post("/v1/embeddings", json={"input": TEXTS}).json()
    assert (told["model"], told["object"], len(told["data"])) == ("tiny", "list", 3)
    assert told["usage"]["prompt_tokens"] == told["usage"]["total_tokens"] > 20
    api = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none")
    found = api.embeddings.create(model="tiny", input="Once upon a time")  # asks for base64
    assert np.allclose(found.data[0].embedding, told["data"][0]["embedding"])
    assert np.linalg.norm(found.data[0].embedding) == pytest.approx(1, abs=1e-5)
    raw = client.post("/v1/embeddings", json={"input": "a", "encoding_format": "base64"}).json()["data"][0]
    assert len(base64.b64decode(raw["embedding"])) == 4 * 64


def test_a_text_in_parts(client: httpx.Client) -> None:
    """As llama-server's README has it: the parts are one text."""
    parts = {"content": [{"type": "text", "text": "Once upon "}, {"type": "text", "text": "a time"}]}
    whole, several, alone = (
        vectors_of(client.post("/v1/embeddings", json={"input": given}))
        for given in ("Once upon a time", ["no", parts], parts)
    )
    assert several[1].tolist() == alone[0].tolist() == whole[0].tolist()
    picture = {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}
    for given, code in ((picture, 400), ({"content": "Once"}, 400), ({"content": [{"type": "text"}]}, 400)):
        assert client.post("/v1/embeddings", json={"input": [given]}).status_code == code


def test_a_text_alone_and_beside_others(client: httpx.Client) -> None:
    """While others talk, and again after, vectors are the same; nothing stays in the cache."""
    alone = vectors_of(client.post("/v1/embeddings", json={"input": TEXTS}))
    with client.stream("POST", "/completion", json={"prompt": "a", "n_predict": 300, "stream": True}) as talk:
        beside = vectors_of(client.post("/v1/embeddings", json={"input": TEXTS}))
        assert talk.status_code == 200
    assert np.abs(alone - beside).max() <= 1e-3


def test_what_is_refused(client: httpx.Client, address: str) -> None:
    bad: list[dict[str, Any]] = [
        {},
        {"input": []},
        {"input": 3},
        {"input": [[]]},
        {"input": [1, 2, 99999]},
        {"input": "a", "encoding_format": "int8"},
        {"input": "a", "embd_normalize": -2},
        {"input": "a", "embd_normalize": "big"},
        {"input": "word " * 1000},
        *({"input": "a", "dimensions": bad} for bad in (0, -1, 65, 10**400, "8", True, [8])),
    ]
    for body in bad:
        for path in ("/embedding", "/embeddings", "/v1/embeddings"):
            reply = client.post(path, json=body)
            assert reply.status_code == 400, (body, reply.text)
    off = httpx.post(f"{address}/v1/embeddings", json={"input": "a"})
    assert (off.status_code, off.json()["error"]["type"]) == (501, "not_supported_error")


@pytest.mark.parametrize("n", [1, 7, 64])
def test_fewer_dimensions(client: httpx.Client, n: int) -> None:
    """As OpenAI's package asks: the first ones, whose length is 1 again."""
    import openai

    api = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none")
    asked: Any = {"model": "tiny", "input": TEXTS[0]}
    whole = np.array(api.embeddings.create(**asked).data[0].embedding, "f4")
    some = np.array(api.embeddings.create(**asked, dimensions=n).data[0].embedding, "f4")
    assert np.allclose(some, whole[:n] / np.linalg.norm(whole[:n]), atol=1e-6)
    raw = [
        vectors_of(client.post("/v1/embeddings", json={"input": "a", "embd_normalize": -1, "dimensions": d}))
        for d in (n, 64)
    ]
    assert (raw[0] == raw[1][:, :n]).all()
    (own,) = client.post("/embeddings", json={"input": "a", "dimensions": n}).json()
    assert len(own["embedding"][0]) == n


def test_norms() -> None:
    vector = np.array([3.0, -4.0, 0.0], np.float32)
    assert normalized(vector, -1).tolist() == [3, -4, 0]
    assert normalized(vector, 1).tolist() == pytest.approx([3 / 7, -4 / 7, 0])
    assert normalized(vector, 2).tolist() == pytest.approx([0.6, -0.8, 0])
    assert np.abs(normalized(vector, 0)).max() == pytest.approx(32760)
    assert normalized(np.zeros(3, np.float32), 2).tolist() == [0, 0, 0]
    assert np.isfinite(normalized(np.full(3, 1e30, np.float32), 1000)).all()


class Parts:
    """The tokens of each part of the texts that an engine reads, and how many steps of others were before."""

    def __init__(self) -> None:
        self.n_tokens: list[int] = []
        self.steps: list[int] = []
        self.began = threading.Event()
        self.before: Callable[[], None] = lambda: None

    def load(self) -> kvg.Engine:
        self.engine = engine = load()
        decode, decode_rows = engine.context.decode, engine.context.decode_rows

        def heard(batch: kvg.Batch, *, scores: bool = False, repair: bool = False) -> None:
            self.n_tokens.append(len(batch))
            self.steps.append(engine.stats().steps)
            self.began.set()
            self.before()
            decode(batch, scores=scores, repair=repair)

        def slow(batch: kvg.Batch, **options: Any) -> Any:
            time.sleep(0.005)  # so that a stream lasts
            return decode_rows(batch, **options)

        engine.context.decode = heard  # type: ignore[method-assign,assignment]
        engine.context.decode_rows = slow  # type: ignore[method-assign]
        return engine


LONG = [[1 + i % 400 for i in range(300)], [2 + i % 300 for i in range(70)]]


def test_a_stream_goes_on_between_the_parts_of_a_text() -> None:
    parts = Parts()
    with served(parts.load, embeddings=True, pooling="mean", n_ctx_slot=512) as (url, _):
        talk = {"prompt": "a", "n_predict": 500, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/completion", json=talk, timeout=30) as stream:
            lines = stream.iter_lines()  # kept: the stream ends with it
            next(lines)
            assert len(vectors_of(httpx.post(f"{url}/v1/embeddings", json={"input": LONG}, timeout=30))) == 2
            assert parts.n_tokens == [16] * 18 + [12] + [16] * 4 + [6]  # of 300 tokens, then of 70
            assert len(set(parts.steps)) == len(parts.steps)  # the stream has a step between any two
            assert parts.engine.stats().n_running == 1


def test_who_leaves_ends_a_text_between_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts()
    asked: list[Callable[[], bool]] = []

    def heard(engine: kvg.Engine, prompts: Any, pooling: Any, adapters: Any, is_wanted: Any) -> Any:
        asked.append(is_wanted)
        return embed_all(engine, prompts, pooling, adapters, is_wanted)

    def until_unwanted() -> None:
        end = time.monotonic() + 20
        while asked[0]() and time.monotonic() < end:
            time.sleep(0.002)

    embed_all = kvg.Engine._embed_all
    monkeypatch.setattr(kvg.Engine, "_embed_all", heard)
    parts.before = until_unwanted
    with served(parts.load, embeddings=True, pooling="mean", n_ctx_slot=512) as (url, _):
        body = json.dumps({"input": LONG}).encode()
        with socket.create_connection(where_of(url)) as client:
            head = f"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            assert parts.began.wait(20)
        parts.before = lambda: None
        assert len(vectors_of(httpx.post(f"{url}/v1/embeddings", json={"input": "a"}, timeout=30))) == 1
    assert len(parts.n_tokens) == 2
    assert not asked[0]()
