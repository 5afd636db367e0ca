"""Packages of OpenAI, Anthropic and LangChain: refused, out of time, many at a time, and less used calls."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from langchain_core.exceptions import ContextOverflowError, ModelAuthenticationError, ModelTimeoutError
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from support.clients.asked import HI, KEY, LONG, MODEL, N_AT_A_TIME, SHORT, TOO_LONG, Weather

ASKED: Any = {"model": MODEL, "messages": HI, "max_tokens": 4}
ONCE: Any = {"api_key": KEY, "max_retries": 0}


@pytest.fixture
def gpt(guarded: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{guarded}/v1", **ONCE) as client:
        yield client


@pytest.fixture
def claude(guarded: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=guarded, **ONCE) as client:
        yield client


def langchain(address: str, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(**{"base_url": f"{address}/v1", "model": MODEL, "max_tokens": 4, **ONCE, **settings})


@pytest.mark.client("openai", "errors as exceptions of the client's own")
def test_a_wrong_key_is_told(guarded: str, gpt: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    with pytest.raises(openai.AuthenticationError):
        gpt.with_options(api_key="wrong").chat.completions.create(**ASKED)
    with pytest.raises(anthropic.AuthenticationError):
        claude.with_options(api_key="wrong").messages.create(**ASKED)
    with pytest.raises(ModelAuthenticationError):
        langchain(guarded, api_key="wrong").invoke("Hi")


@pytest.mark.client("anthropic", "errors as exceptions of the client's own")
def test_what_anthropics_package_raises(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.create(**ASKED | {"messages": TOO_LONG})
    with pytest.raises(anthropic.NotFoundError):
        claude.models.retrieve("another")


@pytest.mark.client("langchain-openai", "errors as exceptions of the client's own")
def test_what_langchain_raises(guarded: str) -> None:
    with pytest.raises(ContextOverflowError):
        langchain(guarded).invoke(TOO_LONG[0]["content"])
    with pytest.raises(openai.BadRequestError, match="seed"):
        langchain(guarded, extra_body={"seed": "a"}).invoke("Hi")


@pytest.mark.client("openai", "time limits")
@pytest.mark.client("anthropic", "time limits")
@pytest.mark.client("langchain-openai", "time limits")
def test_whoever_waits_too_long_gives_up(
    guarded: str, gpt: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    long = ASKED | {"max_tokens": LONG}
    with pytest.raises(openai.APITimeoutError):
        gpt.with_options(timeout=SHORT).chat.completions.create(**long)
    with pytest.raises(anthropic.APITimeoutError):
        claude.with_options(timeout=SHORT).messages.create(**long)
    with pytest.raises(ModelTimeoutError):
        langchain(guarded, timeout=SHORT, max_tokens=LONG).invoke("Hi")


@pytest.mark.client("openai", "several requests at a time")
@pytest.mark.client("anthropic", "several requests at a time")
@pytest.mark.client("langchain-openai", "several requests at a time")
def test_several_at_a_time(guarded: str) -> None:
    async def all_of_them() -> list[Any]:
        async with (
            openai.AsyncOpenAI(base_url=f"{guarded}/v1", **ONCE) as gpt,
            anthropic.AsyncAnthropic(base_url=guarded, **ONCE) as claude,
        ):
            chats = [gpt.chat.completions.create(**ASKED) for _ in range(N_AT_A_TIME)]
            messages = [claude.messages.create(**ASKED) for _ in range(N_AT_A_TIME)]
            return await asyncio.gather(*chats, *messages, langchain(guarded).abatch(["Hi"] * N_AT_A_TIME))

    *said, of_langchain = asyncio.run(all_of_them())
    assert all(each.choices[0].message.content for each in said[:N_AT_A_TIME])
    assert all(each.content[0].text for each in said[N_AT_A_TIME:])
    assert len(of_langchain) == N_AT_A_TIME and all(each.content for each in of_langchain)


@pytest.mark.client("anthropic", "an answer by a schema")
def test_anthropics_schema(claude: anthropic.Anthropic) -> None:
    said = claude.messages.parse(**ASKED | {"max_tokens": 200}, output_format=Weather)
    assert isinstance(said.parsed_output, Weather)


@pytest.mark.client("anthropic", "the list of models")
def test_anthropics_list_of_models(claude: anthropic.Anthropic) -> None:
    (listed,) = claude.models.list()
    for model in (listed, claude.models.retrieve(MODEL)):
        anthropic.types.ModelInfo.model_validate(model.to_dict())  # the package itself checks nothing
        assert (model.id, model.display_name, model.type) == (MODEL, MODEL, "model")


@pytest.mark.client("openai", "thoughts")
def test_openais_thoughts(gpt: openai.OpenAI) -> None:
    """Its package has no field for them in a chat, and keeps the one that it doesn't know."""
    more = {"chat_template_kwargs": {"enable_thinking": True}}
    said: Any = gpt.chat.completions.create(**ASKED, extra_body=more).choices[0].message
    assert said.reasoning_content


@pytest.mark.client("openai", "how many tokens a body has")
def test_openais_count(gpt: openai.OpenAI) -> None:
    counted = gpt.responses.input_tokens.count(model=MODEL, input="Hi").input_tokens
    usage = gpt.chat.completions.create(**ASKED).usage
    assert usage is not None and counted == usage.prompt_tokens


@pytest.mark.client("langchain-openai", "a stream, and its usage")
def test_langchains_usage(guarded: str) -> None:
    whole: Any = None
    for chunk in langchain(guarded, stream_usage=True, temperature=0).stream("Hi"):
        whole = chunk if whole is None else whole + chunk
    said = langchain(guarded, temperature=0).invoke("Hi")
    assert whole.content == said.content and whole.usage_metadata["output_tokens"] == 4


@pytest.mark.client("langchain-openai", "log probabilities")
def test_langchains_log_probabilities(guarded: str) -> None:
    model = langchain(guarded, temperature=0, logprobs=True, top_logprobs=2)
    content = model.invoke("Hi").response_metadata["logprobs"]["content"]
    assert [each["logprob"] == each["top_logprobs"][0]["logprob"] for each in content] == [True] * 4


@pytest.mark.client("langchain-openai", "embeddings")
def test_langchains_embeddings(guarded: str) -> None:
    """check_embedding_ctx_length=False: or LangChain sends tokens of OpenAI's vocabulary."""
    settings: Any = {"base_url": f"{guarded}/v1", "check_embedding_ctx_length": False, **ONCE}
    found = OpenAIEmbeddings(model=MODEL, **settings).embed_documents(["One", "Two"])
    assert [len(each) for each in found] == [64, 64]
