"""`cache_control`, `prompt_cache_retention`: what stays in the cache, and what `usage` says of it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import anthropic
import anthropic.types.beta as beta
import httpx
import openai
import pydantic
import pytest
from support import chance
from support.served import events, served

import pykvgraph as kvg
from pykvgraph.prefix import timed_pins

from .conftest import STORIES, TEMPLATE, load

BLOCK = 32
MESSAGES = "/v1/messages"
WORDS = [
    "Lily had a red ball.",
    "Tom went to the park",
    "one day, they saw",
    "a big dog and a cat",
    "mom said no",
]
EPHEMERAL = {"type": "ephemeral"}
_STARTS = itertools.count(1)


class Body(NamedTuple):
    """A body, the text of its prompt, and the text before each breakpoint, with the ttl."""

    body: dict[str, Any]
    prompt: str
    before: list[tuple[str, str]]


@pytest.fixture(scope="module")
def large() -> Iterator[httpx.Client]:
    """A server whose cache has room for all that a test says."""

    def load() -> kvg.Engine:
        return kvg.Engine(kvg.Model(STORIES, device="cpu"), n_ctx=32768, n_seq_max=2, pin_cells=32768)

    with (
        served(load, n_slots=2, n_ctx_slot=512, chat_template=TEMPLATE) as (url, _),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


def body_of(rng: random.Random) -> Body:
    """As the template of these tests writes it, whose tools stand before everything else."""
    ttls: list[str] = []

    def marked(block: dict[str, Any], chance: float = 0.25) -> dict[str, Any]:
        if len(ttls) == 4 or rng.random() > chance:
            return block
        ttls.append(rng.choice(["1h", "5m"]) if set(ttls) <= {"1h"} else "5m")
        control = EPHEMERAL if ttls[-1] == "5m" and rng.random() < 0.5 else {**EPHEMERAL, "ttl": ttls[-1]}
        return {**block, "cache_control": control}

    def texts(n: int) -> list[dict[str, Any]]:
        return [marked({"type": "text", "text": rng.choice(WORDS)}) for _ in range(n)]

    names = ["weather", "stop", "look"][: rng.randrange(4)]
    tools = [marked({"name": name, "input_schema": {"type": "object"}}, 0.1) for name in names]
    system = texts(rng.randrange(3))
    roles = ["user", "assistant"] * 3
    n_turns = rng.choice([1, 3, 5])
    messages = [{"role": role, "content": texts(rng.randrange(1, 4))} for role in roles[:n_turns]]
    head = [f"{name}/3 " for name in names]
    instructed = f"<|system|>{''.join(block['text'] for block in system)}</s>" if system else ""
    before: list[str] = []
    for n, tool in enumerate(tools, 1):
        if "cache_control" in tool:
            before.append("".join(head[:n]) + (f"{instructed}<|user|>" if n == len(tools) else ""))
    for n, block in enumerate(system, 1):
        if "cache_control" in block:
            said = "".join(each["text"] for each in system[:n])
            before.append("".join(head) + f"<|system|>{said}" + ("</s><|user|>" if n == len(system) else ""))
    prompt = "".join(head) + instructed
    for message in messages:
        blocks: Any = message["content"]
        for n, block in enumerate(blocks, 1):
            if "cache_control" in block:
                said = "\n".join(each["text"] for each in blocks[:n])
                before.append(f"{prompt}<|{message['role']}|>{said}" + ("</s>" if n == len(blocks) else ""))
        prompt += f"<|{message['role']}|>" + "\n".join(each["text"] for each in blocks) + "</s>"
    body = {"model": "any", "max_tokens": 1, "messages": messages, "tools": tools, "temperature": 0}
    body |= {"system": system} if system else {}
    return Body(body, prompt + "<|assistant|><think>", list(zip(before, ttls, strict=True)))


def n_tokens_within(tokenizer: kvg.Tokenizer, ids: list[int], text: str) -> int:
    """How many tokens of a prompt, behind which its text is no longer than this."""
    n_parts = sum(bool(part) for part in text.split("</s>"))  # a space is put in front of each
    end, left = 1, len(text.encode()) + n_parts  # the first token is BOS
    for token in ids[1:]:
        left -= len(tokenizer.token_to_piece(token)) or len(b"</s>")
        if left < 0:
            break
        end += 1
    return end


def shared(one: list[int], other: list[int]) -> int:
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return n


def usage_by_hand(
    body: Body, ids: list[int], known: list[list[int]], tokenizer: kvg.Tokenizer
) -> dict[str, Any]:
    """known: the tokens of all prompts that came before."""
    read = end = min(max((shared(ids, other) for other in known), default=0), len(ids) - 1)
    created = {"5m": 0, "1h": 0}
    for text, ttl in body.before:
        pinned = n_tokens_within(tokenizer, ids, text) // BLOCK * BLOCK
        created[ttl] += max(pinned - end, 0)
        end = max(pinned, end)
    return {
        "input_tokens": len(ids) - end,
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": created["5m"] + created["1h"],
        "cache_creation": {f"ephemeral_{ttl}_input_tokens": n for ttl, n in created.items()},
        "output_tokens": 1,
    }


def test_usage_is_what_a_hand_calculates(large: httpx.Client) -> None:
    """Conversations that begin alike, in part; the tokens are those of the prompt that a hand has written."""
    rng = random.Random(chance.seed("usage"))
    model = kvg.Model(STORIES, device="cpu")
    known: list[list[int]] = []
    n_created = 0
    for _ in range(200 // chance.SHARE):
        body = body_of(rng)
        ids = model.tokenizer.encode(body.prompt, True, True)
        wanted = usage_by_hand(body, ids, known, model.tokenizer)
        n_created += wanted["cache_creation_input_tokens"]
        if rng.random() < 0.5:
            reply = large.post(MESSAGES, json=body.body)
            assert reply.status_code == 200, reply.text
            usage = beta.BetaMessage.model_validate_json(reply.text, strict=True).usage.to_dict()
        else:
            stream = events(large.post(MESSAGES, json={**body.body, "stream": True}).text)
            usage = stream[0]["message"]["usage"]
            (end,) = (event for event in stream if event["type"] == "message_delta")
            beta.BetaRawMessageDeltaEvent.model_validate(end, strict=True)
            usage |= end["usage"]
        assert {name: usage[name] for name in wanted} == wanted, body
        known.append(ids)
    assert n_created > 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [next(_STARTS) * 1e6]  # what other tests have pinned on the same server is over
    monkeypatch.setattr(timed_pins, "clock", lambda: now[0])
    return now


def crowd(client: httpx.Client, first: int) -> None:
    """Prompts of others, more than the cache has room for."""
    for n in range(first, first + 12):
        body = {"prompt": [n % 400 + 60, *range(60, 350)], "n_predict": 1, "temperature": 0}
        assert client.post("/completion", json=body).status_code == 200


@pytest.mark.parametrize("ttl", ["5m", "1h"])
def test_a_prefix_is_found_until_its_ttl(thinker: str, clock: list[float], ttl: str) -> None:
    """By Anthropic's own package, in a cache of which others want every cell."""
    text = f"{ttl} " + " ".join(WORDS * 6)
    block: Any = {"type": "text", "text": text, "cache_control": {**EPHEMERAL, "ttl": ttl}}
    asked: Any = {"model": "any", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    seconds = {"5m": 300, "1h": 3600}[ttl]
    with (
        anthropic.Anthropic(base_url=thinker, api_key="none", max_retries=0) as claude,
        httpx.Client(base_url=thinker, timeout=30) as others,
    ):
        first = claude.messages.create(**asked, system=[block]).usage
        assert first.cache_creation is not None and first.cache_creation_input_tokens is not None
        n = first.cache_creation_input_tokens + (first.cache_read_input_tokens or 0)
        assert n >= 128 and n % BLOCK == 0
        created = first.cache_creation
        of_ttl = {"5m": created.ephemeral_5m_input_tokens, "1h": created.ephemeral_1h_input_tokens}
        assert of_ttl[ttl] == first.cache_creation_input_tokens == sum(of_ttl.values())
        clock[0] += seconds - 1
        crowd(others, 0)
        again = claude.messages.create(**asked, system=text).usage
        assert again.cache_read_input_tokens is not None and again.cache_read_input_tokens >= n
        crowd(others, 100)
        clock[0] += 2
        crowd(others, 200)
        late = claude.messages.create(**asked, system=text).usage
        assert late.cache_read_input_tokens is not None and late.cache_read_input_tokens < BLOCK


def test_a_prompt_of_openai_s_interface_is_kept_for_a_day(address: str, clock: list[float]) -> None:
    words = "24h " + " ".join(WORDS * 4)
    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as gpt,
        httpx.Client(base_url=address, timeout=30) as others,
    ):
        asked: Any = {"model": "any", "max_tokens": 1, "messages": [{"role": "user", "content": words}]}
        told: Any = {"model": "any", "max_output_tokens": 1, "input": f"too {words}"}
        gpt.chat.completions.create(**asked, prompt_cache_retention="24h")
        half: Any = {"prompt_cache_options": {"ttl": "12h"}, "prompt_cache_retention": "in_memory"}
        said = gpt.responses.create(**told, **half)
        assert said.prompt_cache_retention == "in_memory"
        clock[0] += 12 * 3600 - 1
        crowd(others, 0)
        usage = gpt.chat.completions.create(**asked).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens // BLOCK * BLOCK
        late = gpt.responses.create(**told).usage
        assert (
            late is not None and late.input_tokens_details.cached_tokens == late.input_tokens // BLOCK * BLOCK
        )
        clock[0] += 12 * 3600 + 2
        crowd(others, 100)
        gone = gpt.chat.completions.create(**asked).usage
        assert gone is not None and gone.prompt_tokens_details is not None
        assert (gone.prompt_tokens_details.cached_tokens or 0) < BLOCK


