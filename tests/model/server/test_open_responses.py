"""Answers and events of /v1/responses by the types that are made of openresponses.org's description."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import openresponses_types.types as described
import pydantic
import pytest
from support import chance
from support.served import events

from .test_by_types import RESPONSES, body_of

EVENTS = {
    str(next(iter(kind.model_fields["type"].annotation)).value): kind
    for name, kind in vars(described).items()
    if name.endswith("StreamingEvent")
}


def typed(answer: dict[str, Any]) -> dict[str, Any]:
    """Without a schema that it repeats, as OpenAI's interface does: by the description there is but null."""
    form = answer.get("text", {}).get("format", {})
    if "schema" in form:
        form["schema"] = None
    return answer


def test_random_answers_and_their_streams(chats: httpx.Client) -> None:
    rng = random.Random(chance.seed("open responses"))
    kinds = set()
    for _ in range(60 // chance.SHARE):
        body = body_of(rng, RESPONSES)
        reply = chats.post(RESPONSES, json=body)
        assert reply.status_code == 200, (body, reply.text)
        described.ResponseResource.model_validate_json(json.dumps(typed(reply.json())), strict=True)
        for event in events(chats.post(RESPONSES, json={**body, "stream": True}).text):
            kinds.add(event["type"])
            # thoughts have the names of OpenAI's own package, which its clients look for
            event["type"] = event["type"].replace(".reasoning_text.", ".reasoning.")
            typed(event.get("response", {}))
            EVENTS[event["type"]].model_validate_json(json.dumps(event), strict=True)
    assert {"response.created", "response.output_text.delta"} < kinds


@pytest.mark.parametrize(
    "fields",
    [
        {"truncation": "auto", "prompt_cache_key": "a"},
        {"truncation": "disabled", "safety_identifier": "b", "max_tool_calls": 3},
        {"prompt_cache_retention": "24h", "metadata": {"a": "b"}, "instructions": "Be short."},
    ],
)
def test_what_a_body_asks_is_repeated(chats: httpx.Client, fields: dict[str, Any]) -> None:
    body = {
        "model": "any",
        "input": [{"type": "message", "role": "user", "content": "Hi"}],
        "max_output_tokens": 20,
    }
    described.CreateResponseBody.model_validate_json(json.dumps({**body, **fields}), strict=True)
    reply = chats.post(RESPONSES, json={**body, **fields})
    described.ResponseResource.model_validate_json(reply.text, strict=True)
    told = reply.json()
    assert {name: told[name] for name in fields} == fields


def test_the_types_would_say_what_is_wrong(chats: httpx.Client) -> None:
    answer = chats.post(RESPONSES, json={"input": "Hi", "max_output_tokens": 2}).json()
    for name in ("truncation", "completed_at", "usage", "output"):
        less = {key: value for key, value in answer.items() if key != name}
        with pytest.raises(pydantic.ValidationError, match=name):
            described.ResponseResource.model_validate_json(json.dumps(less))
