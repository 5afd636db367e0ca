"""What the server tells of itself, and text to tokens and back."""

from __future__ import annotations

import concurrent.futures
import re
import threading
from typing import Any

import httpx
import openai
import pytest
from support.served import N_SLOTS, served

import pykvgraph as kvg
from pykvgraph.server.run import Server, address_of, listen
from pykvgraph.server.settings import Settings

from .conftest import STORIES, load


def test_health_and_models(client: httpx.Client) -> None:
    assert client.get("/health").json() == client.get("/v1/health").json() == {"status": "ok"}
    told = client.get("/v1/models").json()["data"][0]
    assert told["id"] == str(STORIES)
    assert told["meta"]["n_vocab"] == 512 and told["meta"]["n_ctx_train"] == 512


@pytest.mark.client("openai", "the list of models")
def test_a_model_by_its_name(client: httpx.Client) -> None:
    """As OpenAI's package asks for it: a name may be a path."""
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as api:
        found = api.models.retrieve(str(STORIES))
        assert (found.id, found.object, found.owned_by) == (str(STORIES), "model", "pykvgraph")
        assert found == api.models.list().data[0].model_copy(update={"created": found.created})
        for other in ("gpt-4", STORIES.name, f"{STORIES}/", "a/b?c#d é", "'", ".."):
            with pytest.raises((openai.NotFoundError, ValueError)) as caught:
                api.models.retrieve(other)
            if isinstance(caught.value, openai.NotFoundError):
                assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
                assert caught.value.type == "invalid_request_error"
    assert client.get(f"/v1/models/{STORIES}").json()["id"] == str(STORIES)  # as it is, without %2F
    assert client.get("/v1/models/").status_code == 404


def test_a_model_by_its_aliases() -> None:
    odd = "org/name: a?b#c%20é"
    with (
        served(load, aliases=("first", odd), model_path="/x.gguf", api_keys=("secret",)) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api,
    ):
        for alias in ("first", odd):
            assert api.models.retrieve(alias).id == alias  # without a key, as the list
        with pytest.raises(openai.NotFoundError):
            api.models.retrieve("/x.gguf")


def test_props_and_slots(client: httpx.Client) -> None:
    props = client.get("/props").json()
    assert props["total_slots"] == N_SLOTS
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert (props["bos_token"], props["eos_token"]) == ("<s>", "</s>")
    slots = client.get("/slots").json()
    assert [slot["id"] for slot in slots] == list(range(N_SLOTS))
    assert not any(slot["is_processing"] for slot in slots)
    assert client.post("/props", json={}).status_code == 501


