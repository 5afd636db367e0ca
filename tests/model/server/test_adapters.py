"""LoRA adapters of a server: /lora-adapters and `lora`, beside llama-server on the same files."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.adapters import write_adapter
from support.served import llama_server, served

import pykvgraph as kvg

from .conftest import STORIES

PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play"
WISHES: list[Any] = [
    None,
    [{"id": 0, "scale": 1.0}],
    [{"id": 1, "scale": 0.5}],
    [{"id": 0, "scale": 0.4}, {"id": 1, "scale": 0.4}],
    [],
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / f"{seed}.gguf", STORIES, seed=seed, alpha=4.0) for seed in range(2)]


@pytest.fixture(scope="module")
def ours(files: list[Path]) -> Iterator[httpx.Client]:
    """With the first adapter at 1 and the second at 0.25."""

    def load() -> kvg.Engine:
        model = kvg.Model(STORIES, device="cpu")
        pairs = [(model.load_adapter(path), scale) for path, scale in zip(files, (1.0, 0.25), strict=True)]
        return kvg.Engine(model, n_ctx=2048, n_seq_max=4, adapters=pairs)

    with (
        served(load, embeddings=True, pooling="mean") as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def say(client: httpx.Client, lora: Any = None, *, cached: bool = True) -> list[int]:
    body = {
        "prompt": PROMPT,
        "n_predict": 24,
        "temperature": 0,
        "return_tokens": True,
        "cache_prompt": cached,
    }
    reply = client.post("/completion", json=body if lora is None else body | {"lora": lora})
    assert reply.status_code == 200, reply.text
    return list(reply.json()["tokens"])


def test_as_llama_server(ours: httpx.Client, files: list[Path]) -> None:
    """It decodes all again: a request without `lora` would get cells of the adapters before it there."""
    arguments = ("-c", "2048", "-np", "1", "--lora", str(files[0]), "--lora-scaled", f"{files[1]}:0.25")
    with llama_server(STORIES, *arguments) as rival, httpx.Client(base_url=rival, timeout=60) as theirs:
        told = [client.get("/lora-adapters").json() for client in (theirs, ours)]
        assert told[1] == told[0]
        said = [say(theirs, lora, cached=False) for lora in WISHES]
        assert [say(ours, lora) for lora in WISHES] == said
        assert len({tuple(tokens) for tokens in said}) == len(WISHES) - 1  # [] says nothing
        for body in ([{"id": 1, "scale": 0.75}], [], [{"id": 0, "scale": 1.0}, {"id": 1, "scale": 0.25}]):
            replies = [client.post("/lora-adapters", json=body) for client in (theirs, ours)]
            assert [(reply.status_code, reply.json()) for reply in replies] == [(200, {"success": True})] * 2
            told = [client.get("/lora-adapters").json() for client in (theirs, ours)]
            assert told[1] == told[0]
            assert say(ours) == say(theirs, cached=False)


def test_many_at_a_time(ours: httpx.Client) -> None:
    alone = [say(ours, lora) for lora in WISHES]
    with ThreadPoolExecutor(len(WISHES) * 3) as pool:
        assert list(pool.map(lambda lora: say(ours, lora), WISHES * 3)) == alone * 3


def test_embeddings(ours: httpx.Client) -> None:
    def embed(**more: Any) -> list[float]:
        reply = ours.post("/v1/embeddings", json={"input": PROMPT, **more})
        return list(reply.json()["data"][0]["embedding"])

    assert embed() == embed(lora=[{"id": 0, "scale": 1.0}, {"id": 1, "scale": 0.25}])
    assert embed() != embed(lora=[{"id": 0, "scale": 0.1}])


def test_messages(ours: httpx.Client) -> None:
    """As a chat says it."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 16, "temperature": 0}
    texts = []
    for lora in (None, [{"id": 0, "scale": 0.1}, {"id": 1, "scale": 0.75}]):
        chat = ours.post("/v1/chat/completions", json=body | {"lora": lora}).json()
        said = ours.post("/v1/messages", json=body | {"lora": lora}).json()
        texts.append("".join(block["text"] for block in said["content"]))
        assert texts[-1] == chat["choices"][0]["message"]["content"]
    assert texts[0] != texts[1]
    assert ours.post("/v1/messages", json=body | {"lora": [{"id": 9, "scale": 1}]}).status_code == 400


@pytest.mark.parametrize(
    "lora",
    [
        3,
        [3],
        [{"id": 2, "scale": 1}],
        [{"id": -1, "scale": 1}],
        [{"scale": 1}],
        [{"id": 0, "scale": "1"}],
        [{"id": 0, "scale": 1.1e6}],
        [{"id": 0, "scale": -1.1e6}],
    ],
)
def test_wrong_wishes(ours: httpx.Client, lora: Any) -> None:
    before = ours.get("/lora-adapters").json()
    assert ours.post("/completion", json={"prompt": "a", "lora": lora}).status_code == 400
    assert ours.post("/lora-adapters", json=lora).status_code == 400
    assert ours.get("/lora-adapters").json() == before


def test_a_server_without_adapters(client: httpx.Client) -> None:
    assert client.get("/lora-adapters").json() == []
    reply = client.post("/completion", json={"prompt": "a", "lora": [{"id": 0, "scale": 1}]})
    assert reply.status_code == 400 and "lora" in reply.json()["error"]["message"]
