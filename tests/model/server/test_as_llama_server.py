"""Chats by llama-server and by ours, greedy: the same text, the same fields and codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.served import llama_server, served

from .conftest import STORIES, TEMPLATE, load
from .test_chat import SCHEMA, begun

HI = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
GREEDY = {"temperature": 0, "max_tokens": 24}
# the request begins the answer with a call, and the model says its end
ENDED = {"temperature": 0, "logit_bias": [[2, 100]]}
CALL = begun('I ask.<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>')
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}
RED = {"type": "json_schema", "json_schema": {"schema": {"enum": ["red"]}}}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
# numbers that are drawn, times, and what depends on what was asked before
DRAWN = {"id", "item_id", "call_id", "created", "created_at", "completed_at", "system_fingerprint", "model"}
DRAWN |= {"cached_tokens", "signature"}

Body = dict[str, Any]
BODIES: dict[str, tuple[str, Body]] = {
    "chat": (CHAT, {"messages": HI, **GREEDY, **NO_THOUGHTS}),
    "chat-thoughts": (CHAT, {"messages": HI, **GREEDY}),
    "chat-thoughts-left": (CHAT, {"messages": HI, **GREEDY, "reasoning_format": "none"}),
    "chat-legacy": (CHAT, {"messages": HI, **GREEDY, "reasoning_format": "deepseek-legacy"}),
    "chat-two": (CHAT, {"messages": HI, **GREEDY, "n": 2}),
    "chat-tools": (CHAT, {"messages": HI, **GREEDY, "tools": TOOLS}),
    "chat-no-tools": (CHAT, {"messages": HI, **GREEDY, "tools": TOOLS, "tool_choice": "none"}),
    "chat-call": (CHAT, {"messages": CALL, **ENDED, "tools": TOOLS}),
    "chat-begun": (CHAT, {"messages": begun("Well"), **GREEDY}),
    "chat-logprobs": (CHAT, {"messages": HI, **GREEDY, "logprobs": True, "top_logprobs": 2}),
    "messages": (MESSAGES, {"messages": HI, **GREEDY, **NO_THOUGHTS, "system": "Be"}),
    "messages-thoughts": (MESSAGES, {"messages": HI, **GREEDY}),
    "messages-tools": (
        MESSAGES,
        {"messages": HI, **GREEDY, "tools": [{"name": "weather", "input_schema": SCHEMA}]},
    ),
    "responses": (RESPONSES, {"input": "Hi", "instructions": "Be", **NO_THOUGHTS, **ENDED}),
    "responses-call": (
        RESPONSES,
        {
            "input": [HI[0], {"type": "message", **CALL[-1]}],
            "tools": [{"type": "function", **TOOLS[0]["function"]}],  # type: ignore[dict-item]
            **ENDED,
        },
    ),
}
PROMPTS: dict[str, Body] = {
    "/apply-template": {"messages": HI, "tools": TOOLS},
    f"{CHAT}/input_tokens": {"messages": HI, "tools": TOOLS},
    f"{MESSAGES}/count_tokens": {"messages": HI, "system": "Be"},
    f"{RESPONSES}/input_tokens": {"input": "Hi", "instructions": "Be"},
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    file: Path = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE, encoding="utf-8")
    arguments = ("-c", "2048", "-np", "4", "--chat-template-file", str(file))
    with llama_server(STORIES, *arguments) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def check(wanted: Any, told: Any, where: str = "") -> None:
    """Whatever llama-server tells is told here; there may be more."""
    key = where.rpartition("/")[2]
    if key in DRAWN:
        assert type(wanted) is type(told), where
    elif key == "timings":
        assert wanted.keys() == told.keys(), where
    elif "cache_read_input_tokens" in (wanted if isinstance(wanted, dict) else ()):
        # which of the tokens pins keep, and where they came from, it doesn't tell
        counts = [value for value in told.values() if isinstance(value, int)]
        assert sum(counts) == sum(wanted.values()), where
    elif isinstance(wanted, dict):
        for name, value in wanted.items():
            assert name in told, f"{where}/{name}"
            check(value, told[name], f"{where}/{name}")
    elif isinstance(wanted, list):
        assert len(wanted) == len(told), where
        for i, (one, other) in enumerate(zip(wanted, told, strict=True)):
            check(one, other, f"{where}/{i}")
    elif isinstance(wanted, float):
        assert told == pytest.approx(wanted, abs=0.02), where
    else:
        assert told == wanted, where


@pytest.mark.parametrize("name", BODIES)
def test_the_same_answer(theirs: httpx.Client, chats: httpx.Client, name: str) -> None:
    path, body = BODIES[name]
    one, other = theirs.post(path, json=body), chats.post(path, json=body)
    assert (one.status_code, other.status_code) == (200, 200), (one.text, other.text)
    if "n" in body:
        check(*map(without_usage, (one.json(), other.json())))
    else:
        check(one.json(), other.json())


def without_usage(answer: Any) -> Any:
    """Of several answers llama-server tells the usage of one; OpenAI's interface sums, and so do we."""
    return {name: value for name, value in answer.items() if name != "usage"}


def test_the_same_json(theirs: httpx.Client, chats: httpx.Client) -> None:
    """Of other tokens: the grammars are two translations of the schema."""
    body = {"messages": HI, **GREEDY, **NO_THOUGHTS, "response_format": RED}
    check(*(without_usage(client.post(CHAT, json=body).json()) for client in (theirs, chats)))


def read(text: str) -> list[tuple[str, Any]]:
    """Events: their names, and their values."""
    found = []
    for part in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in part.splitlines() if not line.startswith(":"))
        if lines:
            data = lines["data"]
            found.append((lines.get("event", ""), data if data == "[DONE]" else json.loads(data)))
    return found


