"""A forced call of one tool: what every answer begins with is in the prompt, and the model says the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion
from support.served import events, served

from .conftest import TEMPLATE, load

CHATS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "note": {"type": "string", "maxLength": 5}},
    "required": ["city", "note"],
}
WEATHER = {"name": "weather", "parameters": SCHEMA}
STOP = {"name": "stop", "parameters": {"type": "object", "properties": {}}}
ASKED = [{"role": "user", "content": "Hi"}]
# as the template of these servers writes a call, up to where it isn't certain any more
BEGUN = '<tool_call>\n{"name": "weather", "arguments": '
BEGUN_OF_ALL = '<tool_call>\n{"name": "'


def body_of(path: str, *functions: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """That forces a call of one of the functions, without thoughts."""
    functions = functions or (WEATHER,)
    body: dict[str, Any] = {
        "chat_template_kwargs": {"enable_thinking": False},
        "temperature": 0,
        "tool_choice": {"type": "any"} if path == MESSAGES else "required",
        "max_output_tokens" if path == RESPONSES else "max_tokens": 200,
    }
    if path == CHATS:
        body["tools"] = [{"type": "function", "function": each} for each in functions]
    elif path == MESSAGES:
        body["tools"] = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
    else:
        body["tools"] = [{"type": "function", **each} for each in functions]
    body["input" if path == RESPONSES else "messages"] = ASKED
    return {**body, **fields}


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def n_tokens(client: httpx.Client, text: str) -> int:
    """Of a text that begins a prompt."""
    fields = {"content": text, "add_special": True, "parse_special": True}
    return len(post(client, "/tokenize", fields)["tokens"])


def prompt_of(client: httpx.Client, *functions: dict[str, Any]) -> str:
    body = {**body_of(CHATS, *functions), "tool_choice": "auto"}
    return str(post(client, "/apply-template", body)["prompt"])


def usage_of(path: str, told: Any) -> tuple[int, int]:
    """Tokens of the prompt, and of the answer."""
    usage = told["usage"]
    if path == CHATS:
        return usage["prompt_tokens"], usage["completion_tokens"]
    cached = usage["cache_read_input_tokens"] if path == MESSAGES else 0
    return usage["input_tokens"] + cached, usage["output_tokens"]


def called(path: str, told: Any) -> tuple[str, Any]:
    """The one call's name, and what it was given."""
    if path == CHATS:
        (call,) = told["choices"][0]["message"]["tool_calls"]
        assert told["choices"][0]["message"]["content"] == ""
        return call["function"]["name"], json.loads(call["function"]["arguments"])
    (block,) = told["content"] if path == MESSAGES else told["output"]
    return block["name"], block["input"] if path == MESSAGES else json.loads(block["arguments"])


@pytest.mark.parametrize("path", [CHATS, MESSAGES, RESPONSES])
def test_the_beginning_counts_as_prompt(chats: httpx.Client, path: str) -> None:
    """Of a message's, too, whoever asks for the number alone; of the answer what the model said counts."""
    body = body_of(path)
    told = post(chats, path, body)
    n_prompt, n_said = usage_of(path, told)
    assert n_prompt == n_tokens(chats, prompt_of(chats, WEATHER) + BEGUN)
    count = "count_tokens" if path == MESSAGES else "input_tokens"
    assert post(chats, f"{path}/{count}", body)["input_tokens"] == n_prompt
    name, given = called(path, told)
    assert name == "weather" and given["city"] in ("Oslo", "Rome") and len(given["note"]) <= 5
    # a token for each of the letters would be the most, and one ends the text
    assert n_said <= len(json.dumps(given)) + 12
    most = "max_output_tokens" if path == RESPONSES else "max_tokens"
    exact = post(chats, path, {**body, most: n_said})
    assert (called(path, exact), usage_of(path, exact)) == ((name, given), (n_prompt, n_said))


@pytest.mark.parametrize("path", [CHATS, MESSAGES, RESPONSES])
@pytest.mark.parametrize("functions", [(WEATHER,), (WEATHER, STOP)])
def test_a_stream_tells_the_same(chats: httpx.Client, path: str, functions: Any) -> None:
    body = body_of(path, *functions, temperature=1, seed=7)
    whole = post(chats, path, body)
    found = [
        each for each in events(chats.post(path, json={**body, "stream": True}).text) if each != "[DONE]"
    ]
    if path == RESPONSES:
        (added,) = [each for each in found if each["type"] == "response.output_item.added"]
        name = added["item"]["name"]
        kind = "response.function_call_arguments.delta"
        text = "".join(each["delta"] for each in found if each["type"] == kind)
    elif path == MESSAGES:
        (start,) = [each for each in found if each["type"] == "content_block_start"]
        name = start["content_block"]["name"]
        deltas = [each["delta"] for each in found if each["type"] == "content_block_delta"]
        text = "".join(each["partial_json"] for each in deltas)
    else:
        deltas = [each["choices"][0]["delta"] for each in found]
        first, *others = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
        assert first["id"] and not any("name" in each["function"] for each in others)
        assert not any(delta.get("content") for delta in deltas)
        name = first["function"]["name"]
        text = first["function"]["arguments"] + "".join(each["function"]["arguments"] for each in others)
    assert (name, json.loads(text)) == called(path, whole)


