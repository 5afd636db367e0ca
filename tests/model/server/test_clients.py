"""OpenAI's package and LangChain, as people use them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from .test_chat import NAMED, TOOLS, without_thoughts
from .test_messages import chat_text

HI: Any = [{"role": "user", "content": "Hi"}]


class Weather(pydantic.BaseModel):
    """How warm a city is."""

    city: Literal["Oslo", "Rome"]
    warm: bool


def check(given: Any) -> None:
    """That these arguments are valid."""
    Weather.model_validate(given, strict=True)


@pytest.fixture
def gpt(thinker: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.client("openai", "an answer")
@pytest.mark.client("openai", "a stream, and its usage")
def test_openai_plain_and_streaming(gpt: openai.OpenAI, chats: httpx.Client) -> None:
    asked: Any = {
        "model": "any",
        "messages": HI,
        "temperature": 0,
        "max_tokens": 24,
        "reasoning_effort": "none",
    }
    text = gpt.chat.completions.create(**asked).choices[0].message.content
    assert text == chat_text(chats, **without_thoughts())["content"]
    stream = gpt.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert last.usage.completion_tokens == 24


@pytest.mark.client("openai", "a forced call of a tool, and its result")
@pytest.mark.client("openai", "a forced call in a stream")
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_openai_tools(gpt: openai.OpenAI, choice: Any) -> None:
    asked: Any = {"model": "any", "messages": HI, "tools": TOOLS[:1], "tool_choice": choice}
    asked |= {"max_tokens": 300, "reasoning_effort": "none", "seed": 3}
    said = gpt.chat.completions.create(**asked).choices[0]
    assert said.finish_reason == "tool_calls" and said.message.tool_calls
    with gpt.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.tool_calls
    for call in (said.message.tool_calls[0], final.message.tool_calls[0]):
        assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
        assert call.function.name == "weather"
        check(Weather.model_validate_json(call.function.arguments).model_dump())
    result = {"role": "tool", "tool_call_id": said.message.tool_calls[0].id, "content": "warm"}
    history = [*HI, said.message, result]
    again = gpt.chat.completions.create(**asked | {"messages": history, "tool_choice": "none"})
    assert not again.choices[0].message.tool_calls


@pytest.mark.client("openai", "an answer by a schema")
def test_openai_schemas(gpt: openai.OpenAI) -> None:
    asked: Any = {"model": "any", "messages": HI, "reasoning_effort": "none", "seed": 3}
    said = gpt.chat.completions.parse(**asked, response_format=Weather).choices[0].message.parsed
    assert said is not None
    check(said.model_dump())


@pytest.mark.client("openai", "errors as exceptions of the client's own")
def test_openai_errors(gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        gpt.chat.completions.create(model="any", messages=HI, extra_body={"tool_choice": "often"})
    with pytest.raises(openai.BadRequestError, match="tokens") as caught:
        gpt.chat.completions.create(model="any", messages=[{"role": "user", "content": "a " * 900}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        gpt.files.list()


@pytest.fixture
def langchain(thinker: str) -> ChatOpenAI:
    settings: Any = {"base_url": f"{thinker}/v1", "api_key": "none", "max_tokens": 300, "max_retries": 0}
    return ChatOpenAI(model="any", temperature=0, reasoning_effort="none", **settings)


@pytest.mark.client("langchain-openai", "an answer")
def test_langchain_plain_and_streaming(langchain: ChatOpenAI, chats: httpx.Client) -> None:
    model = langchain.model_copy(update={"max_tokens": 24})
    said = model.invoke("Hi")
    assert said.content == chat_text(chats, **without_thoughts())["content"]
    assert said.usage_metadata is not None and said.usage_metadata["output_tokens"] == 24
    chunks = list(model.stream("Hi"))
    assert "".join(str(chunk.content) for chunk in chunks) == said.content


@pytest.mark.client("langchain-openai", "a forced call of a tool, and its result")
@pytest.mark.client("langchain-openai", "a forced call in a stream")
@pytest.mark.parametrize("choice", ["any", "Weather"])
def test_langchain_tools(langchain: ChatOpenAI, choice: str) -> None:
    model = langchain.bind_tools([Weather], tool_choice=choice)
    said = model.invoke("Hi")
    assert isinstance(said, AIMessage)
    (call,) = said.tool_calls
    assert call["name"] == "Weather"
    check(call["args"])
    whole: Any = None
    for chunk in model.stream("Hi"):
        assert isinstance(chunk, AIMessageChunk)
        whole = chunk if whole is None else whole + chunk
    check(whole.tool_calls[0]["args"])
    result = ToolMessage("warm", tool_call_id=call["id"])
    assert langchain.invoke([HumanMessage("Hi"), said, result], max_tokens=4).content


@pytest.mark.client("langchain-openai", "an answer by a schema")
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_schemas(langchain: ChatOpenAI, method: Any) -> None:
    said = langchain.with_structured_output(Weather, method=method).invoke("Hi")
    assert isinstance(said, Weather)
    check(said.model_dump())


@pytest.mark.client("langchain-openai", "`/v1/responses`")
def test_langchain_by_responses(langchain: ChatOpenAI) -> None:
    model = langchain.model_copy(
        update={"use_responses_api": True, "max_tokens": 8, "reasoning_effort": None}
    )
    model = model.model_copy(update={"reasoning": {"effort": "none"}})
    said = model.invoke("Hi")
    assert said.text
    assert "".join(chunk.text for chunk in model.stream("Hi")) == said.text
