"""/v1/responses, asked by OpenAI's own package."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from .test_chat import SCHEMA, THOUGHT
from .test_messages import chat_text

TOOLS: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
NO_THOUGHTS: Any = {"effort": "none"}


@pytest.fixture
def gpt(thinker: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.client("openai", "`/v1/responses`")
def test_it_says_what_a_chat_says(gpt: openai.OpenAI, chats: httpx.Client) -> None:
    said = gpt.responses.create(
        model="any",
        input="Hi",
        instructions="Be short.",
        max_output_tokens=24,
        temperature=0,
        reasoning=NO_THOUGHTS,
    )
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    assert said.output_text == chat_text(chats, messages=messages, reasoning_effort="none")["content"]
    assert said.usage is not None and said.usage.output_tokens == 24
    assert said.incomplete_details is not None and said.incomplete_details.reason == "max_output_tokens"
    body = {"input": "Hi", "instructions": "Be short.", "reasoning": NO_THOUGHTS}
    counted = chats.post("/v1/responses/input_tokens", json=body).json()["input_tokens"]
    assert counted == said.usage.input_tokens


def test_a_stream_adds_up(gpt: openai.OpenAI) -> None:
    """The package puts the events together, by the numbers in them."""
    asked: Any = {"model": "any", "input": "Hi", "extra_body": THOUGHT}
    with gpt.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message"]
    thought = final.output[0]
    assert thought.type == "reasoning" and thought.content is not None
    assert thought.content[0].text == "Hm </ ."
    assert final.output_text == "Well, yes" and final.status == "completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == "Well, yes"
    assert events[-1].type == "response.completed"
    whole = gpt.responses.create(**asked)
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.output_text == "Well, yes" and whole.status == "completed"


def test_log_probabilities_are_those_of_a_chat(gpt: openai.OpenAI, chats: httpx.Client) -> None:
    asked: Any = {"model": "any", "input": "Hi", "temperature": 0, "reasoning": NO_THOUGHTS}
    asked |= {"max_output_tokens": 16, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (item,) = gpt.responses.create(**asked).output
    assert item.type == "message" and item.content[0].type == "output_text"
    told = item.content[0].logprobs
    body = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 16}
    body |= {"logprobs": True, "top_logprobs": 2, "reasoning_effort": "none"}
    chat = chats.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert told and item.content[0].text == chat["message"]["content"]
    content = chat["logprobs"]["content"]
    assert [(each.token, each.bytes) for each in told] == [(each["token"], each["bytes"]) for each in content]
    numbers = [[each.logprob, *(top.logprob for top in each.top_logprobs)] for each in told]
    wanted = [[each["logprob"], *(top["logprob"] for top in each["top_logprobs"])] for each in content]
    assert all(mine == pytest.approx(other, abs=0.02) for mine, other in zip(numbers, wanted, strict=True))


@pytest.mark.parametrize("fields", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 1}])
def test_log_probabilities_are_of_the_text_alone(gpt: openai.OpenAI, fields: Any) -> None:
    """Not of the thoughts, nor of the mark behind them."""
    asked: Any = {"model": "any", "input": "Hi", "extra_body": THOUGHT, "temperature": 0, **fields}
    whole = gpt.responses.create(**asked).output[1]
    events = list(gpt.responses.create(**asked, stream=True))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert whole.type == "message" and whole.content[0].type == "output_text" and whole.content[0].logprobs
    for told in (whole.content[0].logprobs, [each for delta in deltas for each in delta.logprobs]):
        assert "".join(each.token for each in told) == "Well, yes"
    assert [each.token for each in done.logprobs] == [each.token for each in whole.content[0].logprobs]
    assert all(len(delta.logprobs) >= 1 for delta in deltas)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_is_forced(gpt: openai.OpenAI, choice: Any, streams: bool) -> None:
    asked: Any = {"model": "any", "input": "Hi", "tools": TOOLS, "tool_choice": choice, "temperature": 0}
    asked |= {"reasoning": NO_THOUGHTS, "max_output_tokens": 300}
    if streams:
        with gpt.responses.stream(**asked) as stream:
            said: Any = stream.get_final_response()
    else:
        said = gpt.responses.create(**asked)
    (call,) = said.output
    given = json.loads(call.arguments)
    assert call.type == "function_call" and call.name == "weather"
    assert given["city"] in ("Oslo", "Rome") and isinstance(given["warm"], bool)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
    history = [{"role": "user", "content": "Hi"}, call.to_dict(), result]
    again = gpt.responses.create(**asked | {"input": history, "tool_choice": "none", "max_output_tokens": 3})
    assert [item.type for item in again.output] == ["message"]


class Weather(pydantic.BaseModel):
    """What the answer is to be."""

    warm: bool
    days: int


def test_a_schema(gpt: openai.OpenAI) -> None:
    said = gpt.responses.parse(
        model="any", input="Hi", text_format=Weather, temperature=0, reasoning=NO_THOUGHTS
    )
    assert isinstance(said.output_parsed, Weather)


def test_errors(gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        gpt.responses.create(model="any", input="Hi", previous_response_id="resp_a")
    with pytest.raises(openai.BadRequestError, match="tokens"):
        list(gpt.responses.create(model="any", input="word " * 600, stream=True))


def test_answers_and_events_have_all_that_openais_types_require(chats: httpx.Client) -> None:
    """The package itself checks nothing of what it gets."""
    event_of = {
        kind.model_fields["type"].annotation.__args__[0]: pydantic.TypeAdapter(kind)
        for kind in typing.get_args(typing.get_args(ResponseStreamEvent)[0])
    }
    seen = set()
    calls = {"tools": TOOLS, "tool_choice": "required", "reasoning": NO_THOUGHTS, "metadata": {"a": "b"}}
    for more in (THOUGHT, {"max_output_tokens": 3, "top_logprobs": 2}, {**calls, "max_output_tokens": 300}):
        body = {"input": "Hi", "temperature": 0, **more}
        answer = chats.post("/v1/responses", json=body).json()
        pydantic.TypeAdapter(Response).validate_python(answer)
        assert answer["tools"] == [{"description": None, **tool} for tool in body.get("tools", [])]
        assert answer["metadata"] == body.get("metadata", {})
        for line in chats.post("/v1/responses", json={**body, "stream": True}).text.splitlines():
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                event_of[event["type"]].validate_python(event)
                seen.add(event["type"])
    kinds = ("created", "completed", "incomplete", "output_text.done", "function_call_arguments.done")
    assert {f"response.{kind}" for kind in kinds} <= seen
    thought = chats.post("/v1/responses", json={"input": "Hi", **THOUGHT}).json()["usage"]
    assert 0 < thought["output_tokens_details"]["reasoning_tokens"] < thought["output_tokens"]
    details = thought["input_tokens_details"]
    assert details["cached_tokens"] + details["cache_write_tokens"] == thought["input_tokens"]
