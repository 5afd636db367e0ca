"""Probabilities of tokens in streams: those of a stream together are those of the whole answer."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import httpx
import pytest
from support import chance
from support.served import events

from pykvgraph.openai.blocks import BlockForm
from pykvgraph.openai.chat_output import ChatOutput
from pykvgraph.openai.responses import ResponseWriter
from pykvgraph.openai.sample import Sample
from pykvgraph.openai.vocabulary import Vocabulary
from pykvgraph.params.params import SamplingParams
from pykvgraph.reply.formats import format_of
from pykvgraph.reply.parser import ReplyParser
from pykvgraph.server.requests.sampling import settings_of
from pykvgraph.types import Piece

from .conftest import TEMPLATE, load

PIECES = ["\U0001f600", "漢", "é", "ab", "abx", " ", "\n", "<thi", "</think>", "<tool_call>", "<", "x", "é "]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
PATHS = ["/v1/chat/completions", "/v1/completions", "/completion", "/v1/responses"]


def body_of(rng: random.Random, path: str) -> dict[str, Any]:
    """A grammar makes the model write these pieces, of which some may begin a stop string or a mark."""
    said = "".join(rng.choices(PIECES, k=rng.randrange(1, 9)))
    body: dict[str, Any] = {
        "grammar": f"root ::= {json.dumps(said, ensure_ascii=False)}",
        "stop": rng.sample(["abx", "aby", "\n ", "漢é", "<th", "x"], rng.randrange(3)),
        "max_tokens": rng.choice([3, 10, 60]),
        "temperature": 0,
        "cache_prompt": False,
    }
    n_top = rng.randrange(3)
    if path == "/completion":
        return {**body, "prompt": "Once", "n_predict": body["max_tokens"], "n_probs": n_top or 1}
    if path == "/v1/completions":
        return {**body, "prompt": "Once", "logprobs": n_top, "echo": rng.random() < 0.3}
    if path == "/v1/responses":
        thinks = {"chat_template_kwargs": {"enable_thinking": rng.random() < 0.5}}
        return {
            **body,
            **thinks,
            "input": "Hi",
            "max_output_tokens": body["max_tokens"],
            "top_logprobs": n_top,
        }
    messages = [{"role": "user", "content": "Hi"}]
    thinks = {"chat_template_kwargs": {"enable_thinking": rng.random() < 0.5}}
    return {**body, **thinks, "messages": messages, "logprobs": True, "top_logprobs": n_top}


def told(path: str, answer: dict[str, Any]) -> list[Any]:
    """The tokens with their probabilities, of an answer or of an event."""
    if path == "/completion":
        return [*answer.get("completion_probabilities", ())]
    if path == "/v1/responses":
        if answer.get("type") == "response.output_text.delta":
            return [*answer["logprobs"]]
        parts = [part for item in answer.get("output", ()) for part in item.get("content", ())]
        return [each for part in parts for each in part.get("logprobs", ())]
    found = []
    for choice in answer["choices"]:
        probs = choice.get("logprobs") or {}
        found += probs.get("content", ())
        if path == "/v1/completions" and probs:
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            found += [*zip(*(probs[name] for name in names), strict=True)]
    return found


def parted(value: Any) -> tuple[Any, list[float]]:
    """The value with None for its floats, and these: rows of other batches are rounded differently."""
    if isinstance(value, float):
        return None, [value]
    if isinstance(value, dict):
        return parted(sorted(value.items()))
    if isinstance(value, (list, tuple)):
        parts = [parted(each) for each in value]
        return [shape for shape, _ in parts], [each for _, floats in parts for each in floats]
    return value, []


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_a_stream_tells_what_the_whole_answer_does(chats: httpx.Client, path: str) -> None:
    rng = random.Random(chance.seed(11))
    n_held = 0
    for _ in range(330 // chance.SHARE):
        body = body_of(rng, path)
        whole = chats.post(path, json=body)
        assert whole.status_code == 200, (body, whole.text)
        stream = [e for e in events(chats.post(path, json={**body, "stream": True}).text) if e != "[DONE]"]
        expected, found = told(path, whole.json()), [each for event in stream for each in told(path, event)]
        for kind in (dict, tuple):
            of_whole, of_stream = (
                parted([e for e in each if isinstance(e, kind)]) for each in (expected, found)
            )
            assert of_stream[0] == of_whole[0], body
            assert of_stream[1] == pytest.approx(of_whole[1], abs=0.02), body
        n_held += any(len(told(path, event)) > 2 for event in stream)
    assert n_held, "no event had the probabilities of tokens whose text was held back"


def test_of_no_others(chats: httpx.Client) -> None:
    """top_logprobs 0, or none given: OpenAI's API tells the tokens' own."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "logprobs": True}
    for more in ({}, {"top_logprobs": 0}):
        content = chats.post(PATHS[0], json={**chat, **more}).json()["choices"][0]["logprobs"]["content"]
        assert len(content) == 3
        assert all(each["logprob"] <= 0 and each["top_logprobs"] == [] for each in content)
    text = chats.post(PATHS[1], json={"prompt": "Hi", "max_tokens": 3, "logprobs": 0}).json()
    probs = text["choices"][0]["logprobs"]
    assert len(probs["token_logprobs"]) == 3
    assert [[*top.values()] for top in probs["top_logprobs"]] == [[each] for each in probs["token_logprobs"]]
    without = chats.post(PATHS[1], json={"prompt": "Hi", "max_tokens": 3}).json()
    assert without["choices"][0]["logprobs"] is None


