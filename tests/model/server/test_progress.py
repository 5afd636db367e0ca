"""`return_progress`: how far a prompt is, in the events of a stream."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.served import N_SLOTS, llama_server, served

import pykvgraph as kvg

from .conftest import STORIES

N_BATCH = 64
LONG = "The quick brown fox jumps over the lazy dog. " * 8
ASKED: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": LONG, "n_predict": 4},
    "/v1/completions": {"prompt": LONG, "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}], "max_tokens": 4},
    "/v1/responses": {"input": LONG, "max_output_tokens": 4},
}
STREAM = {"stream": True, "return_progress": True, "timings_per_token": True, "temperature": 0}
CHATML = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"


def load() -> kvg.Engine:
    model = kvg.Model(STORIES, device="cpu")
    return kvg.Engine(model, n_ctx=2048, n_seq_max=N_SLOTS, n_batch=N_BATCH, overcommit=True)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        served(load, n_ctx_slot=512, chat_template=CHATML) as (url, _),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


def streamed(client: httpx.Client, path: str, **fields: Any) -> list[Any]:
    lines = client.post(path, json=ASKED[path] | STREAM | fields).text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


def parts(stream: list[Any]) -> list[tuple[int, int, int]]:
    told = [each["prompt_progress"] for each in stream if "prompt_progress" in each]
    assert all(each["time_ms"] >= 0 for each in told)
    return [(each["total"], each["cache"], each["processed"]) for each in told]


def test_it_is_told_as_by_llama_server(client: httpx.Client) -> None:
    options = ("-c", "512", "-np", "1", "-b", str(N_BATCH), "--chat-template", CHATML)
    with llama_server(STORIES, *options) as url, httpx.Client(base_url=url, timeout=30) as other:
        for path in ASKED:
            fields = {"cache_prompt": False}
            theirs, ours = (streamed(each, path, **fields) for each in (other, client))
            assert parts(ours) == parts(theirs)
            (one, *_), (two, *_) = (
                [e for e in stream if "prompt_progress" in e] for stream in (theirs, ours)
            )
            assert two.keys() >= one.keys()
            assert two["timings"] == one["timings"]  # nothing is decoded yet


@pytest.mark.parametrize("path", ASKED)
def test_each_batch_is_told_before_the_first_token(client: httpx.Client, path: str) -> None:
    stream = streamed(client, path, cache_prompt=False)
    told = parts(stream)
    total = told[0][0]
    assert total > 2 * N_BATCH
    assert told == [(total, 0, n) for n in (*range(0, total, N_BATCH), total)]
    first = next(i for i, each in enumerate(stream) if "prompt_progress" in each)
    assert all("prompt_progress" in each for each in stream[first : first + len(told)])
    later = parts(streamed(client, path, cache_prompt=True)) and parts(streamed(client, path))
    assert later[0] == (total, later[0][1], later[0][1]) and later[0][1] > 0  # what the cache had
    assert later[-1][2] == total


def test_times_grow_with_the_prompt(client: httpx.Client) -> None:
    stream = streamed(client, "/completion", cache_prompt=False)
    told = [each["timings"] for each in stream if "prompt_progress" in each]
    assert set(told[0].values()) == {0.0}
    assert [each["prompt_n"] for each in told] == [processed for _, _, processed in parts(stream)]
    assert all(a["prompt_ms"] < b["prompt_ms"] for a, b in itertools.pairwise(told))
    assert all(each["predicted_n"] == 0 for each in told)
    assert stream[-1]["timings"]["predicted_n"] == 4


def test_who_does_not_ask_is_not_told(client: httpx.Client) -> None:
    assert not parts(streamed(client, "/completion", return_progress=False))
    whole = client.post("/completion", json={**ASKED["/completion"], "return_progress": True}).json()
    assert "prompt_progress" not in whole
    refused = client.post("/completion", json={**ASKED["/completion"], "return_progress": "yes"})
    assert refused.status_code == 400 and "return_progress" in refused.json()["error"]["message"]


def test_several_prompts_are_told_apart(client: httpx.Client) -> None:
    stream = streamed(client, "/completion", prompt=[LONG, LONG[10:]], cache_prompt=False)
    for index in (0, 1):
        own = parts([each for each in stream if each["index"] == index])
        total, n_cached, first = own[0]
        assert first == n_cached <= 1 and own[-1][2] == total  # the two may share BOS
        assert all(a[2] < b[2] for a, b in itertools.pairwise(own))


def test_events_of_texts_have_times(client: httpx.Client) -> None:
    said = [each for each in streamed(client, "/v1/completions") if each["choices"][0]["text"]]
    assert said and all(1 <= each["timings"]["predicted_n"] <= 4 for each in said)
    plain = streamed(client, "/v1/completions", timings_per_token=False)
    assert not any("timings" in each for each in plain if each["choices"][0]["text"])


def test_events_of_responses_have_times(client: httpx.Client) -> None:
    stream = streamed(client, "/v1/responses")
    said = [each for each in stream if each["type"] == "response.output_text.delta"]
    assert said and all(1 <= each["timings"]["predicted_n"] <= 4 for each in said)
    plain = streamed(client, "/v1/responses", timings_per_token=False)
    assert not any("timings" in each for each in plain if each["type"].endswith("delta"))
