"""`echo` of /v1/completions: OpenAI's meaning, by its own package, and probabilities by hand."""

from __future__ import annotations

import contextlib
import importlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from support.served import served, where_of

from pykvgraph.openai.text_logprobs import text_logprobs
from pykvgraph.server.endpoints import echo

from .conftest import STORIES, load

PROMPT = "Once upon a time, in a big forest, there lived a rhinoceros named Roxy. " * 4


@pytest.fixture
def api(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture(scope="module")
def by_hand() -> tuple[list[int], Any]:
    """The prompt's tokens, and the log probability of every token behind each, by llama-cpp-python."""
    llama_cpp: Any = importlib.import_module("llama_cpp")
    llama = llama_cpp.Llama(str(STORIES), n_ctx=512, logits_all=True, verbose=False)
    ids = llama.tokenize(PROMPT.encode())
    llama.eval(ids)
    logits = llama.scores[: len(ids)].astype("f8")
    llama.close()
    logits -= logits.max(axis=1, keepdims=True)
    return ids, logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def ask(api: openai.OpenAI, **fields: Any) -> Any:
    return api.completions.create(
        **{"model": "any", "prompt": PROMPT, "temperature": 0, "max_tokens": 6, **fields}
    )


def test_the_prompt_comes_first(api: openai.OpenAI) -> None:
    said = ask(api).choices[0].text
    assert ask(api, echo=True).choices[0].text == PROMPT + said
    assert ask(api, echo=False).choices[0].text == said
    chunks = list(ask(api, echo=True, stream=True))
    assert chunks[0].choices[0].text == PROMPT
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + said
    nothing = ask(api, echo=True, max_tokens=0)
    assert (nothing.choices[0].text, nothing.choices[0].finish_reason) == (PROMPT, "length")
    assert (nothing.usage.completion_tokens, nothing.choices[0].logprobs) == (0, None)


def test_several_prompts_and_answers(api: openai.OpenAI) -> None:
    prompts = ["One day", "", "The cat"]
    choices = ask(api, prompt=prompts, n=2, echo=True, seed=3, temperature=1.0, logprobs=1).choices
    assert [choice.index for choice in choices] == list(range(6))
    for i, choice in enumerate(choices):
        assert choice.text.startswith(prompts[i // 2])
        assert choice.logprobs.token_logprobs[0] is None
    tokens = ask(api, prompt=[1, 403, 407], echo=True).choices[0].text
    assert tokens.startswith("<s> Once upon")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("n_said", [0, 6])
def test_probabilities_of_the_prompt(
    api: openai.OpenAI, by_hand: tuple[list[int], Any], n_said: int, streams: bool
) -> None:
    if streams and not n_said:
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            ask(api, echo=True, max_tokens=0, stream=True)
        return
    ids, logprobs = by_hand
    answer = ask(api, echo=True, logprobs=3, max_tokens=n_said, stream=streams)
    parts = [chunk.choices[0] for chunk in answer if chunk.choices] if streams else [answer.choices[0]]
    text = "".join(part.text for part in parts)
    told = [part.logprobs for part in parts if part.logprobs]
    names, own, top, offsets = (
        [each for part in told for each in getattr(part, name)]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    )
    assert len(names) == len(own) == len(top) == len(offsets) == len(ids) + n_said
    assert own[0] is None and top[0] is None
    wanted = [logprobs[i, token] for i, token in enumerate(ids[1:])]
    assert own[1 : len(ids)] == pytest.approx(wanted, abs=1e-2)
    for row, likely in zip(logprobs, top[1 : len(ids)], strict=False):
        assert max(likely.values()) == pytest.approx(row.max(), abs=1e-2)
        assert 3 <= len(likely) <= 4 or len(set(likely)) < 3
    # each token stands where it is said to stand; BOS and the space before the first word don't
    assert offsets == sorted(offsets) and offsets[0] == 0
    for name, offset in zip(names[2:], offsets[2:], strict=True):
        assert text.startswith(name, offset)
    assert text.startswith(names[1].strip())


@pytest.mark.parametrize("streams", [False, True])
def test_the_token_that_ends_a_text_is_told(
    api: openai.OpenAI, by_hand: tuple[list[int], Any], streams: bool
) -> None:
    """It has a probability and no text: lm-eval counts on one token behind the prompt, whichever it is."""
    ids, logprobs = by_hand
    ends: Any = {"logit_bias": {"2": 100}, "echo": True, "logprobs": 1, "stream": streams}
    answer = ask(api, max_tokens=1, **ends)
    parts = [chunk.choices[0].logprobs for chunk in answer] if streams else [answer.choices[0].logprobs]
    own = [each for part in parts if part for each in part.token_logprobs]
    assert len(own) == len(ids) + 1
    assert own[-1] == pytest.approx(logprobs[-1, 2], abs=1e-2)
    assert (parts[-1].tokens[-1], parts[-1].text_offset[-1]) == ("", len(PROMPT))


def test_the_token_that_completes_a_stop_string_is_not_told(api: openai.OpenAI) -> None:
    stop = ask(api, max_tokens=12).choices[0].text[8:12]
    said = ask(api, max_tokens=12, logprobs=1, stop=[stop])
    assert said.choices[0].finish_reason == "stop"
    assert len(said.choices[0].logprobs.tokens) == said.usage.completion_tokens - 1


@pytest.mark.client("openai", "log probabilities of a prompt (`echo`)")
@pytest.mark.client("openai", "log probabilities")
def test_the_likeliest_token_has_the_same_number_among_the_likeliest(api: openai.OpenAI) -> None:
    """lm-eval finds by it whether an answer is the greedy one."""
    told = ask(api, max_tokens=20, echo=True, logprobs=2).choices[0].logprobs
    own = list(zip(told.token_logprobs, told.top_logprobs, strict=True))[1:]
    assert all(logprob == max(top.values()) for logprob, top in own[-20:])
    assert any(logprob == max(top.values()) for logprob, top in own[:-20])


def test_it_is_decoded_once(client: httpx.Client) -> None:
    """What was read for the probabilities is what the answer goes on from."""
    fields = {"prompt": "Sue " + PROMPT, "max_tokens": 2, "echo": True, "logprobs": 1}
    told = client.post("/v1/completions", json=fields).json()
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == told["usage"]["prompt_tokens"] - 1


@pytest.mark.parametrize(
    "fields", [{}, {"stream": True}, {"max_tokens": 0}], ids=["whole", "stream", "no more"]
)
def test_others_have_their_turn_while_it_is_written(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    threads = []

    def noted(*args: Any, **others: Any) -> Any:
        threads.append(threading.current_thread().name)
        return text_logprobs(*args, **others)

    monkeypatch.setattr("pykvgraph.openai.completion.text_logprobs", noted)
    asked = {"prompt": [7] * 300, "max_tokens": 2, "echo": True, "logprobs": 20, **fields}
    assert client.post("/v1/completions", json=asked).status_code == 200
    # those of pools have names of their own; the event loop's is one that the test has started
    assert threads and not any(name.startswith("Thread-") for name in threads)


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": 1},
        {"echo": "yes"},
        {"prompt": "word " * 600},
        {"prompt": []},
        {"prompt": [1, 99999]},
        {"logprobs": 1 << 20},
    ],
)
def test_what_is_refused(client: httpx.Client, fields: dict[str, Any]) -> None:
    asked = {"prompt": "a", "echo": True, "logprobs": 1, **fields}
    assert client.post("/v1/completions", json=asked).status_code == 400


def test_who_waits_keeps_nobody_out_and_who_leaves_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty bodies, for whose prompts the engine has no time."""
    has_time = threading.Event()

    def waits(*_: Any, **__: Any) -> list[Any]:
        assert has_time.wait(30)
        return []

    monkeypatch.setattr(echo, "prompt_scores", waits)
    body = json.dumps({"prompt": ["One", "Two"], "echo": True, "logprobs": 1, "max_tokens": 100}).encode()
    asked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with served(load, n_ctx_slot=512) as (url, server):
        try:
            with contextlib.ExitStack() as stack:
                for _ in range(50):
                    stack.enter_context(socket.create_connection(where_of(url))).sendall(asked)
                while len(server.server_state.tasks) < 50:
                    time.sleep(0.01)
                many = {"prompt": ["a"] * 20, "max_tokens": 1}  # whose JSON is written in a thread
                assert httpx.post(f"{url}/v1/completions", json=many, timeout=10).status_code == 200
            before = server.service.engine.stats().prompt_tokens
            while server.server_state.tasks:
                time.sleep(0.01)
        finally:
            has_time.set()
        time.sleep(0.3)
        assert server.service.engine.stats().prompt_tokens == before
