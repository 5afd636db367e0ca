"""pydantic-ai: its models for OpenAI's chats and responses, and for Anthropic's messages."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import openai
import pydantic_ai
import pytest
from pydantic_ai import Agent, ModelRequest, NativeOutput, ToolOutput, exceptions
from pydantic_ai.direct import model_request_sync
from pydantic_ai.embeddings import Embedder
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from support.clients.asked import KEY, LONG, MODEL, N_AT_A_TIME, SERVER, SHORT, TOO_LONG, Weather

CHAT, RESPONSES, ANTHROPIC = "chat", "responses", "anthropic"
ALL = pytest.mark.parametrize("kind", [CHAT, RESPONSES, ANTHROPIC])
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}


def model_of(kind: str, key: str = KEY) -> Model[Any]:
    if kind == ANTHROPIC:
        claude = anthropic.AsyncAnthropic(base_url=SERVER, api_key=key, max_retries=0)
        return AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=claude))
    gpt = openai.AsyncOpenAI(base_url=f"{SERVER}/v1", api_key=key, max_retries=0)
    provider = OpenAIProvider(openai_client=gpt)
    return (OpenAIChatModel if kind == CHAT else OpenAIResponsesModel)(MODEL, provider=provider)


def agent_of(kind: str, output: Any = str, key: str = KEY, **settings: Any) -> Agent[None, Any]:
    settings = {"max_tokens": 200, **settings}
    return Agent(model_of(kind, key), output_type=output, model_settings=settings, retries=0)


@pytest.mark.client("pydantic-ai", "an answer")
@ALL
def test_an_answer(kind: str) -> None:
    run = agent_of(kind, max_tokens=16).run_sync("Hi")
    assert run.output and run.usage.output_tokens == 16
    assert run.all_messages()[-1].finish_reason == "length"


@pytest.mark.client("pydantic-ai", "`/v1/responses`")
def test_responses() -> None:
    assert agent_of(RESPONSES, max_tokens=16).run_sync("Hi").all_messages()[-1].provider_response_id


@pytest.mark.client("pydantic-ai", "a stream, and its usage")
@ALL
def test_a_stream(kind: str) -> None:
    async def streamed() -> tuple[list[str], int]:
        async with agent_of(kind, max_tokens=16).run_stream("Hi") as run:
            texts = [text async for text in run.stream_text(delta=True, debounce_by=None)]
            return texts, run.usage.output_tokens

    texts, n = asyncio.run(streamed())
    assert len(texts) > 5 and n == 16


@pytest.mark.client("pydantic-ai", "a forced call of a tool, and its result")
@ALL
def test_a_call(kind: str) -> None:
    asked: list[Any] = [ModelRequest.user_text_prompt("Hi")]
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    tool = pydantic_ai.ToolDefinition(name="weather", description="Tells.", parameters_json_schema=schema)
    parameters = ModelRequestParameters(function_tools=[tool], allow_text_output=False)
    settings: Any = {"max_tokens": 200, "tool_choice": ["weather"]}
    said = model_request_sync(
        model_of(kind), asked, model_settings=settings, model_request_parameters=parameters
    )
    (call,) = said.tool_calls
    assert (call.tool_name, call.args_as_dict()) == ("weather", {"city": "Oslo"})
    result = pydantic_ai.ToolReturnPart("weather", "warm", tool_call_id=call.tool_call_id)
    history: list[Any] = [*asked, said, ModelRequest(parts=[result])]
    assert agent_of(kind, max_tokens=16).run_sync(message_history=history).output


@pytest.mark.client("pydantic-ai", "a forced call in a stream")
@ALL
def test_a_call_in_a_stream(kind: str) -> None:
    async def streamed() -> Any:
        async with agent_of(kind, ToolOutput(Weather)).run_stream("Hi") as run:
            return [each async for each in run.stream_output()][-1]

    assert isinstance(asyncio.run(streamed()), Weather)


@pytest.mark.client("pydantic-ai", "an answer by a schema")
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *((kind, form) for kind in (CHAT, RESPONSES) for form in (ToolOutput, NativeOutput)),
        (ANTHROPIC, ToolOutput),  # pydantic-ai knows which of Anthropic's models have the other
    ],
)
def test_a_schema(kind: str, form: Any) -> None:
    assert isinstance(agent_of(kind, form(Weather)).run_sync("Hi").output, Weather)


@pytest.mark.client("pydantic-ai", "thoughts")
@ALL
def test_thoughts(kind: str) -> None:
    settings: Any = {"max_tokens": 16, "extra_body": THINKS}
    said = model_request_sync(model_of(kind), [ModelRequest.user_text_prompt("Hi")], model_settings=settings)
    assert [part.part_kind for part in said.parts] == ["thinking"]


@pytest.mark.client("pydantic-ai", "log probabilities")
def test_log_probabilities() -> None:
    settings: Any = {"openai_logprobs": True, "openai_top_logprobs": 2, "max_tokens": 3}
    told = agent_of(CHAT, **settings).run_sync("Hi").all_messages()[-1].provider_details["logprobs"]
    assert [len(each["top_logprobs"]) for each in told] == [2] * 3
    (part,) = agent_of(RESPONSES, **settings | {"max_tokens": 16}).run_sync("Hi").all_messages()[-1].parts
    assert part.content == "".join(each["token"] for each in part.provider_details["logprobs"])


@pytest.mark.client("pydantic-ai", "embeddings")
def test_embeddings() -> None:
    provider = OpenAIProvider(base_url=f"{SERVER}/v1", api_key=KEY)
    found = Embedder(OpenAIEmbeddingModel(MODEL, provider=provider)).embed_query_sync("Hi")
    assert len(found.embeddings[0]) == 64 and found.usage.input_tokens > 0


@pytest.mark.client("pydantic-ai", "how many tokens a body has")
@pytest.mark.parametrize("kind", [RESPONSES, ANTHROPIC])
def test_count(kind: str) -> None:
    asked = [ModelRequest.user_text_prompt("Hi")]
    counted = asyncio.run(model_of(kind).count_tokens(asked, None, ModelRequestParameters()))
    assert counted.input_tokens == agent_of(kind, max_tokens=16).run_sync("Hi").usage.input_tokens


@pytest.mark.client("pydantic-ai", "errors as exceptions of the client's own")
@ALL
def test_errors(kind: str) -> None:
    with pytest.raises(exceptions.ModelAuthenticationError):
        agent_of(kind, key="wrong").run_sync("Hi")
    with pytest.raises(exceptions.ModelContextWindowExceededError):
        agent_of(kind).run_sync(TOO_LONG[0]["content"])
    with pytest.raises(exceptions.ModelRequestRejectedError, match="seed"):
        agent_of(kind, extra_body={"seed": "a"}).run_sync("Hi")


@pytest.mark.client("pydantic-ai", "time limits")
@ALL
def test_a_time_limit(kind: str) -> None:
    with pytest.raises(exceptions.ModelTimeoutError):
        agent_of(kind, max_tokens=LONG, timeout=SHORT).run_sync("Hi")


@pytest.mark.client("pydantic-ai", "several requests at a time")
@ALL
def test_several_at_a_time(kind: str) -> None:
    async def all_of_them() -> list[Any]:
        agent = agent_of(kind, max_tokens=16)
        return await asyncio.gather(*(agent.run("Hi") for _ in range(N_AT_A_TIME)))

    assert all(run.output for run in asyncio.run(all_of_them()))
