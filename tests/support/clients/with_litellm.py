"""LiteLLM, as people use it: by its providers for OpenAI's interface, vLLM's and Anthropic's."""

from __future__ import annotations

import asyncio
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it looks for prices in the web

import litellm
import pytest

from support.clients.asked import HI, KEY, LONG, MODEL, N_AT_A_TIME, SERVER, SHORT, TOO_LONG, TOOLS, Weather

litellm.suppress_debug_info = True
OPENAI: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{SERVER}/v1"}
VLLM: dict[str, Any] = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{SERVER}/v1"}
ANTHROPIC: dict[str, Any] = {"model": f"anthropic/{MODEL}", "api_base": SERVER}
ALLOWED = {"allowed_openai_params": ["thinking"]}  # of a model that LiteLLM does not know
IDS = ["openai", "vllm", "anthropic"]
PROVIDERS = pytest.mark.parametrize("provider", [OPENAI, VLLM, ANTHROPIC], ids=IDS)
OPENAIS = pytest.mark.parametrize("provider", [OPENAI, VLLM], ids=IDS[:2])


def ask(provider: dict[str, Any], **fields: Any) -> Any:
    given = {"messages": HI, "max_tokens": 200, "api_key": KEY, "max_retries": 0, **fields}
    return litellm.completion(**provider, **given)


@pytest.mark.client("litellm", "an answer")
@PROVIDERS
def test_an_answer(provider: dict[str, Any]) -> None:
    said = ask(provider, max_tokens=8)
    assert said.choices[0].message.content and said.choices[0].finish_reason == "length"
    assert said.usage.completion_tokens == 8


@pytest.mark.client("litellm", "a stream, and its usage")
@PROVIDERS
def test_a_stream(provider: dict[str, Any]) -> None:
    whole = ask(provider, max_tokens=8, temperature=0).choices[0].message.content
    chunks = list(
        ask(provider, max_tokens=8, temperature=0, stream=True, stream_options={"include_usage": True})
    )
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert len(texts) > 5 and "".join(texts) == whole
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == 8


@pytest.mark.client("litellm", "a forced call of a tool, and its result")
@PROVIDERS
def test_a_call(provider: dict[str, Any]) -> None:
    said = ask(provider, tools=TOOLS, tool_choice="required").choices[0]
    assert said.finish_reason == "tool_calls"
    (call,) = said.message.tool_calls
    assert call.function.name == "weather"
    Weather.model_validate_json(call.function.arguments, strict=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "warm"}
    again = ask(provider, messages=[*HI, said.message, result], tools=TOOLS, max_tokens=8)
    assert again.usage.prompt_tokens > 0


@pytest.mark.client("litellm", "a forced call in a stream")
@PROVIDERS
def test_a_call_in_a_stream(provider: dict[str, Any]) -> None:
    said = litellm.stream_chunk_builder(
        list(ask(provider, tools=TOOLS, tool_choice="required", stream=True))
    ).choices[0]
    Weather.model_validate_json(said.message.tool_calls[0].function.arguments, strict=True)


@pytest.mark.client("litellm", "an answer by a schema")
@PROVIDERS
def test_a_schema(provider: dict[str, Any]) -> None:
    said = ask(provider, response_format=Weather).choices[0].message.content
    Weather.model_validate_json(said, strict=True)


@pytest.mark.client("litellm", "thoughts")
@pytest.mark.parametrize(
    ("provider", "more"),
    [
        (OPENAI, {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}),
        (VLLM, {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}),
        (ANTHROPIC, {"thinking": {"type": "enabled", "budget_tokens": 1024}, **ALLOWED}),
    ],
    ids=IDS,
)
def test_thoughts(provider: dict[str, Any], more: dict[str, Any]) -> None:
    said = ask(provider, max_tokens=8, **more)
    assert said.choices[0].message.reasoning_content


@pytest.mark.client("litellm", "`/v1/responses`")
def test_responses() -> None:
    said = litellm.responses(**OPENAI, input="Hi", max_output_tokens=16, api_key=KEY)
    assert said.output[0].content[0].text and said.usage.output_tokens == 16


@pytest.mark.client("litellm", "log probabilities")
@OPENAIS
def test_log_probabilities(provider: dict[str, Any]) -> None:
    said = ask(provider, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2).choices[0]
    content = said.logprobs.content
    assert len(content) == 3 and "".join(each.token for each in content) == said.message.content
    assert all(each.logprob == each.top_logprobs[0].logprob for each in content)


@pytest.mark.client("litellm", "log probabilities of a prompt (`echo`)")
def test_echo() -> None:
    model = {"model": f"text-completion-openai/{MODEL}", "api_base": f"{SERVER}/v1", "api_key": KEY}
    said = litellm.text_completion(**model, prompt="Once upon a", max_tokens=1, echo=True, logprobs=1)
    told = said.choices[0].logprobs
    assert said.choices[0].text.startswith("Once upon a")
    assert told.token_logprobs[0] is None and all(each <= 0 for each in told.token_logprobs[1:])


@pytest.mark.client("litellm", "embeddings")
@OPENAIS
def test_embeddings(provider: dict[str, Any]) -> None:
    found = litellm.embedding(**provider, api_key=KEY, input=["One", "Two"])
    assert [len(each["embedding"]) for each in found.data] == [64, 64]


@pytest.mark.client("litellm", "the list of models")
def test_models() -> None:
    given = {"check_provider_endpoint": True, "custom_llm_provider": "openai"}
    assert litellm.get_valid_models(**given, api_base=SERVER, api_key=KEY) == [MODEL]


@pytest.mark.client("litellm", "how many tokens a body has")
def test_count() -> None:
    counted = asyncio.run(litellm.acount_tokens(**ANTHROPIC, messages=HI, api_key=KEY))
    assert counted.total_tokens == ask(ANTHROPIC, max_tokens=1).usage.prompt_tokens


@pytest.mark.client("litellm", "errors as exceptions of the client's own")
@PROVIDERS
def test_errors(provider: dict[str, Any]) -> None:
    with pytest.raises(litellm.AuthenticationError):
        ask(provider, api_key="wrong")
    for more in ({}, {"stream": True}):
        with pytest.raises(litellm.ContextWindowExceededError):
            list(ask(provider, messages=TOO_LONG, **more))
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask(provider, temperature="hot")


@pytest.mark.client("litellm", "time limits")
@PROVIDERS
def test_a_time_limit(provider: dict[str, Any]) -> None:
    with pytest.raises(litellm.Timeout):
        ask(provider, max_tokens=LONG, timeout=SHORT)


@pytest.mark.client("litellm", "several requests at a time")
@PROVIDERS
def test_several_at_a_time(provider: dict[str, Any]) -> None:
    async def all_of_them() -> list[Any]:
        given = {"messages": HI, "max_tokens": 4, "api_key": KEY}
        return await asyncio.gather(*(litellm.acompletion(**provider, **given) for _ in range(N_AT_A_TIME)))

    assert all(said.choices[0].message.content for said in asyncio.run(all_of_them()))
