"""What the server answers is what the engine says, and what llama2.c published."""

from __future__ import annotations

import concurrent.futures
import json
from typing import Any

import httpx
import numpy as np
import pytest
from support.served import events

import pykvgraph as kvg

GREEDY = {"temperature": 0, "n_predict": 24}
PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Hi"}]


def post(client: httpx.Client, path: str, **fields: Any) -> Any:
    reply = client.post(path, json=fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_published_story(client: httpx.Client, golden_story: str) -> None:
    said = post(client, "/completion", prompt="", temperature=0, n_predict=200)
    assert golden_story.startswith(said["content"])
    assert len(said["content"]) > 200
    assert (said["tokens_predicted"], said["tokens_evaluated"], said["tokens_cached"]) == (200, 1, 200)
    assert said["prompt"] == "<s>"


def test_a_stream_is_the_answer_in_pieces(client: httpx.Client) -> None:
    whole = post(client, "/completion", prompt=PROMPT, return_tokens=True, **GREEDY)
    reply = client.post("/completion", json={"prompt": PROMPT, "stream": True, **GREEDY})
    assert reply.headers["content-type"] == "text/event-stream"
    *pieces, last = events(reply.text)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [token for piece in pieces for token in piece["tokens"]] == whole["tokens"]
    assert [piece["tokens_predicted"] for piece in pieces] == list(range(1, 25))
    assert not any(piece["stop"] for piece in pieces)
    assert last["stop"] and last["content"] == ""
    assert last["stop_type"] == whole["stop_type"] == "limit"


@pytest.mark.parametrize("streams", [False, True])
def test_openai_forms(client: httpx.Client, streams: bool) -> None:
    text = post(client, "/completion", prompt=PROMPT, **GREEDY)["content"]
    fields = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "stream": streams}
    reply = client.post("/v1/completions", json=fields)
    if not streams:
        told = reply.json()
        assert told["choices"][0] == {
            "text": text,
            "index": 0,
            "logprobs": None,
            "finish_reason": "length",
        }
        assert told["usage"]["total_tokens"] == 5 + 24
        return
    *pieces, last, done = events(reply.text)
    assert done == "[DONE]"
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == text
    assert last["choices"][0]["finish_reason"] == "length"
    assert len({piece["id"] for piece in pieces}) == 1


def test_a_chat_is_its_template_completed(client: httpx.Client) -> None:
    prompt = post(client, "/apply-template", messages=MESSAGES)["prompt"]
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    text = post(client, "/completion", prompt=prompt, **GREEDY)["content"]
    fields = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    told = post(client, "/v1/chat/completions", **fields)
    assert told["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    stream = client.post(
        "/chat/completions", json={**fields, "stream": True, "stream_options": {"include_usage": True}}
    )
    first, *pieces, last, usage, done = events(stream.text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == text
    assert last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 24
    assert done == "[DONE]"


def test_an_answer_goes_on_with_the_last_message(client: httpx.Client) -> None:
    fields: dict[str, Any] = {
        "messages": [*MESSAGES, {"role": "assistant", "content": "Once upon"}],
        "temperature": 0,
        "max_tokens": 3,
    }
    text = post(client, "/v1/chat/completions", **fields)["choices"][0]["message"]["content"]
    assert text.startswith("Once upon") and len(text) > len("Once upon")
    _, *pieces, _, _ = events(client.post("/v1/chat/completions", json={**fields, "stream": True}).text)
    assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces) == text


def test_stop_strings_and_the_end_of_text(client: httpx.Client) -> None:
    said = post(client, "/completion", prompt=PROMPT, stop=["girl"], **GREEDY)
    assert (said["stop_type"], said["stopping_word"]) == ("word", "girl")
    assert "girl" not in said["content"] and said["content"].endswith(" ")
    eos = post(client, "/completion", prompt=PROMPT, n_predict=4, temperature=0, logit_bias={"2": 100})
    assert (eos["stop_type"], eos["content"], eos["tokens_predicted"]) == ("eos", "", 1)
    ignored = {"logit_bias": {"2": 100}, "ignore_eos": True, "n_predict": 4, "temperature": 0}
    assert post(client, "/completion", prompt=PROMPT, **ignored)["stop_type"] == "limit"


def test_the_context_ends_the_answer(client: httpx.Client) -> None:
    said = post(client, "/completion", prompt=[1] * 500, temperature=0, ignore_eos=True)
    assert (said["tokens_predicted"], said["truncated"], said["stop_type"]) == (12, True, "limit")
    refused = client.post("/completion", json={"prompt": [1] * 512})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["type"], error["n_prompt_tokens"], error["n_ctx"]) == (
        "exceed_context_size_error",
        512,
        512,
    )


