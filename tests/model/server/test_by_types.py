"""Random bodies of all four interfaces: answers and events have the form of the packages' own types.

And what a stream says adds up to the whole answer.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import anthropic.types
import httpx
import openai.types
import openai.types.chat
import openai.types.responses
import pydantic
import pytest
from jiter import from_json
from openai.lib.streaming.chat import ChatCompletionStreamState
from support import chance
from support.served import events

from .test_chat import SCHEMA, TOOLS
from .test_stream_probs import parted

CHAT, TEXT, MESSAGES, RESPONSES = PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)
WHOLE: dict[str, Any] = {
    CHAT: openai.types.chat.ChatCompletion,
    TEXT: openai.types.Completion,
    MESSAGES: anthropic.types.Message,
    RESPONSES: openai.types.responses.Response,
}
EVENT: dict[str, Any] = {
    CHAT: openai.types.chat.ChatCompletionChunk,
    TEXT: openai.types.Completion,
    MESSAGES: anthropic.types.RawMessageStreamEvent,
    RESPONSES: openai.types.responses.ResponseStreamEvent,
}
# what OpenAI's description of its interface requires, and the package leaves open
REQUIRED = {
    CHAT: ("finish_reason", "index", "message", "logprobs"),
    TEXT: ("finish_reason", "index", "text", "logprobs"),
}
DIFFERENT = frozenset(
    (
        *("id", "call_id", "object", "created", "created_at", "completed_at", "timings", "index"),
        *("prompt_tokens_details", "cache"),
    )
)
# the names that openresponses.org's description requires of a response
OPEN_RESPONSES = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "instructions"),
    *("previous_response_id", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls"),
    *("text", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning"),
    *("user", "usage", "max_output_tokens", "max_tool_calls", "store", "background", "service_tier"),
    *("metadata", "safety_identifier", "prompt_cache_key"),
}
PIECES = ["<think>", "</think>", "Well", " yes", "\n", "é", "漢", "<", "\U0001f600", "</", "{}", "stop"]
NAMES = ("weather", "stop")
CALLS: list[Any] = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
FUNCTIONS: list[Any] = [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES]
OPENAIS: Any = {"type": "json_schema", "name": "a", "schema": SCHEMA}
OTHERS = {"user": "me", "store": False, "service_tier": "auto", "metadata": {"a": "b"}}


def body_of(rng: random.Random, path: str) -> dict[str, Any]:
    """Greedy; what it says is a grammar's, a schema's, a call, or the model's own."""
    body: dict[str, Any] = {"model": "any", "temperature": 0, "cache_prompt": False}
    body |= rng.choice(list(OF_PATH[path].values()))(rng)
    if path != MESSAGES and rng.random() < 0.3:
        body |= dict(rng.sample([*OTHERS.items()], rng.randrange(1, 4)))
    if path in (CHAT, MESSAGES) and rng.random() < 0.3:
        body["stop" if path == CHAT else "stop_sequences"] = rng.sample(["yes", "é", " the", "stop"], 2)
    if path in (CHAT, TEXT):
        body |= {"n": rng.choice([1, 1, 2, 3]), "stream_options": {"include_usage": rng.random() < 0.7}}
    return body


def said(rng: random.Random) -> dict[str, Any]:
    """The grammar of a text."""
    text = json.dumps("".join(rng.choices(PIECES, k=rng.randrange(1, 9))), ensure_ascii=False)
    return {"grammar": f"root ::= {text}"}


def length(rng: random.Random) -> int:
    """Short ones cut something."""
    return rng.choice([1, 2, 5, 20, 300])


def chat(rng: random.Random) -> dict[str, Any]:
    messages = [{"role": "user", "content": rng.choice(["Hi", [{"type": "text", "text": "Hi"}]])}]
    body = {"messages": messages, rng.choice(["max_tokens", "max_completion_tokens"]): length(rng)}
    if rng.random() < 0.5:
        body["reasoning_effort"] = "none"
    if rng.random() < 0.4:
        body |= {"logprobs": True, "top_logprobs": rng.randrange(3)}
    return body


