"""--cache-edit and a body's cache_edit; what `usage` says of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types import CompletionUsage
from support.served import served

import pykvgraph as kvg

from .conftest import STORIES

REPAIR = 32
OLD = list(range(3, 303))
NEW = [*OLD[:50], *OLD[90:], *range(310, 350)]


def load() -> kvg.Engine:
    return kvg.Engine(kvg.Model(STORIES, device="cpu"), n_ctx=1024, n_seq_max=2, overcommit=True)


@pytest.fixture
def serve(request: Any) -> Iterator[httpx.Client]:
    """A server that was started with --cache-edit `request.param`."""
    with (
        served(load, n_slots=2, n_ctx_slot=512, cache_edit=request.param, metrics=True) as (url, _),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


def ask(client: httpx.Client, prompt: list[int], **fields: Any) -> Any:
    return client.post(
        "/v1/completions", json={"prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    )


@pytest.mark.parametrize(
    ("serve", "asked", "edited"),
    [
        ("exact", {}, 0),
        ("exact", {"cache_edit": "approximate"}, 300 - 90 - REPAIR),
        ("approximate", {}, 300 - 90 - REPAIR),
        ("approximate", {"cache_edit": "exact"}, 0),
        ("off", {}, 0),
    ],
    indirect=["serve"],
)
def test_what_is_edited(serve: httpx.Client, asked: dict[str, Any], edited: int) -> None:
    ask(serve, OLD)
    usage = ask(serve, NEW, **asked).json()["usage"]
    miss = {"at": 50, "reason": "edited" if edited else "parted"}
    assert usage["cache"] == {"cells": 50, "ram": 0, "disk": 0, "edited": edited, "miss": miss}
    told = CompletionUsage.model_validate(usage)
    assert told.prompt_tokens_details is not None
    assert told.prompt_tokens_details.cached_tokens == 50 + edited
    assert f"\nkvgraph:edited_tokens_total {edited}.0\n" in serve.get("/metrics").text


@pytest.mark.parametrize("serve", ["off"], indirect=True)
@pytest.mark.parametrize("wanted", ["approximate", "some", 5])
def test_what_is_refused(serve: httpx.Client, wanted: Any) -> None:
    told = ask(serve, OLD, cache_edit=wanted)
    assert told.status_code == 400
    assert "cache_edit" in told.json()["error"]["message"]


@pytest.mark.parametrize("serve", ["exact"], indirect=True)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_every_form_tells_where_tokens_came_from(serve: httpx.Client, path: str) -> None:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 2, "max_output_tokens": 16}
    words = [{"role": "user", "content": "Once upon a time there was a dog"}]
    body |= {"input": words} if path.endswith("responses") else {"messages": words}
    for _ in range(2):
        usage = serve.post(path, json=body).json()["usage"]
    counts = [usage.get(name, 0) for name in ("prompt_tokens", "input_tokens", "cache_read_input_tokens")]
    n_prompt = sum(counts)
    assert usage["cache"] == {"cells": n_prompt - 1, "ram": 0, "disk": 0, "edited": 0, "miss": None}


def test_nobody_learns_what_others_under_another_key_asked() -> None:
    keys = [{"Authorization": f"Bearer {name}"} for name in ("first", "second")]
    with (
        served(load, n_slots=2, n_ctx_slot=512, api_keys=("first", "second")) as (url, _),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        for key in keys:
            told = client.post("/v1/completions", json={"prompt": OLD, "max_tokens": 1}, headers=key).json()
            assert told["usage"]["cache"] == {"cells": 0, "ram": 0, "disk": 0, "edited": 0, "miss": None}


@pytest.mark.parametrize("serve", ["approximate"], indirect=True)
@pytest.mark.parametrize("name", ["prompt_cache_key", "session"])
def test_a_prompt_is_an_edit_of_its_own_session_s_alone(serve: httpx.Client, name: str) -> None:
    ask(serve, OLD, **{name: "mine"})
    for session, edited in (("mine", 300 - 90 - REPAIR), ("another's", 0)):
        usage = ask(serve, NEW, **{name: session}).json()["usage"]
        assert usage["cache"]["edited"] == edited


@pytest.mark.parametrize("serve", ["exact"], indirect=True)
def test_a_user_of_anthropic_s_interface_is_a_session(serve: httpx.Client) -> None:
    def edited(text: str, user: str) -> int:
        body = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1,
            "metadata": {"user_id": user},
        }
        reply = serve.post("/v1/messages", json={**body, "cache_edit": "approximate"})
        assert reply.status_code == 200, reply.text
        return int(reply.json()["usage"]["cache"]["edited"])

    old, behind = "Lily had a big red ball. ", "One day she went to the park with her dog and her mom. " * 5
    assert edited(f"They were happy. {old}{behind}", "a") == 0
    assert edited(f"They were happy. {behind}And", "a") > 0
    assert edited(f"They were happy. {behind}And", "b") == 0
    refused = {"messages": [{"role": "user", "content": "Hi"}], "metadata": {"user_id": 3}, "max_tokens": 1}
    assert serve.post("/v1/messages", json=refused).status_code == 400
