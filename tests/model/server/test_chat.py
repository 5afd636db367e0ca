"""/v1/chat/completions: thoughts, calls of tools, and schemas."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest
from support.served import events, served

import pykvgraph as kvg
from pykvgraph.server.requests.built_in_template import BuiltInTemplate

from .conftest import STORIES, TEMPLATE, load

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
THOUGHT = {"grammar": 'root ::= "Hm </ .</think>Well, yes"'}  # all that the model can say


def post(client: httpx.Client, path: str = PATH, **fields: Any) -> Any:
    reply = client.post(path, json={"messages": MESSAGES, "max_tokens": 200, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def message(client: httpx.Client, **fields: Any) -> Any:
    return post(client, **fields)["choices"][0]["message"]


def streamed(client: httpx.Client, **fields: Any) -> tuple[dict[str, Any], str]:
    """What the deltas amount to, and why it ended."""
    body = {"messages": MESSAGES, "max_tokens": 200, "stream": True, **fields}
    *chunks, done = events(client.post(PATH, json=body).text)
    assert done == "[DONE]"
    whole: dict[str, Any] = {}
    for chunk in chunks:
        for key, value in chunk["choices"][0]["delta"].items():
            if key == "tool_calls":
                _put_together(whole.setdefault(key, []), value)
                continue
            whole[key] = whole.get(key) or type(value)() if value is not None else None
            if value is not None:
                whole[key] += value
    return whole, chunks[-1]["choices"][0]["finish_reason"]


def _put_together(calls: list[Any], parts: list[Any]) -> None:
    """As OpenAI's documentation has it: by the index; the name and the id come first, and once."""
    for part in parts:
        if part["index"] == len(calls):
            assert part["id"] and part["function"]["name"]
            calls.append(part)
        else:
            assert part.keys() == {"index", "function"} and part["function"].keys() == {"arguments"}
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


def without_thoughts(**fields: Any) -> dict[str, Any]:
    return {"chat_template_kwargs": {"enable_thinking": False}, **fields}


def begun(text: str) -> list[dict[str, str]]:
    return [*MESSAGES, {"role": "assistant", "content": text}]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_is_forced(chats: httpx.Client, choice: Any, streams: bool) -> None:
    fields = without_thoughts(tools=TOOLS, tool_choice=choice, temperature=1.5, seed=4)
    if streams:
        said, reason = streamed(chats, **fields)
        assert said["tool_calls"][0].pop("index") == 0
        assert said.pop("content") is None
    else:
        choice_told = post(chats, **fields)["choices"][0]
        said, reason = choice_told["message"], choice_told["finish_reason"]
        assert said.pop("content") == "" and said.pop("refusal", 1) is None
    assert reason == "tool_calls"
    (call,) = said.pop("tool_calls")
    assert said == {"role": "assistant"}
    assert call["type"] == "function" and call["id"]
    given = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "weather":
        assert given["city"] in ("Oslo", "Rome") and isinstance(given["warm"], bool)
    else:
        assert choice == "required" and given == {}


def test_several_samples_each_call(chats: httpx.Client) -> None:
    told = post(chats, **without_thoughts(tools=TOOLS, tool_choice=NAMED, n=2, temperature=1, seed=1))
    ids = {each["message"]["tool_calls"][0]["id"] for each in told["choices"]}
    assert [each["finish_reason"] for each in told["choices"]] == ["tool_calls"] * 2
    assert len(ids) == 2


CALL = '<tool_call>\n{"name": "%s", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ["stop", "weather"]),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, ["stop"]),
        ({"tool_choice": "none"}, []),
        ({"tools": []}, []),
    ],
)
def test_calls_that_nobody_forced(chats: httpx.Client, fields: Any, names: list[str]) -> None:
    """The request's last message begins the answer, so that it certainly calls."""
    text = "Yes. " + CALL % "stop" + "\n" + CALL % "weather"
    body = without_thoughts(messages=begun(text), max_tokens=4) | {"tools": TOOLS, **fields}
    said = message(chats, **body)
    assert [call["function"]["name"] for call in said.get("tool_calls", ())] == names
    assert said["content"].startswith(text if not names else "Yes.")
    assert ("<tool_call>" in said["content"]) == (not names)


