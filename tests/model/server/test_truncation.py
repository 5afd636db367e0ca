"""`truncation` of /v1/responses: no more items go than must, and what stays is in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

N_CTX = 512
AUTO: Any = {"truncation": "auto", "reasoning": {"effort": "none"}}


@pytest.fixture
def gpt(thinker: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinker}/v1", api_key="none", max_retries=0) as client:
        yield client


def items(n: int) -> list[Any]:
    roles = ("user", "assistant")
    words = "the dog ran to the park and " * 3
    return [{"role": roles[i % 2], "content": f"{i}: {words}"} for i in range(n)]


def counted(client: httpx.Client, given: Any, **fields: Any) -> int:
    asked = {"input": given, "reasoning": {"effort": "none"}, **fields}
    reply = client.post("/v1/responses/input_tokens", json=asked)
    assert reply.status_code == 200, reply.text
    return int(reply.json()["input_tokens"])


@pytest.mark.parametrize(("n_most", "room"), [(8, 8), (400, 128), (None, 128)])
def test_the_first_items_go_and_no_more(
    gpt: openai.OpenAI, chats: httpx.Client, n_most: int | None, room: int
) -> None:
    """Instructions stay, as a field and as an item. The answer has the room that it wants, or a quarter."""
    system = {"role": "developer", "content": "Be kind."}
    talk = items(21)
    given = [*talk[:2], system, *talk[2:]]
    counts = [counted(chats, [system, *talk[n:]], instructions="Be short.") for n in range(2, 21)]
    n_gone, n_left = next((n, count) for n, count in enumerate(counts, 2) if count <= N_CTX - room)
    assert n_gone > 2 and counts[n_gone - 3] > N_CTX - room
    limit: Any = {} if n_most is None else {"max_output_tokens": n_most}
    said = gpt.responses.create(
        model="any", input=given, instructions="Be short.", temperature=0, **AUTO, **limit
    )
    assert said.usage is not None and said.usage.input_tokens == n_left
    assert said.truncation == "auto"
    by_hand: Any = {"input": [system, *talk[n_gone:]], "instructions": "Be short.", "max_output_tokens": 1}
    again = chats.post("/v1/responses", json={**by_hand, "reasoning": {"effort": "none"}}).json()
    assert again["usage"]["input_tokens_details"]["cached_tokens"] == n_left - 1, "another prompt"
    assert again["truncation"] == "disabled"
    assert counted(chats, given, instructions="Be short.", truncation="auto", **limit) == n_left


def test_a_result_goes_with_its_call(gpt: openai.OpenAI, chats: httpx.Client) -> None:
    call: Any = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    result: Any = {"type": "function_call_output", "call_id": "a", "output": "a dog " * 100}
    tail: Any = [{"role": "user", "content": "the park " * 60}]
    asked: Any = {"model": "any", "max_output_tokens": 8, **AUTO}
    said = gpt.responses.create(input=[*items(1), call, result, *tail], **asked)
    assert said.usage is not None and said.usage.input_tokens == counted(chats, tail)
    last: Any = [*items(20), call, result]  # the result is what is to be answered
    kept = gpt.responses.create(input=last, **asked)
    counts = [counted(chats, [*items(20)[n:], call, result]) for n in range(15, 21)]
    assert kept.usage is not None and kept.usage.input_tokens in counts


def test_what_fits_stays_and_what_can_not_fit_is_refused(gpt: openai.OpenAI, chats: httpx.Client) -> None:
    few: Any = items(3)
    said = gpt.responses.create(model="any", input=few, max_output_tokens=2, **AUTO)
    assert said.usage is not None and said.usage.input_tokens == counted(chats, few)
    near: Any = [*items(1), {"role": "user", "content": "the park " * 120}]
    n = counted(chats, near[1:])
    assert N_CTX - 128 < n < N_CTX  # it fits, though not with all the room that an answer may want
    told = gpt.responses.create(model="any", input=near, **AUTO).usage
    assert told is not None and told.input_tokens == n
    many: Any = [*items(2), {"role": "user", "content": "the park and " * 300}]
    for fields in (AUTO, {"truncation": "disabled"}, {}):
        with pytest.raises(openai.BadRequestError, match="prompt is too long"):
            gpt.responses.create(model="any", input=many, **fields)
    with pytest.raises(openai.BadRequestError, match="prompt is too long"):
        gpt.responses.create(model="any", input=items(30), truncation="disabled")
    with pytest.raises(openai.BadRequestError, match="truncation must be one of"):
        gpt.responses.create(model="any", input="Hi", truncation="middle")  # type: ignore[call-overload]