def test_keys_share_nothing_by_these(tmp_path: Any) -> None:
    """Neither by prompt_cache_key, nor by what is pinned."""
    with served(load, n_ctx_slot=512, chat_template=TEMPLATE, api_keys=("one", "two")) as (url, _):
        found = []
        for key in ("one", "one", "two"):
            with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as gpt:
                asked: Any = {"model": "any", "max_tokens": 1, "prompt_cache_key": "same"}
                asked |= {"messages": [{"role": "user", "content": " ".join(WORDS)}]}
                usage = gpt.chat.completions.create(**asked, prompt_cache_retention="24h").usage
                assert usage is not None and usage.prompt_tokens_details is not None
                found.append((usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens - 1))
        (none, n), (all_but_one, _), (of_two, _) = found
        assert (none, all_but_one, of_two) == (0, n, 0)


BAD_CONTROLS = [
    ({"type": "forever"}, "ephemeral"),
    ("5m", "ephemeral"),
    ({"type": "ephemeral", "ttl": "2h"}, "5m, 1h"),
    ({"type": "ephemeral", "ttl": 5}, "5m, 1h"),
    ({"type": "ephemeral", "ttl": ["5m"]}, "5m, 1h"),
]


@pytest.mark.parametrize(("control", "told"), BAD_CONTROLS)
def test_what_can_not_be_a_breakpoint_is_refused(chats: httpx.Client, control: Any, told: str) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": control}]}
    reply = chats.post(MESSAGES, json={"messages": [message], "max_tokens": 1})
    assert reply.status_code == 400 and told in reply.json()["error"]["message"]
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_breakpoints_have_a_limit_and_an_order(chats: httpx.Client) -> None:
    def told(*ttls: str) -> str:
        blocks = [{"type": "text", "text": "Hi", "cache_control": {**EPHEMERAL, "ttl": ttl}} for ttl in ttls]
        body = {"messages": [{"role": "user", "content": blocks}], "max_tokens": 1}
        reply = chats.post(MESSAGES, json=body)
        return str(reply.json()["error"]["message"]) if reply.status_code == 400 else str(reply.status_code)

    assert told("1h", "1h", "5m", "5m") == "200"
    assert "4 may" in told(*["5m"] * 5)
    assert "must not come behind" in told("5m", "1h")


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_cache_retention": "1h"},
        {"prompt_cache_options": {"ttl": "5m"}},
        {"prompt_cache_options": {"mode": "explicit"}},
        {"prompt_cache_options": "30m"},
    ],
)
def test_other_retentions_are_refused(chats: httpx.Client, fields: Any) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    reply = chats.post("/v1/chat/completions", json=asked)
    assert reply.status_code == 400 and next(iter(fields)) in reply.json()["error"]["message"]


def test_a_result_s_own_text_may_have_one_and_the_body_too(chats: httpx.Client) -> None:
    """Inside of a tool's result, and at the top, where it stands for the last block."""
    said = " ".join(WORDS * 2)
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    text = {"type": "text", "text": said, "cache_control": EPHEMERAL}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text]}
    turns: Any = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    bare = [{**turns[2], "content": [{**result, "content": f"Top. {said}"}]}]
    for messages, top in ((turns, {}), ([*turns[:2], *bare], {"cache_control": EPHEMERAL})):
        usage = chats.post(MESSAGES, json={"messages": messages, "max_tokens": 1, **top}).json()["usage"]
        pydantic.TypeAdapter(anthropic.types.Usage).validate_python(usage, strict=True)
        n = usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]
        assert usage["cache_creation_input_tokens"] > 0 and usage["input_tokens"] < BLOCK + 24 and n > 64
