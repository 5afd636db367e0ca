"""Requests that a server must stand: bodies of every endpoint and heads, with parts of them replaced."""

from __future__ import annotations

import copy
import http.client
import json
import random
import socket
from typing import Any, NamedTuple

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES: dict[str, dict[str, Any]] = {
    "/completion": {
        "prompt": [1, 403, "Once"],
        "n_predict": 2,
        "temperature": 0.5,
        "stop": ["a", "b"],
        "logit_bias": [[5, -1.5], ["a", False]],
        "samplers": ["top_k", "temperature"],
        "seed": 3,
        "n_cmpl": 2,
        "response_fields": ["content"],
        "n_probs": 2,
        "n_keep": 3,
        "n_discard": 2,
        "id_slot": 1,
    },
    "/v1/completions": {
        "prompt": ["a", [1, 2]],
        "max_tokens": 2,
        "n": 2,
        "logprobs": 1,
        "stream": True,
        "echo": True,
    },
    "/v1/chat/completions": {
        "messages": [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}],
        "max_tokens": 2,
        "tools": [TOOL],
        "tool_choice": "auto",
        "response_format": {"type": "json_object", "schema": {"type": "integer"}},
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"a": 1},
        "logprobs": True,
        "top_logprobs": 2,
    },
    "/v1/chat/completions/input_tokens": {"messages": MESSAGES, "tools": [TOOL]},
    "/v1/messages": {
        "system": [{"type": "text", "text": "a"}],
        "messages": [*MESSAGES, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}],
        "max_tokens": 2,
        "stop_sequences": ["b"],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
        "stream": True,
    },
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}],
        "instructions": "b",
        "max_output_tokens": 2,
        "stream": True,
    },
    "/v1/responses/input_tokens": {"input": "a"},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c"}], "n_predict": 2},
    "/embeddings": {"input": ["a", [1, 2]], "embd_normalize": 2},
    "/v1/embeddings": {"input": "a", "encoding_format": "base64", "dimensions": 8},
    "/tokenize": {"content": ["a", 5], "add_special": True, "with_pieces": True},
    "/detokenize": {"tokens": [1, 403]},
    "/apply-template": {"messages": MESSAGES},
    "/slots/1?action=save": {"filename": "a"},
    "/slots/1?action=restore": {"filename": "a"},
    "/slots/1?action=erase": {},
    "/props": {},
}
GETS = [
    "/health",
    "/v1/models",
    "/props",
    "/slots",
    "/slots?fail_on_no_slot=1",
    "/metrics",
    "/cells",
    "/",
    "/none",
]
ODD: list[Any] = [
    None, True, -1, 0, 10**30, -(2**63), 1.5, 1e308, "", "\ud800", "\0", "é" * 50, [], {}, [[]], [None],
    {"": {}}, "../a", "a" * 300, ["a"] * 20, [0] * 600, "word " * 700,
    {"function": {}}, [{"type": "text"}], "root ::= root", {"type": {"type": []}}, [[1, 2, 3]], [[0, True]],
]  # fmt: skip
NAMES = [
    "grammar",
    "json_schema",
    "mirostat",
    "samplers",
    "stop",
    "n",
    "stream",
    "id_slot",
    "n_keep",
    "tools",
]
HEADERS = [
    "Content-Type: text/plain",
    "Content-Type: application/json; charset=latin-1",
    "Content-Encoding: gzip",
    "Expect: 100-continue",
    "Authorization: Bearer",
    "Authorization: Basic \xff\xfe",
    "X-Api-Key: " + "k" * 5000,
    "Origin: null",
    "Accept: */*;q=nan",
    "Host: b",
    "Upgrade: websocket",
    "Connection: keep-alive, Upgrade",
    "Cookie: " + "a=b;" * 300,
    "Range: bytes=0-",
    "anthropic-version: \t",
    "Transfer-Encoding: gzip",
]


class Answer(NamedTuple):
    """code: 0 when the server has closed the connection without one. kind: of the content."""

    code: int
    kind: str
    text: bytes

    @property
    def is_right(self) -> bool:
        """Whether a client may hear this, whatever it has sent."""
        if self.code == 0 or self.code == 200:
            return True
        if not (400 <= self.code < 500 or self.code in (501, 503)):
            return False
        told = json.loads(self.text)
        return isinstance(told["error"]["message"], str) and self.kind.startswith("application/json")


def places(value: Any) -> list[list[Any]]:
    """The way to everything in a JSON value."""
    found: list[list[Any]] = [[]]
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        found += [[key, *way] for way in places(child)]
    return found


def mutated(body: dict[str, Any], rng: random.Random) -> Any:
    """The body with one part or more replaced, left out, or added."""
    changed: Any = {"": copy.deepcopy(body)}
    for _ in range(rng.choice([1, 1, 2, 3])):
        *way, last = rng.choice([["", *way] for way in places(changed[""])])
        inside = changed
        for key in way:
            inside = inside[key]
        if way and rng.random() < 0.2:
            del inside[last]
        elif isinstance(inside, dict) and rng.random() < 0.2:
            inside[rng.choice(NAMES)] = copy.deepcopy(rng.choice(ODD))
        else:
            inside[last] = copy.deepcopy(rng.choice(ODD))
    return changed[""]


def request_of(rng: random.Random) -> bytes:
    """One of them, as it is sent; in most of them the head is whole."""
    if rng.random() < 0.1:
        return _damaged(_head("GET", rng.choice(GETS), b"", rng), rng)
    path = rng.choice(list(BODIES))
    body = mutated(BODIES[path], rng)
    if isinstance(body, dict):  # or an answer takes all of the context
        for name in ("n_predict", "max_tokens", "max_output_tokens"):
            if body.get(name) in (None, -1, 0) or not isinstance(body[name], int):
                body[name] = 2 if rng.random() < 0.8 else body.get(name)
    data = json.dumps(body).encode()
    if rng.random() < 0.1:
        data = data[: rng.randrange(len(data) + 1)] + bytes([rng.randrange(256)])
    return _damaged(_head("POST", path, data, rng) + data, rng)


def _head(method: str, path: str, body: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.05:
        method = rng.choice(["PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"])
    length = rng.choice([-1, 0, len(body) + 5, 1 << 62]) if rng.random() < 0.03 else len(body)
    lines = [f"{method} {path} HTTP/1.1", "Host: a", "Connection: close", f"Content-Length: {length}"]
    lines += rng.sample(HEADERS, rng.choice([0, 0, 0, 1, 3]))
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _damaged(data: bytes, rng: random.Random) -> bytes:
    if rng.random() > 0.1:
        return data
    at = rng.randrange(min(len(data), 150))
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]


def send(where: tuple[str, int], data: bytes, seconds: float = 60) -> Answer:
    """Raises TimeoutError when the server neither answers nor closes."""
    with socket.create_connection(where, seconds) as client:
        client.settimeout(seconds)
        reply = http.client.HTTPResponse(client, method=data.split(b" ")[0].decode("latin-1"))
        try:
            client.sendall(data)
            reply.begin()
            return Answer(reply.status, reply.getheader("Content-Type", ""), reply.read())
        except (ConnectionError, http.client.HTTPException):
            return Answer(0, "", b"")