@pytest.mark.parametrize("name", BODIES)
def test_the_same_stream(theirs: httpx.Client, chats: httpx.Client, name: str) -> None:
    path, body = BODIES[name]
    body = {**body, "stream": True, "stream_options": {"include_usage": "n" not in body}}
    wanted, told = (read(client.post(path, json=body).text) for client in (theirs, chats))
    check(joined(wanted), joined(told))


def joined(events: list[tuple[str, Any]]) -> Any:
    """The text of each kind of event, however it is cut, and the events that have none, by their names."""
    texts: dict[str, str] = {}
    others: dict[str, list[Any]] = {}
    for name, value in events:
        index, delta = -1, value
        if name == "" and value != "[DONE]" and value["choices"]:
            index, delta = value["choices"][0]["index"], value["choices"][0]["delta"]
        elif name == "content_block_delta":
            delta = value["delta"]
        found = list(text_of(delta))
        for key, text in found:
            where = f"{name} {index} {key}"
            texts[where] = texts.get(where, "") + text
        if not found:
            others.setdefault(f"{name} {index}", []).append(value)
    return {"texts": texts, "others": others}


def text_of(delta: Any) -> Iterator[tuple[str, str]]:
    """What a delta adds to: content, thoughts, arguments."""
    if not isinstance(delta, dict) or not delta.get("type", "delta").endswith("delta"):
        return
    for key in ("content", "reasoning_content", "text", "thinking", "delta"):
        if isinstance(delta.get(key), str):
            yield key, delta[key]
    for call in delta.get("tool_calls", ()):
        for key, text in call["function"].items():
            yield f"call {call['index']} {key}", text


@pytest.mark.parametrize("path", PROMPTS)
def test_the_same_prompt(theirs: httpx.Client, chats: httpx.Client, path: str) -> None:
    check(theirs.post(path, json=PROMPTS[path]).json(), chats.post(path, json=PROMPTS[path]).json())


@pytest.mark.parametrize(
    ("messages", "fields"),
    [(HI, {}), (begun("Well"), {}), (begun("Well"), {"continue_final_message": True})],
)
def test_the_same_prompt_without_its_end(
    theirs: httpx.Client, chats: httpx.Client, messages: Any, fields: Body
) -> None:
    body = {"messages": messages, "add_generation_prompt": False, **fields}
    one, other = (client.post("/apply-template", json=body).json() for client in (theirs, chats))
    assert one["prompt"] == other["prompt"]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize("streams", [False, True])
def test_the_same_details(theirs: httpx.Client, chats: httpx.Client, path: str, streams: bool) -> None:
    """How the answer was made: the prompt as the model got it, settings, times."""
    body = {"messages": HI, "prompt": "Once", **GREEDY, **NO_THOUGHTS, "verbose": True, "stream": streams}
    found = []
    for client in (theirs, chats):
        reply = client.post(path, json=body)
        *_, last = (
            [value for _, value in read(reply.text) if value != "[DONE]"] if streams else [reply.json()]
        )
        found.append(last["__verbose"])
    one, other = found
    assert one.keys() == other.keys()
    for name in ("prompt", "content", "tokens_predicted", "tokens_evaluated", "stop_type"):
        assert one[name] == other[name]
    assert "__verbose" not in theirs.post(path, json={**body, "stream": False, "verbose": False}).json()
    assert "__verbose" not in chats.post(path, json={**body, "stream": False, "verbose": False}).json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {}),
        (CHAT, {"messages": begun("Well"), "continue_final_message": True}),
        (CHAT, {"messages": begun("Well"), "continue_final_message": True, "add_generation_prompt": True}),
        (CHAT, {"messages": [{"role": "user"}]}),
        (CHAT, {"messages": [{"role": "assistant"}]}),
        (CHAT, {"messages": [*CALL, CALL[-1]]}),
        (CHAT, {"messages": HI, "tools": TOOLS, "grammar": 'root ::= "a"'}),
        (CHAT, {"messages": HI, "top_logprobs": 1}),
        (CHAT, {"messages": HI, "tool_choice": "often"}),
        (CHAT, {"messages": HI, **NO_THOUGHTS, "chat_template_kwargs": {"enable_thinking": "no"}}),
        (MESSAGES, {"messages": [*CALL, CALL[-1]]}),
        (RESPONSES, {}),
        (RESPONSES, {"input": "Hi", "previous_response_id": "resp_a"}),
        (RESPONSES, {"input": [{"type": "unheard_of"}]}),
    ],
)
def test_the_same_refusal(theirs: httpx.Client, chats: httpx.Client, path: str, body: Body) -> None:
    one, other = theirs.post(path, json=body), chats.post(path, json=body)
    assert one.status_code == other.status_code == 400
    assert one.json()["error"]["type"] == other.json()["error"]["type"]


@pytest.mark.parametrize("name", ["llama3", "mistral-v7"])
def test_without_jinja(name: str) -> None:
    messages = [{"role": "system", "content": "Be é."}, *HI, {"role": "assistant", "content": "Well"}, *HI]
    bodies = [
        {"messages": messages},
        {"messages": HI, "tools": TOOLS},
        {"messages": HI, "tool_choice": "none"},
    ]
    with (
        llama_server(STORIES, "-c", "512", "--no-jinja", "--chat-template", name) as url,
        served(load, chat_template=name, jinja=False) as (address, _),
    ):
        for body in bodies:
            one, other = (httpx.post(f"{where}/apply-template", json=body) for where in (url, address))
            assert one.json().get("prompt") == other.json().get("prompt")
            assert (one.status_code == 200) == (other.status_code == 200)
        asked = {"messages": messages, **GREEDY}
        check(*(httpx.post(f"{where}{CHAT}", json=asked).json() for where in (url, address)))
