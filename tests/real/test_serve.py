"""`pykvgraph serve` on SmolLM2, asked by OpenAI's own package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support import real
from support.real import Libllama, prompt_of
from support.served import served_alone

import pykvgraph as kvg

MESSAGES: list[Any] = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is the capital of France? 🇫🇷"},
]
N_TOKENS = 24
TIE = 0.5  # logits: beside Q4_1 activations are rounded, and two orders of the same sums differ by tenths
ASKED: dict[str, Any] = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_tokens": N_TOKENS}
EXACT = ("-ctk", "f32", "-ctv", "f32", "-fa", "off")


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with (
        served_alone(real.SMOLLM2, "-c", "2048", "-np", "2", "-t", "1", *EXACT) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        yield client


def test_answers_are_the_likeliest(client: openai.OpenAI, smollm2: kvg.Model, libllama: Libllama) -> None:
    """By libllama, on what llama-cpp-python makes of the messages."""
    answer = client.chat.completions.create(**ASKED)
    prompt = libllama.model.encode(prompt_of(smollm2, MESSAGES), parse_special=True)
    text = answer.choices[0].message.content
    assert text and "Paris" in text
    said = libllama.model.encode(text)
    assert libllama.behind(prompt, said).max() <= TIE
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    ended = answer.choices[0].finish_reason == "stop"  # the token that ends is counted, and has no text
    assert answer.usage.completion_tokens == len(said) + ended


def test_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**ASKED).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**ASKED, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].finish_reason == whole.finish_reason
    assert len(chunks) > 5


def test_a_conversation_finds_its_beginning_in_the_cache(client: openai.OpenAI) -> None:
    said = client.chat.completions.create(**ASKED)
    more = [{"role": "assistant", "content": said.choices[0].message.content}]
    more.append({"role": "user", "content": "And of Italy?"})
    usage = client.chat.completions.create(**ASKED | {"messages": [*MESSAGES, *more]}).usage
    assert usage is not None and usage.prompt_tokens_details is not None and said.usage is not None
    assert usage.prompt_tokens_details.cached_tokens is not None
    assert usage.prompt_tokens_details.cached_tokens >= said.usage.prompt_tokens
