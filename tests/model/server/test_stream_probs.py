"""Probabilities of tokens in streams: those of a stream together are those of the whole answer."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest
from support import chance
from support.served import events

PIECES = ["\U0001f600", "漢", "é", "ab", "abx", " ", "\n", "<thi", "</think>", "<tool_call>", "<", "x", "é "]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
PATHS = ["/v1/chat/completions", "/v1/completions", "/completion", "/v1/responses"]


def body_of(rng: random.Random, path: str) -> dict[str, Any]:
    """A grammar makes the model write these pieces, of which some may begin a stop string or a mark."""
    said = "".join(rng.choices(PIECES, k=rng.randrange(1, 9)))
    body: dict[str, Any] = {
        "grammar": f"root ::= {json.dumps(said, ensure_ascii=False)}",
        "stop": rng.sample(["abx", "aby", "\n ", "漢é", "<th", "x"], rng.randrange(3)),
        "max_tokens": rng.choice([3, 10, 60]),
        "temperature": 0,
        "cache_prompt": False,
    }
    n_top = rng.randrange(3)
    if path == "/completion":
        return {**body, "prompt": "Once", "n_predict": body["max_tokens"], "n_probs": n_top or 1}
    if path == "/v1/completions":
        return {**body, "prompt": "Once", "logprobs": n_top, "echo": rng.random() < 0.3}
    if path == "/v1/responses":
        thinks = {"chat_template_kwargs": {"enable_thinking": rng.random() < 0.5}}
        return {
            **body,
            **thinks,
            "input": "Hi",
            "max_output_tokens": body["max_tokens"],
            "top_logprobs": n_top,
        }
    messages = [{"role": "user", "content": "Hi"}]
    thinks = {"chat_template_kwargs": {"enable_thinking": rng.random() < 0.5}}
    return {**body, **thinks, "messages": messages, "logprobs": True, "top_logprobs": n_top}


def told(path: str, answer: dict[str, Any]) -> list[Any]:
    """The tokens with their probabilities, of an answer or of an event."""
    if path == "/completion":
        return [*answer.get("completion_probabilities", ())]
    if path == "/v1/responses":
        if answer.get("type") == "response.output_text.delta":
            return [*answer["logprobs"]]
        parts = [part for item in answer.get("output", ()) for part in item.get("content", ())]
        return [each for part in parts for each in part.get("logprobs", ())]
    found = []
    for choice in answer["choices"]:
        probs = choice.get("logprobs") or {}
        found += probs.get("content", ())
        if path == "/v1/completions" and probs:
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            found += [*zip(*(probs[name] for name in names), strict=True)]
    return found


def parted(value: Any) -> tuple[Any, list[float]]:
    """The value with None for its floats, and these: rows of other batches are rounded differently."""
    if isinstance(value, float):
        return None, [value]
    if isinstance(value, dict):
        return parted(sorted(value.items()))
    if isinstance(value, (list, tuple)):
        parts = [parted(each) for each in value]
        return [shape for shape, _ in parts], [each for _, floats in parts for each in floats]
    return value, []


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_stream_tells_what_the_whole_answer_does(chats: httpx.Client, path: str) -> None:
    rng = random.Random(chance.seed(11))
    n_held = 0
    for _ in range(330 // chance.SHARE):
        body = body_of(rng, path)
        whole = chats.post(path, json=body)
        assert whole.status_code == 200, (body, whole.text)
        stream = [e for e in events(chats.post(path, json={**body, "stream": True}).text) if e != "[DONE]"]
        expected, found = told(path, whole.json()), [each for event in stream for each in told(path, event)]
        for kind in (dict, tuple):
            of_whole, of_stream = (
                parted([e for e in each if isinstance(e, kind)]) for each in (expected, found)
            )
            assert of_stream[0] == of_whole[0], body
            assert of_stream[1] == pytest.approx(of_whole[1], abs=0.02), body
        n_held += any(len(told(path, event)) > 2 for event in stream)
    assert n_held, "no event had the probabilities of tokens whose text was held back"


def test_of_no_others(chats: httpx.Client) -> None:
    """top_logprobs 0, or none given: OpenAI's API tells the tokens' own."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "logprobs": True}
    for more in ({}, {"top_logprobs": 0}):
        content = chats.post(PATHS[0], json={**chat, **more}).json()["choices"][0]["logprobs"]["content"]
        assert len(content) == 3
        assert all(each["logprob"] <= 0 and each["top_logprobs"] == [] for each in content)
    text = chats.post(PATHS[1], json={"prompt": "Hi", "max_tokens": 3, "logprobs": 0}).json()
    probs = text["choices"][0]["logprobs"]
    assert len(probs["token_logprobs"]) == 3
    assert [[*top.values()] for top in probs["top_logprobs"]] == [[each] for each in probs["token_logprobs"]]
    without = chats.post(PATHS[1], json={"prompt": "Hi", "max_tokens": 3}).json()
    assert without["choices"][0]["logprobs"] is None


def test_beside_tools(chats: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": TOOLS,
        "max_tokens": 6,
        "logprobs": True,
    }
    whole = chats.post(PATHS[0], json={**body, "temperature": 0}).json()
    stream = events(chats.post(PATHS[0], json={**body, "temperature": 0, "stream": True}).text)
    found = [each["token"] for event in stream if event != "[DONE]" for each in told(PATHS[0], event)]
    assert found == [each["token"] for each in told(PATHS[0], whole)] and found