def test_results_of_tools_are_told(chats: httpx.Client) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    history = [
        {"role": "developer", "content": "Be short."},
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "warm"},
    ]
    prompt = post(chats, "/apply-template", messages=history, tools=TOOLS)["prompt"]
    assert prompt == (
        "weather/3 stop/3 <|system|>Be short.</s><|user|>Hi</s><|assistant|><tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call></s><|tool|>warm</s>'
        "<|assistant|><think>"
    )
    counted = post(chats, f"{PATH}/input_tokens", messages=history, tools=TOOLS)["input_tokens"]
    told = post(chats, messages=history, tools=TOOLS, max_tokens=2)
    assert counted == told["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("form", "reasoning", "content"),
    [
        ("auto", "Hm </ .", "Well, yes"),
        ("deepseek", "Hm </ .", "Well, yes"),
        ("none", None, "<think>Hm </ .</think>Well, yes"),
    ],
)
def test_thoughts(chats: httpx.Client, form: str, reasoning: str | None, content: str) -> None:
    said = message(chats, reasoning_format=form, **THOUGHT)
    assert (said.get("reasoning_content"), said["content"]) == (reasoning, content)
    deltas, reason = streamed(chats, reasoning_format=form, **THOUGHT)
    assert (deltas.get("reasoning_content"), deltas["content"], reason) == (reasoning, content, "stop")


def test_thoughts_that_the_request_began(chats: httpx.Client) -> None:
    grammar = {"grammar": 'root ::= "!</think>Yes"'}
    messages = [*MESSAGES, {"role": "assistant", "content": "", "reasoning_content": "Hm"}]
    said = message(chats, messages=messages, **grammar)
    assert (said["reasoning_content"], said["content"]) == ("Hm!", "Yes")
    said = message(chats, messages=begun("So"), grammar='root ::= "!"')
    assert said == {"role": "assistant", "content": "So!", "refusal": None}


@pytest.mark.parametrize(
    "fields", [{"reasoning_effort": "none"}, {"thinking_budget_tokens": 0}, without_thoughts()]
)
def test_a_request_without_thoughts(chats: httpx.Client, fields: Any) -> None:
    assert post(chats, "/apply-template", **fields)["prompt"].endswith("<|assistant|>")
    assert "<think>" in post(chats, "/apply-template")["prompt"]


def test_a_server_without_thoughts() -> None:
    """As --reasoning-format none --reasoning-budget 0 set it."""
    settings = {"reasoning_format": "none", "reasoning_budget": 0}
    with served(load, chat_template=TEMPLATE, **settings) as (url, _), httpx.Client(base_url=url) as client:
        assert post(client, "/apply-template")["prompt"].endswith("<|assistant|>")
        said = message(client, grammar='root ::= "<think>a</think>b"')
        assert said == {"role": "assistant", "content": "<think>a</think>b", "refusal": None}