def test_a_slot_while_it_is_taken() -> None:
    fields = {"prompt": "Once", "ignore_eos": True, "n_predict": 400}
    with (
        served(load) as (url, server),
        httpx.Client(base_url=url) as client,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        with server.service.engine._loop._stepping:  # the engine stands still
            answer = pool.submit(client.post, "/completion", json=fields)
            taken: list[Any] = []
            while not taken:
                taken = [slot for slot in client.get("/slots").json() if slot["is_processing"]]
            assert client.get("/slots?fail_on_no_slot=1").status_code == 200
        assert answer.result(30).json()["tokens_predicted"] == 400
        assert not any(slot["is_processing"] for slot in client.get("/slots").json())
    assert len(taken) == 1
    assert taken[0]["params"]["n_predict"] == taken[0]["next_token"][0]["n_remain"] == 400


def test_metrics_count(client: httpx.Client) -> None:
    def value(name: str) -> float:
        found = re.search(rf"^kvgraph:{name} (\S+)$", client.get("/metrics").text, re.MULTILINE)
        assert found, name
        return float(found[1])

    before = value("tokens_predicted_total")
    client.post("/completion", json={"prompt": "Once", "n_predict": 7, "temperature": 0})
    assert value("tokens_predicted_total") == before + 7
    assert value("n_decode_total") > 0
    assert value("requests_processing") == 0
    assert 'kvgraph:cells_used{group="0",kind="full"}' in client.get("/metrics").text


LLAMA_METRICS = {  # as the README of llama-server lists them
    "prompt_tokens_total": "counter",
    "prompt_tokens_cached_total": "counter",
    "prompt_seconds_total": "counter",
    "tokens_predicted_total": "counter",
    "tokens_predicted_seconds_total": "counter",
    "n_decode_total": "counter",
    "n_tokens_max": "counter",
    "spec_decode_num_draft_tokens_total": "counter",
    "spec_decode_num_accepted_tokens_total": "counter",
    "spec_decode_num_drafts_total": "counter",
    "prompt_tokens_seconds": "gauge",
    "predicted_tokens_seconds": "gauge",
    "requests_processing": "gauge",
    "requests_deferred": "gauge",
    "n_busy_slots_per_decode": "gauge",
}


def test_metrics_have_the_names_of_llama_server() -> None:
    def values(text: str) -> dict[str, float]:
        return {
            name: float(value) for name, value in re.findall(r"^llamacpp:(\w+) (\S+)$", text, re.MULTILINE)
        }

    with served(load, metrics=True) as (url, _):
        asked = {"prompt": "Once upon", "n_predict": 7, "temperature": 0}
        timings = [httpx.post(f"{url}/completion", json=asked).json()["timings"] for _ in range(2)]
        text = httpx.get(f"{url}/metrics").text
        later = values(httpx.get(f"{url}/metrics").text)
    kinds = dict(re.findall(r"^# TYPE llamacpp:(\w+) (\w+)$", text, re.MULTILINE))
    assert kinds == LLAMA_METRICS
    assert set(re.findall(r"^# HELP llamacpp:(\w+) \w", text, re.MULTILINE)) == set(LLAMA_METRICS)
    found = values(text)
    assert found.keys() == LLAMA_METRICS.keys()
    for name, timing in (
        ("prompt_tokens_total", "prompt_n"),
        ("prompt_tokens_cached_total", "cache_n"),
        ("tokens_predicted_total", "predicted_n"),
    ):
        assert found[name] == sum(each[timing] for each in timings)
    assert found["n_tokens_max"] == timings[0]["prompt_n"] + 7
    assert found["n_busy_slots_per_decode"] == 1.0  # one was answered after the other
    steps = sum(each["predicted_n"] - 1 for each in timings)
    seconds = sum(each["predicted_ms"] for each in timings) / 1e3
    assert found["predicted_tokens_seconds"] == pytest.approx(steps / seconds)
    assert later["predicted_tokens_seconds"] == later["prompt_tokens_seconds"] == 0.0  # nothing since then


def test_a_slot_without_a_request_has_nothing_left_to_say(client: httpx.Client) -> None:
    client.post("/completion", json={"prompt": "Once", "n_predict": 7, "temperature": 0})
    told = [slot["next_token"][0] for slot in client.get("/slots").json() if "next_token" in slot]
    assert told and all(each["n_decoded"] == 0 and each["n_remain"] == -1 for each in told)


def test_tokens(client: httpx.Client) -> None:
    told = client.post("/tokenize", json={"content": "á", "with_pieces": True}).json()["tokens"]
    assert [each["piece"] for each in told][-2:] == [[0xC3], [0xA1]]  # as llama-server's README has it
    ids = client.post("/tokenize", json={"content": "Once upon", "add_special": True}).json()["tokens"]
    with kvg.Model(STORIES, device="cpu") as model:
        assert ids == model.tokenizer.encode("Once upon")
    assert client.post("/detokenize", json={"tokens": ids[1:]}).json()["content"] == " Once upon"
    assert client.post("/tokenize", json={}).json() == {"tokens": []}


def test_tokens_as_vllm_has_them(client: httpx.Client) -> None:
    """By these lm-eval and others count tokens without the model's own tokenizer."""
    told = client.get("/tokenizer_info").json()
    assert (told["bos_token"], told["eos_token"]) == ("<s>", "</s>")
    asked = {"prompt": "Once upon</s>", "add_special_tokens": False}
    bare = client.post("/tokenize", json=asked).json()
    with kvg.Model(STORIES, device="cpu") as model:
        assert bare["tokens"] == [*model.tokenizer.encode("Once upon", False), model.tokenizer.eos]
        whole = client.post("/tokenize", json={"prompt": "Once upon"}).json()
        assert whole["tokens"] == model.tokenizer.encode("Once upon")
    assert (bare["count"], bare["max_model_len"]) == (len(bare["tokens"]), 512)
    assert client.post("/detokenize", json=bare).json()["prompt"] == " Once upon</s>"
    assert client.post("/tokenize", json={"prompt": ["a"]}).status_code == 400


def test_what_is_not_there(client: httpx.Client) -> None:
    replies = (
        client.get("/nothing"),
        client.get("/completion"),
        client.post("/health"),
        client.get("/health/"),
    )
    for reply in replies:
        assert reply.status_code == 404
        error = reply.json()["error"]
        assert (error["code"], error["type"]) == (404, "not_found_error")


def test_pages_of_other_origins(client: httpx.Client) -> None:
    origin = {"Origin": "http://elsewhere.example"}
    assert client.get("/health", headers=origin).headers["access-control-allow-origin"] == origin["Origin"]
    preflight = client.options("/completion", headers=origin)
    assert preflight.status_code == 200 and "POST" in preflight.headers["access-control-allow-methods"]


@pytest.mark.parametrize("header", ["Authorization", "X-Api-Key"])
def test_keys(header: str) -> None:
    with served(load, api_keys=("one", "two"), slots=False) as (url, _), httpx.Client(base_url=url) as client:
        for key in ("one", "two"):
            given = {header: f"Bearer {key}" if header == "Authorization" else key}
            for scheme in ("Bearer ", "bearer ", "BEARER ", "Bearer  "):  # RFC 9110, 11.1: in any case
                headers = {name: value.replace("Bearer ", scheme) for name, value in given.items()}
                assert client.post("/tokenize", json={}, headers=headers).status_code == 200
            assert client.get("/slots", headers=given).status_code == 501
            assert client.get("/metrics", headers=given).status_code == 501
        for wrong in ("", "on", "onetwo", "ONE", "Basic one", "Bearerone", "bearer ONE"):
            reply = client.post("/tokenize", json={}, headers={header: wrong})
            assert reply.status_code == 401
            assert reply.json()["error"]["type"] == "authentication_error"
        refused = client.post("/v1/messages", json={})
        missing = client.get("/v1/messages/none", headers={"X-Api-Key": "one"})
        assert (refused.status_code, missing.status_code) == (401, 404)
        assert refused.json()["type"] == missing.json()["type"] == "error"  # as Anthropic's clients want it
        assert client.get("/health").status_code == client.get("/v1/models").status_code == 200


def test_an_engine_that_has_ended() -> None:
    """By an error in the midst of a step: who asks hears that the server is at fault."""
    with served(load) as (url, server), httpx.Client(base_url=url) as client:
        assert server.service.engine is not None
        server.service.engine.close()
        for reply in (client.get("/health"), client.post("/completion", json={"prompt": "a"})):
            assert reply.status_code == 503 and "has ended" in reply.json()["error"]["message"]


def test_while_the_model_is_loaded() -> None:
    """Clients hear so, and a model that can't be loaded ends the server."""
    go_on = threading.Event()
    raised: list[BaseException] = []

    def fail() -> kvg.Engine:
        go_on.wait(30)
        raise kvg.ModelLoadError("broken")

    listener = listen("127.0.0.1", 0)
    server = Server(Settings(), fail)

    def run() -> None:
        try:
            server.run(sockets=[listener])
        except kvg.ModelLoadError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with httpx.Client(base_url=address_of(listener)) as client:
            for reply in (client.get("/health"), client.post("/completion", json={"prompt": "a"})):
                assert reply.status_code == 503
                assert reply.json()["error"] == {
                    "code": 503,
                    "message": "Loading model",
                    "type": "unavailable_error",
                }
    finally:
        go_on.set()
        thread.join(30)
        listener.close()
    assert str(raised[0]) == "broken"
