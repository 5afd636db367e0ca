"""Chats with one thing or another wrong in them: the client hears of it, and the server goes on."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import pytest
from support.hostile_requests import mutated
from support.served import served

from .conftest import TEMPLATE, load

HI = {"role": "user", "content": "Hi"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "n": {"anyOf": [{"type": "integer"}]}},
    "required": ["city"],
}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}}
# what the model is made to have said, in both formats
SAID = (
    '</think><tool_call>\n{"name": "f", "arguments": {"city": 1}}\n</tool_call>'
    "<function=f>\n<parameter=city>\nOslo\n</parameter>\n<parameter=n>\n1\n</parameter>\n</function>"
)
TAGGED = (
    "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{# <function= <parameter= </think> #}<think>"
)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {
        "system": [{"type": "text", "text": "a"}],
        "messages": [
            HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "a"},
                    {"type": "text", "text": "b"},
                    {"type": "tool_use", "id": "a", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}]}
                ],
            },
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "stop_sequences": ["a"],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "stream": True,
    },
    "/v1/responses": {
        "instructions": "a",
        "input": [
            HI,
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
            {"type": "function_call", "name": "f", "call_id": "a", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "a",
                "output": [{"type": "input_text", "text": "x"}],
            },
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "required",
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "schema": SCHEMA}},
        "stream": True,
    },
    "/v1/chat/completions": {
        "messages": [
            HI,
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "x"},
            {"role": "tool", "tool_call_id": "a", "content": "x"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        "reasoning_format": "none",
        "chat_template_kwargs": {"enable_thinking": False, "a": 1},
        "thinking_budget_tokens": 0,
        "stream": True,
    },
    "/chat/completions": {
        "messages": [HI, {"role": "assistant", "content": SAID}],
        "tools": [{"type": "function", "function": FUNCTION}],
    },
    "/v1/responses/input_tokens": {"input": [HI], "tools": [{"type": "function", **FUNCTION}]},
    "/v1/messages/count_tokens": {"messages": [HI], "system": "a"},
}


@pytest.mark.parametrize("template", [TEMPLATE, TAGGED], ids=["json", "tagged"])
def test_mutated_chats(template: str) -> None:
    rng = random.Random(len(template))
    codes = set()
    with served(load, chat_template=template) as (url, _), httpx.Client(base_url=url, timeout=30) as client:
        for _ in range(150):
            path = rng.choice(list(BODIES))
            body = mutated(BODIES[path], rng)
            if isinstance(body, dict):
                body["n_predict"] = 2
                body["max_tokens"] = 2 if rng.random() < 0.9 else body.get("max_tokens")
            reply = client.post(path, content=json.dumps(body).encode())
            failed = reply.status_code == 500 or '"code":500' in reply.text
            assert not failed, (path, body, reply.text)
            codes.add(reply.status_code)
        assert {200, 400} <= codes <= {200, 400, 501}
        assert client.get("/health").status_code == 200


def test_variables_of_any_name(chats: httpx.Client) -> None:
    """None of them is taken for an argument of ours."""
    names = ("self", "messages", "begun", "variables", "add_generation_prompt", "context", "caller")
    body = {"messages": [HI], "max_tokens": 1, "chat_template_kwargs": dict.fromkeys(names, 1)}
    plain = chats.post("/apply-template", json={"messages": [HI]}).json()
    assert chats.post("/apply-template", json=body).json() == plain