def test_json_behind_thoughts(chats: httpx.Client) -> None:
    """The schema begins where the thoughts end, which the request has begun."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    messages = [*MESSAGES, {"role": "assistant", "content": "", "reasoning_content": "Hm</think>"}]
    for tools in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        said = message(chats, messages=messages, response_format=form, temperature=0, **tools)
        assert said["reasoning_content"] == "Hm"
        assert json.loads(said["content"]).keys() == {"city", "warm"}


def test_json_or_a_call(chats: httpx.Client) -> None:
    """With tools and a schema the model may do either; a bias makes it call."""
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["red"]}}}
    fields = without_thoughts(tools=TOOLS, response_format=form, temperature=0)
    assert json.loads(message(chats, **fields)["content"]) == "red"
    mark = chats.post("/tokenize", json={"content": "<"}).json()["tokens"][-1]
    assert message(chats, **fields, logit_bias=[[mark, 100]])["tool_calls"]


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"tool_choice": "often"}, 400, "Invalid tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "no"}}}, 400, "none of the tools"),
        ({"tool_choice": "required"}, 400, "no tools"),
        ({"tools": [{"type": "x", "function": {"name": "a"}}]}, 400, "a tool must be"),
        ({"tools": TOOLS, "grammar": 'root ::= "a"'}, 400, "grammar"),
        ({"json_schema": {}, "grammar": 'root ::= "a"'}, 400, "both"),
        ({"parallel_tool_calls": "no"}, 400, "parallel_tool_calls"),
        ({"reasoning_format": "loud"}, 400, "reasoning_format"),
        ({"reasoning_budget_tokens": -2}, 400, "reasoning_budget_tokens"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, 400, "enable_thinking"),
    ],
)
def test_what_a_chat_cannot_ask(chats: httpx.Client, fields: Any, code: int, text: str) -> None:
    reply = chats.post(PATH, json={"messages": MESSAGES, "max_tokens": 2, **fields})
    assert (reply.status_code, text in reply.json()["error"]["message"]) == (code, True), reply.text


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize(
    "begun",
    [
        {"content": "<think>two and two</think>The answer is"},
        {"content": "The answer is", "reasoning_content": "two and two"},
    ],
)
def test_a_beginning_that_has_its_thoughts(chats: httpx.Client, begun: dict[str, str], thinks: bool) -> None:
    """Between marks or in a field of their own: the prompt has them once, the answer tells them apart."""
    fields = {
        "messages": [*MESSAGES, {"role": "assistant", **begun}],
        "chat_template_kwargs": {"enable_thinking": thinks},
        "max_tokens": 3,
        "temperature": 0,
    }
    prompt = post(chats, "/apply-template", **fields)["prompt"]
    assert prompt.endswith("<think>two and two</think>The answer is")
    assert (prompt.count("<think>"), prompt.count("</think>")) == (1, 1)
    told = message(chats, **fields)
    assert told["reasoning_content"] == "two and two" and told["content"].startswith("The answer is")


def test_without_jinja() -> None:
    """libllama recognises ChatML, which is the template of a model that has none."""
    with served(load, jinja=False) as (url, _), httpx.Client(base_url=url) as client:
        said = [{"role": "developer", "content": [{"type": "text", "text": "é"}]}, *MESSAGES]
        prompt = post(client, "/apply-template", messages=said)["prompt"]
        assert prompt == (
            "<|im_start|>system\né<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )
        assert message(client, grammar='root ::= "<think>a</think>"')["content"] == "<think>a</think>"
        for content in ("\0", "\ud800"):
            body = json.dumps({"messages": [{"role": "user", "content": content}]})
            assert client.post(PATH, content=body).status_code == 400
        assert client.post(PATH, json={"messages": MESSAGES, "tools": TOOLS}).status_code == 400
    with pytest.raises(kvg.UnsupportedError, match="no-jinja"):
        BuiltInTemplate("x")


def test_marks_that_are_control_tokens(tmp_path: Path) -> None:
    """Their names are in no text of tokens, but in what is taken apart."""
    file = tmp_path / "marked.gguf"
    file.write_bytes(STORIES.read_bytes())
    fields = gguf.GGUFReader(file, "r+").fields
    pieces, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    mark = pieces.contents().index("▁happy")  # of as many bytes as the mark has
    pieces.parts[pieces.data[mark]][:] = list(b"</think>")
    kinds.parts[kinds.data[mark]][0] = gguf.TokenType.CONTROL

    def load_marked() -> kvg.Engine:
        return kvg.Engine(kvg.Model(file, device="cpu"), n_ctx=256, n_seq_max=4)

    with served(load_marked, chat_template=TEMPLATE) as (url, _), httpx.Client(base_url=url) as client:
        said = post(client, grammar='root ::= "a</think>b"', logit_bias=[[mark, 50]])
        assert said["choices"][0]["message"]["reasoning_content"] == "a"
        assert said["choices"][0]["message"]["content"] == "b"
        assert said["usage"]["completion_tokens"] == 4  # a, the mark, b, and the end


@pytest.mark.parametrize(
    "refused",
    [
        {"content": None, "refusal": "I can't."},
        {"content": [{"type": "refusal", "refusal": "I can't."}]},
    ],
)
def test_a_refusal_that_comes_back(chats: httpx.Client, refused: Any) -> None:
    """OpenAI's models say no in a field, or a part, of its own."""
    history = [*MESSAGES, {"role": "assistant", **refused}, *MESSAGES]
    reply = chats.post("/apply-template", json={"messages": history})
    assert "<|assistant|>I can't.</s>" in reply.json()["prompt"]


def test_a_template_that_asks_for_the_date() -> None:
    template = "{{ date_string }}/{{ datetime }}/{{ messages[0].content }}"
    with served(load, chat_template=template) as (url, _):
        days = [datetime.date.today()]
        told = httpx.post(f"{url}/apply-template", json={"messages": MESSAGES}).json()["prompt"]
        own = {"messages": MESSAGES, "chat_template_kwargs": {"date_string": "then"}}
        other = httpx.post(f"{url}/apply-template", json=own).json()["prompt"]
        days.append(datetime.date.today())
    months = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
    assert told in [
        f"{day.day:02} {months[day.month - 1]} {day.year}/{months[day.month - 1]} {day.day:02} {day.year}/Hi"
        for day in days
    ]
    assert other.startswith("then/")


def test_the_first_event_says_who_speaks_and_no_times(chats: httpx.Client) -> None:
    """No token was there to be measured; llama-server has it so."""
    body = {"messages": MESSAGES, "max_tokens": 3, "stream": True, "timings_per_token": True}
    first, *others, _ = events(chats.post(PATH, json=body).text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert "timings" not in first
    assert len(others) > 1 and all("timings" in each for each in others)


def test_a_beginning_that_a_body_insists_on() -> None:
    """Also where the server takes it for a message like others."""
    body = {"messages": begun("Well"), "add_generation_prompt": False, "continue_final_message": True}
    with served(load, chat_template=TEMPLATE, prefills=False) as (url, _):
        told = httpx.post(f"{url}/apply-template", json=body).json()["prompt"]
        plain = httpx.post(f"{url}/apply-template", json={"messages": begun("Well")}).json()["prompt"]
        body["messages"] = MESSAGES
        refused = httpx.post(f"{url}/apply-template", json=body)
    assert told.endswith("Well")
    assert "Well</s><|assistant|>" in plain
    assert refused.status_code == 400 and "continue_final_message" in refused.json()["error"]["message"]
