"""`structured_outputs` and `guided_...`, as vLLM's clients send them."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
OBJECT = r'\{ ?"n" ?: ?[12] ?\}'
WAYS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": r"\d{3}/[ab]+!"}}, r"[0-9]{3}/[ab]+!"),
    ({"guided_regex": "x{2,4}"}, "x{2,4}"),
    ({"structured_outputs": {"choice": ['say "yes"', "no\\"]}}, r'say "yes"|no\\'),
    ({"guided_choice": ["yes"]}, "yes"),
    ({"structured_outputs": {"json": SCHEMA}}, OBJECT),
    ({"guided_json": '{"const": 7}'}, "7"),
    ({"structured_outputs": {"grammar": 'root ::= "a" [bc]'}}, "a[bc]"),
    ({"structured_outputs": {"json_object": True}, "max_tokens": 4}, r"\{[\s\S]*"),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/completion", "/v1/chat/completions"])
@pytest.mark.parametrize(("asked", "form"), WAYS, ids=lambda each: str(each)[:40])
def test_answers(client: httpx.Client, path: str, asked: dict[str, Any], form: str) -> None:
    for seed in range(3):
        text = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "It is"}
        body = {**text, "max_tokens": 80, "temperature": 0.8, "seed": seed, "logit_bias": [["!", 5]], **asked}
        told = client.post(path, json=body).json()
        choice = told["choices"][0] if "choices" in told else {"text": told["content"]}
        said = choice["message"]["content"] if "message" in choice else choice["text"]
        assert re.fullmatch(form, said.replace("\n", " ")), told


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "one of"),
        ({"structured_outputs": {"regex": 5}}, "Field .regex."),
        ({"structured_outputs": {"choice": []}}, "choice is empty"),
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"guided_json": "{"}, "no JSON"),
        ({"structured_outputs": {"choice": [5]}}, "choice"),
        ({"guided_json": {"uniqueItems": True}}, "uniqueItems"),
        ({"guided_regex": "(["}, "be obeyed"),
    ],
)
def test_what_is_refused(client: httpx.Client, asked: dict[str, Any], named: str) -> None:
    reply = client.post("/v1/completions", json={"prompt": "It is", "max_tokens": 4, **asked})
    assert reply.status_code == 400
    assert re.search(named, reply.json()["error"]["message"])
