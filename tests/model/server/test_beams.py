"""`use_beam_search`, as vLLM's clients send it: with as many beams as answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

import pykvgraph as kvg

PROMPT = "Once upon a time, there was a"
BODY: dict[str, Any] = {
    "prompt": PROMPT,
    "n": 3,
    "max_tokens": 12,
    "use_beam_search": True,
    "length_penalty": 0.5,
    "temperature": 0.7,  # which vLLM doesn't look at either
}


@pytest.fixture(scope="module")
def found(stories: Path) -> list[kvg.Completion]:
    params = kvg.SamplingParams(beam_width=3, n=3, max_tokens=12, length_penalty=0.5)
    with kvg.Model(stories) as model, kvg.Engine(model, n_ctx=1024, n_seq_max=4) as engine:
        return engine.submit(PROMPT, params).results(60)


def test_choices_are_the_best_texts(client: httpx.Client, found: list[kvg.Completion]) -> None:
    told = client.post("/v1/completions", json={**BODY, "logprobs": 2}).json()
    assert [choice["text"] for choice in told["choices"]] == [each.text for each in found]
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2]
    for choice, each in zip(told["choices"], found, strict=True):
        assert choice["finish_reason"] == "length"
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(each.logprob, abs=1e-3)
    assert told["usage"]["completion_tokens"] == 36


def test_a_stream_has_them_at_its_end(client: httpx.Client, found: list[kvg.Completion]) -> None:
    texts = ["", "", ""]
    with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += choice["text"]
    assert texts == [each.text for each in found]


def test_a_chat_too(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "max_tokens": 5, "use_beam_search": True}
    choices = client.post("/v1/chat/completions", json=body).json()["choices"]
    assert len({choice["message"]["content"] for choice in choices}) == 2


def test_fewer_texts_than_answers(client: httpx.Client) -> None:
    """A grammar with one text, of two spellings in tokens."""
    body = {**BODY, "grammar": 'root ::= "a"', "logprobs": 0}
    choices = client.post("/v1/completions", json=body).json()["choices"]
    assert [choice["text"] for choice in choices] == ["a", "a", ""]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"repeat_penalty": 1.2}, "repeat_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"length_penalty": "long"}, "length_penalty"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
    ],
)
def test_what_is_refused(client: httpx.Client, asked: dict[str, Any], named: str) -> None:
    reply = client.post("/v1/completions", json={**BODY, **asked})
    assert reply.status_code == 400
    assert named in reply.json()["error"]["message"]