def test_several_prompts_and_samples(client: httpx.Client) -> None:
    alone = [post(client, "/completion", prompt=p, **GREEDY)["content"] for p in (PROMPT, "The cat")]
    both = post(client, "/completion", prompt=[PROMPT, "The cat"], **GREEDY)
    assert [each["content"] for each in both] == alone
    assert [each["index"] for each in both] == [0, 1]
    drawn = {"prompt": PROMPT, "max_tokens": 12, "n": 2, "seed": 7, "temperature": 2}
    one, two = post(client, "/v1/completions", **drawn)["choices"]
    assert one["text"] != two["text"]
    assert [one, two] == post(client, "/v1/completions", **drawn)["choices"]
    stream = events(client.post("/v1/completions", json={**drawn, "stream": True}).text)
    texts = ["", ""]
    for event in stream[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [one["text"], two["text"]]


def test_the_likeliest_tokens(client: httpx.Client) -> None:
    said = post(client, "/completion", prompt=PROMPT, n_predict=3, temperature=0, n_probs=2)
    with kvg.Model(client_model(client), device="cpu") as model, kvg.Context(model, n_ctx=64) as ctx:
        batch = kvg.Batch()
        batch.extend(model.tokenizer.encode(PROMPT), 0, (0,), logits="last")
        ctx.decode(batch)
        scores = ctx.logits()[0].astype("f8")
    scores -= scores.max()
    wanted = scores - np.log(np.exp(scores).sum())
    first = said["completion_probabilities"][0]
    assert [each["id"] for each in first["top_logprobs"]] == wanted.argsort()[::-1][:2].tolist()
    assert first["logprob"] == pytest.approx(wanted.max(), abs=1e-4)
    assert bytes(first["bytes"]).decode() == first["token"]


def client_model(client: httpx.Client) -> str:
    path: str = client.get("/props").json()["model_path"]
    return path


def test_grammars(client: httpx.Client) -> None:
    said = post(client, "/completion", prompt=PROMPT, grammar='root ::= "yes" | "no"', n_predict=8)
    assert said["content"] in ("yes", "no")
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["red", "blue"]}}}
    fields = {"messages": MESSAGES, "response_format": schema, "max_tokens": 16}
    told = post(client, "/v1/chat/completions", **fields)
    assert told["choices"][0]["message"]["content"].strip() in ('"red"', '"blue"')


def test_what_is_asked_again_is_in_the_cache(client: httpx.Client) -> None:
    prompt = [int(token) for token in range(3, 103)]
    fields = {"prompt": prompt, "n_predict": 2, "temperature": 0}
    post(client, "/completion", **fields)
    assert post(client, "/completion", **fields)["timings"]["cache_n"] == 99
    assert post(client, "/completion", **fields, cache_prompt=False)["timings"]["cache_n"] == 0


def test_many_at_once_say_what_each_says_alone(client: httpx.Client) -> None:
    prompts = [f"{name} was" for name in ("Tom", "Lily", "Ben", "Sue", "Max", "Mia", "Tim", "Ann")]
    alone = [post(client, "/completion", prompt=prompt, **GREEDY)["content"] for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda prompt: post(client, "/completion", prompt=prompt, **GREEDY), prompts)
        assert [each["content"] for each in found] == alone


def test_usage_is_summed(client: httpx.Client) -> None:
    """Each prompt counts once, each of its texts by itself."""
    prompts = ["Once", "Lily and Tom"]
    ids = [post(client, "/tokenize", content=each, add_special=True)["tokens"] for each in prompts]
    n_prompt = sum(map(len, ids))
    body = {"prompt": prompts, "n": 2, "max_tokens": 3, "logit_bias": [[2, False]]}
    wanted = {"prompt_tokens": n_prompt, "completion_tokens": 12, "total_tokens": n_prompt + 12}
    assert post(client, "/v1/completions", **body)["usage"].items() >= wanted.items()
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events(client.post("/v1/completions", json={**body, **stream}).text)
    assert last["choices"] == [] and last["usage"].items() >= wanted.items() and done == "[DONE]"
    assert not any("usage" in chunk for chunk in chunks)


def test_a_text_that_follows_a_schema(client: httpx.Client) -> None:
    """As vLLM takes response_format; llama-server reads past it."""
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    told = post(client, "/v1/completions", prompt="JSON:", max_tokens=100, response_format=form)
    assert isinstance(json.loads(told["choices"][0]["text"])["a"], bool)


def test_the_old_form_of_tools_is_refused(client: httpx.Client) -> None:
    """It would be read past in silence."""
    body = {"messages": MESSAGES, "functions": [{"name": "f", "parameters": {}}]}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400 and "'tools'" in reply.json()["error"]["message"]
