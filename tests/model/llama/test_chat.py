"""Chats: the dictionaries of llama-cpp-python on the same file, by its formats and by the template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gguf_bytes import STRING
from support.gguf_parts import take_apart

import pykvgraph as kvg

from .conftest import EXACT, Pair, llama_cpp, plain

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "[{{ message.role }}] {{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MESSAGES: list[Any] = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": "Tell me one <about> a cat & a dog."},
]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "count",
        "parameters": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]},
    },
}
CHOICE = {"type": "function", "function": {"name": "count"}}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "seeded": {"temperature": 1.0, "seed": 6},
    "stop": {"stop": ["cat", "the"]},
    "json": {"response_format": {"type": "json_object", "schema": TOOL["function"]["parameters"]}},
    "tool": {"tools": [TOOL], "tool_choice": CHOICE},
    "function": {"functions": [TOOL["function"]], "function_call": {"name": "count"}},
    "any tool": {"tools": [TOOL], "tool_choice": "auto"},
}


@pytest.fixture(scope="module")
def templated(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that tells stories, with a chat template."""
    parts = take_apart(stories.read_bytes())
    parts.set("tokenizer.chat_template", STRING, TEMPLATE.encode())
    parts.set("tokenizer.chat_template.short", STRING, b"{{ messages[-1].content }}")
    path = tmp_path_factory.mktemp("chat") / "templated.gguf"
    return parts.raw().write(path)


@pytest.fixture(scope="module")
def pair(templated: Path) -> Iterator[Pair]:
    theirs = llama_cpp.Llama(str(templated), **EXACT)
    with kvg.Llama(str(templated), **EXACT) as ours:
        yield ours, theirs
    theirs.close()


def identified(answer: Any) -> Any:
    """plain(), with ids only where they name the function."""
    return json.loads(re.sub(r"cmpl-[0-9a-f-]{36}", "cmpl", json.dumps(plain(answer))))


@pytest.mark.parametrize("chat_format", [None, "chat_template.short", "chatml", "llama-2", "zephyr"])
@pytest.mark.parametrize("way", ["plain", "seeded", "stop", "any tool"])
def test_answers(pair: Pair, chat_format: str | None, way: str) -> None:
    for llama in pair:
        llama.chat_format = chat_format or "chat_template.default"
    for stream in (False, True):
        arguments = {"temperature": 0.0, "max_tokens": 20, "stream": stream, **WAYS[way]}
        ours, theirs = (identified(llama.create_chat_completion(MESSAGES, **arguments)) for llama in pair)
        assert ours == theirs


@pytest.mark.parametrize("chat_format", [None, "chat_template.short"])
@pytest.mark.parametrize("way", ["json", "tool", "function"])
def test_answers_that_follow_a_schema(pair: Pair, chat_format: str | None, way: str) -> None:
    """The same form as llama-cpp-python's; the white space of the JSON is a matter of the grammar."""
    pair[0].chat_format = pair[1].chat_format = chat_format or "chat_template.default"
    arguments = {"temperature": 0.0, "max_tokens": 40, **WAYS[way]}
    (ours,), (theirs,) = (llama.create_chat_completion(MESSAGES, **arguments)["choices"] for llama in pair)
    assert ours.keys() == theirs.keys() and ours["finish_reason"] == theirs["finish_reason"]
    assert ours["message"].keys() == theirs["message"].keys()
    calls = ours["message"].get("tool_calls")
    text = calls[0]["function"]["arguments"] if calls else ours["message"]["content"]
    assert json.loads(text).keys() == {"n"} and json.loads(text)["n"] in (1, 2)


@pytest.fixture(scope="module")
def calling(stories: Path) -> Iterator[Pair]:
    """Two whose format makes a prompt of over 512 tokens from a tool."""
    options = {**EXACT, "n_ctx": 1024, "chat_format": "chatml-function-calling"}
    theirs = llama_cpp.Llama(str(stories), **options)
    with kvg.Llama(str(stories), **options) as ours:
        yield ours, theirs
    theirs.close()