def test_beside_tools(chats: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": TOOLS,
        "max_tokens": 6,
        "logprobs": True,
    }
    whole = chats.post(PATHS[0], json={**body, "temperature": 0}).json()
    stream = events(chats.post(PATHS[0], json={**body, "temperature": 0, "stream": True}).text)
    found = [each["token"] for event in stream if event != "[DONE]" for each in told(PATHS[0], event)]
    assert found == [each["token"] for each in told(PATHS[0], whole)] and found


CALL = '<tool_call>{"name": "f", "arguments": {"a": "She is a day"}}</tool_call>'


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(load().model)


def words_of(said: str) -> list[str]:
    """Each with the white space in front, as tokenizers part texts."""
    return re.findall(r"\s*(?:\w+|\W)", said)


def message_parts(said: str, vocabulary: Vocabulary, streams: bool) -> list[dict[str, Any]]:
    """Of a response in which a model says this, a word a token. A token's number is its place."""
    sample = Sample(0, [1], -1, settings_of(SamplingParams()), tells_probs=True)
    writer = ResponseWriter("m", {}, len)
    form = BlockForm(writer, lambda: ChatOutput(ReplyParser(format_of(TEMPLATE), TOOLS)), vocabulary)
    events = []
    words = words_of(said)
    for i, word in enumerate(words):
        piece = Piece(word, i, 0.0, "length" if i == len(words) - 1 else None)
        sample.add([piece])
        events += form.events(sample, [piece]) if streams else []
    whole = json.loads(form.last_events(sample)[-1])["response"] if streams else form.whole([sample])
    return [part for item in whole["output"] if item["type"] == "message" for part in item["content"]]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("said", "texts"),
    [
        ("<think>A. He.</think> He was.", ["He was."]),
        (f"A.{CALL}  She is a day", ["A.", "She is a day"]),
        (f'{CALL}{CALL}\n": f', ['": f']),
        (f"{CALL} She <tool_ca", ["She <tool_ca"]),
    ],
)
def test_responses_tell_the_tokens_of_their_texts(
    vocabulary: Vocabulary, said: str, texts: list[str], streams: bool
) -> None:
    """And none of a thought or of a call, which may have the same letters."""
    parts = message_parts(said, vocabulary, streams)
    assert [part["text"] for part in parts] == texts
    for part, text in zip(parts, texts, strict=True):
        begin = len(words_of(said[: said.rindex(text)].rstrip()))
        assert [each["id"] for each in part["logprobs"]] == [*range(begin, begin + len(words_of(text)))]


def test_the_time_grows_with_a_call_and_not_with_its_square(vocabulary: Vocabulary) -> None:
    """A call whose name comes last is told when it is whole; others wait meanwhile."""
    said = '<tool_call>{"arguments": {"a":"%s"}, "name": "f"}</tool_call> Yes.' % ("oops, " * 10000)
    begun = time.process_time()
    (part,) = message_parts(said, vocabulary, streams=False)
    assert len(part["logprobs"]) == len(words_of("Yes."))
    assert time.process_time() - begun < 5