def test_of_several_tools_the_name_is_the_models(chats: httpx.Client) -> None:
    """A bias decides: what the answers begin with ends in front of it."""
    for name in ("weather", "stop"):
        letter = post(chats, "/tokenize", {"content": f'"{name[0]}'})["tokens"][-1]
        body = body_of(CHATS, WEATHER, STOP, logit_bias=[[letter, 50]])
        told = post(chats, CHATS, body)
        assert called(CHATS, told)[0] == name
        wanted = n_tokens(chats, prompt_of(chats, WEATHER, STOP) + BEGUN_OF_ALL)
        assert told["usage"]["prompt_tokens"] == wanted
    named = {"type": "function", "function": {"name": "weather"}}
    told = post(chats, CHATS, body_of(CHATS, WEATHER, STOP, tool_choice=named))
    wanted = n_tokens(chats, prompt_of(chats, WEATHER, STOP) + BEGUN)
    assert (called(CHATS, told)[0], told["usage"]["prompt_tokens"]) == ("weather", wanted)


def test_what_follows_is_under_the_grammar(chats: httpx.Client) -> None:
    """Though the model would rather say another word all the time."""
    word = post(chats, "/tokenize", {"content": " Lily"})["tokens"][-1]
    for seed in range(3):
        bias = {"logit_bias": [[word, 60]], "temperature": 1.5, "seed": seed}
        _, given = called(CHATS, post(chats, CHATS, body_of(CHATS, **bias)))
        assert given.keys() == {"city", "note"} and given["city"] in ("Oslo", "Rome")
        assert given["note"] == " Lily"


def test_each_sample_goes_on_from_it(chats: httpx.Client) -> None:
    told = post(chats, CHATS, body_of(CHATS, n=3, temperature=1.5, seed=3))
    calls = [choice["message"]["tool_calls"][0] for choice in told["choices"]]
    assert {call["function"]["name"] for call in calls} == {"weather"}
    assert len({call["function"]["arguments"] for call in calls}) > 1
    assert told["usage"]["prompt_tokens"] == n_tokens(chats, prompt_of(chats, WEATHER) + BEGUN)


def test_probabilities_are_of_what_was_said(chats: httpx.Client) -> None:
    """The mark at the end is no choice of the model's, and nobody waits for it."""
    body = body_of(CHATS, logprobs=True, top_logprobs=2, verbose=True)
    told = post(chats, CHATS, body)
    ChatCompletion.model_validate(told)
    probs = told["choices"][0]["logprobs"]["content"]
    assert len(probs) == told["usage"]["completion_tokens"]
    text = "".join(each["token"] for each in probs)
    assert text == told["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] + "}\n"
    assert (told["__verbose"]["content"], told["__verbose"]["prompt"][-len(BEGUN) :]) == (text, BEGUN)


def test_probabilities_in_a_stream(chats: httpx.Client) -> None:
    body = body_of(CHATS, logprobs=True, stream=True, stream_options={"include_usage": True})
    *chunks, end, _ = events(chats.post(CHATS, json=body).text)
    choices = [each["choices"][0] for each in chunks]
    probs = [each for choice in choices for each in (choice.get("logprobs") or {}).get("content", ())]
    parts = [part["function"] for choice in choices for part in choice["delta"].get("tool_calls", ())]
    assert len(probs) == end["usage"]["completion_tokens"]
    said = "".join(part["arguments"] for part in parts)
    assert "".join(each["token"] for each in probs) == said + "}\n"


@pytest.mark.parametrize("path", [CHATS, MESSAGES, RESPONSES])
def test_the_next_request_finds_it_in_the_cache(chats: httpx.Client, path: str) -> None:
    body = body_of(path, WEATHER, {**STOP, "name": f"stop_{path[4:6]}"})
    told = [post(chats, path, body)["usage"] for _ in range(2)]
    details = "prompt_tokens_details" if path == CHATS else "input_tokens_details"
    if path == MESSAGES:
        n_cached, n_prompt = told[1]["cache_read_input_tokens"], sum(usage_of(path, {"usage": told[1]})[:1])
    else:
        n_cached, n_prompt = told[1][details]["cached_tokens"], usage_of(path, {"usage": told[1]})[0]
    assert n_cached == n_prompt - 1


def test_thoughts_come_before_it(chats: httpx.Client) -> None:
    """Those that the prompt opens: nothing is certain in front of them. Those that the request ended: all."""
    asked = body_of(CHATS, chat_template_kwargs={}, max_tokens=1)
    prompt = post(chats, "/apply-template", {**asked, "tool_choice": "auto"})["prompt"]
    assert prompt.endswith("<think>")
    assert post(chats, CHATS, asked)["usage"]["prompt_tokens"] == n_tokens(chats, prompt)
    thought = {"role": "assistant", "content": "", "reasoning_content": "Hm</think>"}
    told = post(chats, CHATS, {**asked, "messages": [*ASKED, thought], "max_tokens": 200})
    assert told["usage"]["prompt_tokens"] == n_tokens(chats, f"{prompt}Hm</think>{BEGUN}")
    assert told["choices"][0]["message"]["reasoning_content"] == "Hm"
    assert called(CHATS, told)[0] == "weather"


def test_words_that_the_request_began(chats: httpx.Client) -> None:
    said = {"role": "assistant", "content": "Well."}
    message = post(chats, CHATS, body_of(CHATS, messages=[*ASKED, said]))["choices"][0]["message"]
    assert message["content"] == "Well." and len(message["tool_calls"]) == 1


@pytest.fixture(scope="module")
def unread() -> Iterator[httpx.Client]:
    """A server that leaves calls in the content."""
    with (
        served(load, n_ctx_slot=512, chat_template=TEMPLATE, parses_replies=False) as (url, _),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


def test_a_call_that_is_content_is_said_as_a_whole(unread: httpx.Client) -> None:
    told = post(unread, CHATS, body_of(CHATS))
    text = told["choices"][0]["message"]["content"]
    assert text.startswith(BEGUN) and text.endswith("}\n</tool_call>")
    assert told["usage"]["prompt_tokens"] == n_tokens(unread, prompt_of(unread, WEATHER))
