"""Answers that fill their context and go on: token for token as llama-server's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.served import llama_server, served

import pykvgraph as kvg
from pykvgraph.server.service import Service
from pykvgraph.server.settings import Settings

from .conftest import STORIES, load

PROMPT = "Once upon a time there was a little girl who liked to play in the garden with her dog, and one day"


@pytest.fixture(scope="module")
def shifting() -> Iterator[httpx.Client]:
    settings: dict[str, Any] = {"n_slots": 2, "n_ctx_slot": 128, "context_shift": True}
    with served(load, **settings) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        yield client


def say(client: httpx.Client, path: str = "/completion", **fields: Any) -> Any:
    asked = {"prompt": PROMPT, "n_predict": 400, "temperature": 0, "ignore_eos": True, **fields}
    reply = client.post(path, json={**asked, "return_tokens": True})
    assert reply.status_code == 200, reply.text
    return reply.json()


KEEPS: list[dict[str, Any]] = [{}, {"n_keep": 10}, {"n_keep": -1}, {"n_keep": 4, "n_discard": 7}]


def test_it_goes_on(shifting: httpx.Client) -> None:
    for fields in KEEPS:
        told = say(shifting, **fields)
        assert (told["tokens_predicted"], told["truncated"], told["stop_type"]) == (400, True, "limit")
        assert told["tokens_cached"] < 128
        asked = {name: told["generation_settings"][name] for name in ("n_keep", "n_discard")}
        assert asked == {"n_keep": 0, "n_discard": 0, **fields}


def test_the_tokens_are_llama_servers(shifting: httpx.Client) -> None:
    """Each past its first shift or more; K is rotated twice and more, and no token is another one."""
    arguments = ("-c", "512", "-np", "2", "--context-shift", "--kv-unified")
    with llama_server(STORIES, *arguments) as url, httpx.Client(base_url=url, timeout=60) as theirs:
        n_ctx = theirs.get("/props").json()["default_generation_settings"]["n_ctx"]
        settings: dict[str, Any] = {"n_slots": 2, "n_ctx_slot": n_ctx, "context_shift": True}
        with served(load, **settings) as (ours_url, _), httpx.Client(base_url=ours_url, timeout=60) as ours:
            for fields in KEEPS:
                mine, other = say(ours, n_predict=700, **fields), say(theirs, n_predict=700, **fields)
                assert mine["tokens"] == other["tokens"]
                for name in ("truncated", "stop_type", "tokens_cached", "tokens_evaluated"):
                    assert mine[name] == other[name]
                assert mine["truncated"]


def test_other_tokens_are_forgotten() -> None:
    """By a policy: another one forgets others, and something else is said then."""
    settings: dict[str, Any] = {"n_slots": 1, "n_ctx_slot": 128, "context_shift": True}
    said = []
    for forget in ("window", "keydiff"):
        with (
            served(load, **settings, forget=forget) as (url, _),
            httpx.Client(base_url=url, timeout=60) as client,
        ):
            told = say(client, n_predict=160)
            assert told["tokens_predicted"] == 160 and told["truncated"] and told["tokens_cached"] < 128
            said.append(told["tokens"])
    assert len({tuple(tokens) for tokens in said}) == 2
    assert len({tuple(tokens[:60]) for tokens in said}) == 1


@pytest.mark.parametrize("n_keep", [0, -1, 10**6])
def test_a_prompt_that_is_longer_than_the_slot(n_keep: int) -> None:
    """It is read part by part, and the same is said as by the engine; several samples have no such window."""
    settings: dict[str, Any] = {"n_slots": 2, "n_ctx_slot": 128, "context_shift": True, "forget": "keydiff"}
    with (
        served(load, **settings) as (url, server),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        engine = server.service.engine
        prompt = engine.context.model.tokenizer.encode(PROMPT * 12)
        assert len(prompt) > 300
        told = say(client, prompt=prompt, n_predict=30, n_keep=n_keep)
        kept = 1 + (64 if n_keep > 0 else 0)
        window = kvg.Window(128, kept, forget="keydiff")
        params = kvg.SamplingParams(max_tokens=30, temperature=0.0)
        assert told["tokens"] == list(engine.submit(prompt, params, window=window).result().tokens)
        assert told["tokens_evaluated"] == len(prompt)
        assert (told["tokens_predicted"], told["truncated"]) == (30, True)
        assert told["tokens_cached"] < 128
        chat = {"messages": [{"role": "user", "content": PROMPT * 12}], "max_tokens": 5}
        reply = client.post("/v1/chat/completions", json=chat).raise_for_status().json()
        assert reply["usage"]["prompt_tokens"] > 300
        refused = client.post("/completion", json={"prompt": prompt, "n_cmpl": 2})
        assert refused.json()["error"]["type"] == "exceed_context_size_error"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n_ctx_slot": 71, "forget": "keydiff"}, "--forget: .* n_ctx must be 72 or more, got 71: .*-np"),
        ({"n_ctx_slot": 7}, "--context-shift: .* n_ctx must be 8 or more"),
    ],
)
def test_a_slot_without_room_for_its_window(settings: dict[str, Any], said: str) -> None:
    """The server doesn't start: each request would be refused for what it didn't ask."""
    service = Service(Settings(context_shift=True, **settings))
    with load() as engine, pytest.raises(kvg.InvalidArgumentError, match=said):
        service.ready(engine)  # Server.run() ends with what it raises


def test_without_it_the_answer_ends(client: httpx.Client) -> None:
    told = say(client, n_predict=2000)
    assert (told["tokens_evaluated"] + told["tokens_predicted"], told["truncated"]) == (512, True)


def test_several_samples_end_where_they_are_full(shifting: httpx.Client) -> None:
    for told in say(shifting, n_cmpl=2):
        assert told["tokens_evaluated"] + told["tokens_predicted"] <= 128
        assert told["truncated"]


def test_what_is_refused(shifting: httpx.Client) -> None:
    for field, bad in (("n_keep", -2), ("n_discard", -1), ("n_keep", "all"), ("n_discard", 1e300)):
        reply = shifting.post("/completion", json={"prompt": "a", field: bad})
        assert reply.status_code == 400 and field in reply.text
    long = shifting.post("/completion", json={"prompt": PROMPT * 8})
    assert long.json()["error"]["type"] == "exceed_context_size_error"
