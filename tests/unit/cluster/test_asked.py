"""What the router knows of a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pykvgraph.cluster.asked import WorkerRequest, asked_of


def asked(path: str, body: Any, key: bytes = b"", *, gives_seed: bool = True) -> WorkerRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return asked_of(path, "", data, key, gives_seed=gives_seed)


@pytest.mark.parametrize(
    ("path", "name"),
    [("/v1/chat/completions", "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")],
)
def test_a_conversation_that_goes_on_has_all_blocks_of_its_beginning(path: str, name: str) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 600}]
    short = asked(path, {"tools": [{"name": "f"}], name: turns[:1], "max_tokens": 5})
    long = asked(path, {"max_tokens": 7, name: turns, "tools": [{"name": "f"}]})
    assert long.blocks[: len(short.blocks)] == short.blocks and len(long.blocks) > len(short.blocks) + 2
    other = asked(path, {name: turns, "tools": [{"name": "g"}]})
    assert not set(other.blocks) & set(long.blocks)


@pytest.mark.parametrize("prompt", ["Once upon a time " * 60, list(range(400))])
def test_a_prompt_that_goes_on(prompt: Any) -> None:
    short = asked("/completion", {"prompt": prompt})
    long = asked("/completion", {"prompt": prompt + prompt})
    assert len(short.blocks) > 3 and set(short.blocks[:-1]) <= set(long.blocks)


def test_what_is_not_shared() -> None:
    body = {"prompt": "a" * 300}
    assert not set(asked("/completion", body, b"A").blocks) & set(asked("/completion", body, b"B").blocks)
    other = {**body, "model": "other"}
    assert not set(asked("/completion", body).blocks) & set(asked("/completion", other).blocks)
    adapted = {**body, "lora": [{"id": 0, "scale": 1.0}]}
    assert not set(asked("/completion", body).blocks) & set(asked("/completion", adapted).blocks)
    assert not asked("/completion", {**body, "cache_prompt": False}).blocks
    assert not asked("/tokenize", {"content": "a" * 300}).blocks


@pytest.mark.parametrize(
    "body", [b"{}", b" { } \n", b'{"prompt":"}"}', b'{"seed":-1}', b'{"seed": null , "n": 1}\n']
)
def test_a_request_without_a_seed_gets_one(body: bytes) -> None:
    with_seed = json.loads(asked("/completion", body).body)
    assert {**json.loads(body), "seed": with_seed["seed"]} == with_seed
    assert 0 <= with_seed["seed"] < 2**32 - 1
    assert asked("/completion", body).body != asked("/completion", body).body
    assert asked("/completion", body, gives_seed=False).body == body


@pytest.mark.parametrize("body", [b'{"seed": 5}', b'{"seed": "a"}', b"no", b"[]", b"\xff", b"[" * 100_000])
def test_a_body_stays_as_it_is(body: bytes) -> None:
    assert asked("/completion", body).body == body


def test_weight_and_slot() -> None:
    def weight(**more: Any) -> int:
        return asked("/completion", {"seed": 1, **more}).weight

    assert weight(n_predict=500) > weight(n_predict=100) > weight(n_predict=1)
    assert weight(n_predict=100, n=4) > weight(n_predict=100, n=2)
    assert weight(n_predict=-1) == weight(n_predict=-1, n="x") - len(b', "n": "x"')
    assert asked("/completion", {"id_slot": 6}).slot == 6
    assert [asked("/completion", {"id_slot": bad}).slot for bad in ("6", None, True, 6.0)] == [-1] * 4