@pytest.mark.parametrize("way", ["plain", "json", "tool", "function", "any tool", "no tool"])
def test_function_calling(calling: Pair, way: str) -> None:
    arguments = {"no tool": {"tools": [TOOL], "tool_choice": "none"}, **WAYS}[way]
    for stream in (False, True):
        if way == "any tool" and stream:
            for llama in calling:
                with pytest.raises(ValueError, match="streaming"):
                    list(llama.create_chat_completion(MESSAGES, stream=True, **arguments))
            return
        chosen = {"temperature": 0.0, "max_tokens": 20, "stream": stream, **arguments}
        ours, theirs = (identified(llama.create_chat_completion(MESSAGES, **chosen)) for llama in calling)
        assert ours == theirs
        if not stream and way in ("tool", "function"):
            (call,) = ours["choices"][0]["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"])["n"] in (1, 2)


def test_the_format_is_chosen_alike(pair: Pair, stories: Path, templated: Path) -> None:
    with kvg.Llama(str(stories)) as plain_file, kvg.Llama(str(templated)) as with_template:
        assert plain_file.chat_format == "llama-2"
        assert with_template.chat_format == "chat_template.default"
    assert list(pair[0]._chat_handlers) == list(pair[1]._chat_handlers)
    assert pair[0].metadata == pair[1].metadata


@pytest.mark.parametrize("chat_format", [None, "chatml"])
def test_any_json(pair: Pair, chat_format: str | None) -> None:
    """Token by token."""
    for llama in pair:
        llama.chat_format = chat_format or "chat_template.default"
    for drawn in ({"temperature": 0.0}, {"temperature": 1.2, "seed": 4}):
        arguments = {"response_format": {"type": "json_object"}, "max_tokens": 60, **drawn}
        ours, theirs = (identified(llama.create_chat_completion(MESSAGES, **arguments)) for llama in pair)
        assert ours == theirs
        assert ours["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.parametrize("schema", ["nonsense", {"type": "nonsense"}, {"uniqueItems": True}])
def test_a_schema_that_can_not_be_obeyed(pair: Pair, schema: Any) -> None:
    """llama-cpp-python takes any object for it, or leaves a part of it out."""
    pair[0].chat_format = "chat_template.default"
    wanted = {"type": "json_object", "schema": schema}
    with pytest.raises(kvg.InvalidArgumentError, match=r"be obeyed|must be an object"):
        pair[0].create_chat_completion(MESSAGES, response_format=wanted)


def test_a_schema_beyond_the_limits_is_not_ignored(pair: Pair) -> None:
    pair[0].chat_format = "chat_template.default"
    wanted = {"type": "json_object", "schema": {"enum": list(range(5000))}}
    with pytest.raises(kvg.InvalidArgumentError, match="enum"):
        pair[0].create_chat_completion(MESSAGES, response_format=wanted)


def test_a_handler_of_ones_own(pair: Pair) -> None:
    seen: dict[str, Any] = {}

    def handler(**arguments: Any) -> str:
        seen.update(arguments)
        return "said"

    with kvg.Llama(pair[0].model_path, chat_handler=handler) as llama:
        assert llama.create_chat_completion(MESSAGES, top_k=7) == "said"
        assert seen["llama"] is llama and seen["top_k"] == 7 and seen["messages"] == MESSAGES


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            ValueError,
            "'x'",
        ),
        ({"messages": 5}, ValueError, "chat template"),
        ({"temprature": 1}, TypeError, "temprature"),
    ],
    ids=["tool", "messages", "unknown"],
)
def test_refused(pair: Pair, arguments: dict[str, Any], error: Any, told: str) -> None:
    pair[0].chat_format = "chat_template.default"
    with pytest.raises(error, match=told):
        pair[0].create_chat_completion(**{"messages": MESSAGES, **arguments})


def test_an_unknown_format(pair: Pair) -> None:
    pair[0].chat_format = "no-format"
    with pytest.raises(ValueError, match="no-format"):
        pair[0].create_chat_completion(MESSAGES)


def test_pictures_are_refused_by_name(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = object.__new__(llama_cpp.llama_chat_format.Llava15ChatHandler)
    monkeypatch.setattr(pair[0], "chat_handler", handler)
    with pytest.raises(kvg.UnsupportedError, match="chat_handler"):
        pair[0].create_chat_completion(MESSAGES)


def test_logprobs(templated: Path) -> None:
    with kvg.Llama(str(templated), logits_all=True) as llama:
        answer = llama.create_chat_completion(MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2)
        content = answer["choices"][0]["logprobs"]["content"]
        assert [len(token["top_logprobs"]) >= 2 for token in content] == [True] * 3
        assert "".join(token["token"] for token in content) == answer["choices"][0]["message"]["content"]