def call(rng: random.Random) -> Any:
    return rng.choice(["required", "auto", {"type": "function", "function": {"name": "weather"}}])


def prompts(rng: random.Random) -> dict[str, Any]:
    prompt = rng.choice(["Once", ["Once", "Lily and"], [1, 403, 407], [[1, 403], [1, 407]]])
    body = {"prompt": prompt, "max_tokens": min(length(rng), 100), "echo": rng.random() < 0.2}
    if rng.random() < 0.5:
        body["logprobs"] = rng.randrange(3)
    return body


def asked(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": length(rng)}
    if rng.random() < 0.5:
        body["thinking"] = {"type": "disabled"}
    return body


def given(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"input": rng.choice(["Hi", [{"role": "user", "content": "Hi"}]])}
    if rng.random() < 0.5:
        body["reasoning"] = {"effort": "none"}
    if rng.random() < 0.3:
        body["instructions"] = "Be short."
    if rng.random() < 0.4:
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": rng.randrange(3)}
    return {**body, "max_output_tokens": length(rng)}


OF_PATH: dict[str, dict[str, Callable[[random.Random], dict[str, Any]]]] = {
    CHAT: {
        "own": chat,
        "grammar": lambda rng: {**chat(rng), **said(rng)},
        "schema": lambda rng: {
            **chat(rng),
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        },
        "call": lambda rng: {
            **chat(rng),
            "tools": TOOLS,
            "tool_choice": call(rng),
            "parallel_tool_calls": rng.random() < 0.5,
        },
    },
    TEXT: {"own": prompts, "grammar": lambda rng: {**prompts(rng), **said(rng)}},
    MESSAGES: {
        "own": asked,
        "schema": lambda rng: {
            **asked(rng),
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
        "call": lambda rng: {
            **asked(rng),
            "tools": CALLS,
            "tool_choice": rng.choice(
                [{"type": "any"}, {"type": "auto"}, {"type": "tool", "name": "weather"}]
            ),
        },
    },
    RESPONSES: {
        "own": given,
        "grammar": lambda rng: {**given(rng), **said(rng)},
        "schema": lambda rng: {**given(rng), "text": {"format": OPENAIS}},
        "call": lambda rng: {
            **given(rng),
            "tools": FUNCTIONS,
            "tool_choice": rng.choice(["required", "auto", {"type": "function", "name": "weather"}]),
        },
    },
}


def typed(value: Any) -> Any:
    """With something for null where the service itself sends null, for which the package has no type.

    In a stream of texts: why it has not ended; of an echo: how likely its first token was.
    """
    if value.get("object") != "text_completion":
        return value
    value = copy.deepcopy(value)
    for choice in value["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        for name, something in ("token_logprobs", 0.0), ("top_logprobs", {}):
            found = (choice["logprobs"] or {}).get(name)
            if found and found[0] is None:
                found[0] = something
    return value


def added_up(path: str, stream: list[Any]) -> Any:
    """What the events amount to."""
    return {CHAT: _chat, TEXT: _text, MESSAGES: _message, RESPONSES: _response}[path](stream)


def _chat(stream: list[Any]) -> Any:
    """By OpenAI's own package."""
    state: Any = ChatCompletionStreamState()
    for each in stream:
        state.handle_chunk(openai.types.chat.ChatCompletionChunk.model_validate(each))
    return state.current_completion_snapshot.to_dict(mode="json")


def _text(stream: list[Any]) -> Any:
    whole: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for event in copy.deepcopy(stream):
        for choice in event.pop("choices"):
            before = choices.setdefault(choice["index"], choice)
            if before is choice:
                continue
            before["text"] += choice["text"]
            before["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"] is not None:
                if before["logprobs"] is None:
                    before["logprobs"] = choice["logprobs"]
                else:
                    for name, values in choice["logprobs"].items():
                        before["logprobs"][name] += values
        whole |= event
    return {**whole, "choices": [choices[index] for index in sorted(choices)]}


def _message(stream: list[Any]) -> Any:
    stream = copy.deepcopy(stream)
    whole = stream[0]["message"]
    for event in stream[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(whole["content"])
            whole["content"].append(event["content_block"])
            whole["content"][-1]["input"] = ""
        elif event["type"] == "content_block_delta":
            block, delta = whole["content"][event["index"]], event["delta"]
            kind = delta.pop("type").removesuffix("_delta")
            block["input" if kind == "input_json" else kind] += delta.popitem()[1]
        elif event["type"] == "content_block_stop":
            block = whole["content"][event["index"]]
            arguments = block.pop("input")
            if block["type"] == "tool_use":
                block["input"] = from_json((arguments or "{}").encode(), partial_mode=True)
        elif event["type"] == "message_delta":
            whole |= event["delta"]
            whole["usage"] |= event["usage"]
    assert stream[-1]["type"] == "message_stop"
    return whole


def _response(stream: list[Any]) -> Any:
    """The last event has all of it; the deltas of each item must be what stands there."""
    whole = stream[-1]["response"]
    for event in stream:
        assert set(event.get("response", OPEN_RESPONSES)) >= OPEN_RESPONSES
    texts: dict[int, str] = {}
    probs: dict[int, list[Any]] = {}
    for event in stream:
        if event["type"].endswith(".delta"):
            index = event["output_index"]
            texts[index] = texts.get(index, "") + event["delta"]
            probs[index] = probs.get(index, []) + event.get("logprobs", [])
    for index, item in enumerate(whole["output"]):
        in_parts = "".join(part["text"] for part in item.get("content", ()))
        assert texts.get(index, "") == item.get("arguments", in_parts)
        told = [each for part in item.get("content", ()) for each in part.get("logprobs", ())]
        assert probs.get(index, []) == told
        said = b"".join(bytes(each["bytes"]) for each in told if each["token"] != "<s>").decode(
            errors="replace"
        )
        assert not told or said.strip() == in_parts.strip(), "these are not the tokens of the text"
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    return whole


def comparable(value: Any) -> Any:
    """Without what differs between two answers to one body: ids, times, what the cache had."""
    if isinstance(value, dict):
        kept = {name: comparable(each) for name, each in value.items() if name not in DIFFERENT}
        if "cache_read_input_tokens" in kept:  # the second body finds in the cache what the first has read
            kept["input_tokens"] += kept.pop("cache_read_input_tokens")
        # a stream says nothing where the whole answer says null, or that there is no text
        return {name: each for name, each in kept.items() if each not in (None, "", {"content": []})}
    if isinstance(value, list):
        return [comparable(each) for each in value]
    return value


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_by_its_types_and_by_its_stream(chats: httpx.Client, path: str) -> None:
    rng = random.Random(chance.seed(path))
    whole_type, event_type = pydantic.TypeAdapter(WHOLE[path]), pydantic.TypeAdapter(EVENT[path])
    for _ in range(250 // chance.SHARE):
        body = body_of(rng, path)
        whole = chats.post(path, json=body)
        assert whole.status_code == 200, (body, whole.text)
        answer = whole.json()
        whole_type.validate_json(json.dumps(typed(answer)), strict=True)
        assert path != RESPONSES or set(answer) >= OPEN_RESPONSES
        for choice in answer.get("choices", ()):
            assert set(REQUIRED[path]) <= set(choice)
            assert {"content", "refusal", "role"} <= set(
                choice.get("message", {"content", "refusal", "role"})
            )
        stream = [e for e in events(chats.post(path, json={**body, "stream": True}).text) if e != "[DONE]"]
        for event in stream:
            event_type.validate_json(json.dumps(typed(event)), strict=True)
        found = added_up(path, stream)
        if path in (CHAT, TEXT) and not body["stream_options"]["include_usage"]:
            del answer["usage"]
            found.pop("usage", None)  # of each text: llama-server's, too
        of_stream, of_whole = parted(comparable(found)), parted(comparable(answer))
        assert of_stream[0] == of_whole[0], body
        assert of_stream[1] == pytest.approx(of_whole[1], abs=0.02), body
