"""What the router knows of a request: its text as blocks, about how much work it is, and its bytes."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pykvgraph.cluster.prefixes import TextBlock, blocks_of
from pykvgraph.openai.errors import WireError
from pykvgraph.openai.wire_json import loads
from pykvgraph.params.params import MAX_SEED

# endpoints that say something; what others do has no prefix
SAYING = frozenset(
    (
        *("/completion", "/completions", "/v1/completions", "/infill"),
        *("/chat/completions", "/v1/chat/completions", "/v1/messages", "/responses", "/v1/responses"),
    )
)
_BYTES_OF_A_TOKEN = 4
_TOKENS = 128  # of an answer, where the request says nothing
_MOST_TOKENS = 2048  # of the answers, however many it may have: most end long before
_LIMITS = ("n_predict", "max_completion_tokens", "max_tokens", "max_output_tokens")
# a text's parts, in the order in which prompts have them
_PARTS = ("system", "instructions", "tools", "messages", "input", "prompt")
_PARTS_OF_INFILL = ("input_extra", "input_prefix", "prompt", "input_suffix")


@dataclass(frozen=True)
class WorkerRequest:
    """path: with the query. body: as it is sent to a worker. weight: bytes to read and to write, about.

    slot: the one that it must have; -1: any. says: whether a text is wanted.
    """

    path: str
    body: bytes
    blocks: tuple[TextBlock, ...] = ()
    weight: int = 0
    slot: int = -1
    says: bool = False


def asked_of(
    path: str, query: str, body: bytes, key: bytes, *, gives_seed: bool, cache_prompt: bool = True
) -> WorkerRequest:
    """key: of the client; prompts under different keys share nothing. gives_seed: a request without a seed
    gets one, so that it can be answered again with the same tokens. cache_prompt: of requests that don't say.

    A body that can't be understood is left to a worker, which says what is wrong with it.
    """
    whole = f"{path}?{query}" if query else path
    try:
        fields = loads(body)
    except WireError:
        fields = None
    if not isinstance(fields, dict):
        return WorkerRequest(whole, body, weight=len(body))
    slot = fields.get("id_slot")
    slot = slot if type(slot) is int else -1
    if path not in SAYING:
        return WorkerRequest(whole, body, weight=len(body), slot=slot)
    blocks: list[TextBlock] = []
    wants_cache = fields.get("cache_prompt")
    if cache_prompt if wants_cache is None else wants_cache is not False:
        with contextlib.suppress(RecursionError):  # it is as deep as JSON may be
            blocks = blocks_of(_root(fields, key), _parts(path, fields))
    if gives_seed and fields.get("seed") in (None, -1):
        body = with_field(body, "seed", b"%d" % secrets.randbelow(MAX_SEED), is_empty=not fields)
    weight = len(body) + _BYTES_OF_A_TOKEN * _n_tokens(fields)
    return WorkerRequest(whole, body, tuple(blocks), weight, slot, says=True)


def _root(fields: dict[str, Any], key: bytes) -> bytes:
    """What must be equal for cells to be shared, or changes the prompt from its beginning."""
    return (
        key
        + b"\0"
        + _dumps([fields.get("model"), fields.get("chat_template_kwargs"), fields.get("lora") or None])
    )


def _parts(path: str, fields: dict[str, Any]) -> Iterator[bytes]:
    for name in _PARTS_OF_INFILL if path == "/infill" else _PARTS:
        value = fields.get(name)
        if name in ("messages", "input") and isinstance(value, list):
            yield from map(_dumps, value)
        elif value:
            # without its end, so that a text that goes on begins with the same bytes
            yield _dumps(value)[:-1]


def _dumps(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _n_tokens(fields: dict[str, Any]) -> int:
    given = next((fields[name] for name in _LIMITS if type(fields.get(name)) is int), _TOKENS)
    n = fields.get("n")
    return min((given if given >= 0 else _TOKENS) * (n if type(n) is int and n > 0 else 1), _MOST_TOKENS)


def with_field(body: bytes, name: str, value: bytes, is_empty: bool = False) -> bytes:
    """Behind all other fields, which keep their bytes; of two equal names JSON takes the last.

    body: a JSON object, is_empty: which has no field. value: JSON.
    """
    return b'%b%b"%b":%b}' % (body.rstrip()[:-1], b"" if is_empty else b",", name.encode(), value)
