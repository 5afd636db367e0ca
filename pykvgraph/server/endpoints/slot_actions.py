"""POST /slots/{id}: what can be done with a slot's last text, and with its cells."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from pykvgraph.checks import shown
from pykvgraph.context.common_length import common_length
from pykvgraph.engine.prefix_edits import salt_without
from pykvgraph.openai.errors import invalid, unavailable, unsupported
from pykvgraph.openai.wire_json import loads
from pykvgraph.server.endpoints.slot_files import folder_of, save_or_restore
from pykvgraph.server.http.body import SHORT, read_body
from pykvgraph.server.http.keys import key_of
from pykvgraph.server.http.reply import JsonReply
from pykvgraph.server.requests.fields import Fields
from pykvgraph.server.service import Service, salt_of
from pykvgraph.server.slots import Text, own_text

_OF_FILES = ("save", "restore")
_IN_CELLS = ("fork", "edit")
_MOST_SPANS = 64


async def act(service: Service, request: Request) -> ASGIApp:
    """action=save, restore, erase, fork or edit. A slot that is taken is waited for. Raises WireError."""
    action = request.query_params.get("action")
    if action in _IN_CELLS and not service.settings.slots:
        raise unsupported("This server does not support slots endpoint. Start it with `--slots`")
    if action not in _IN_CELLS:
        folder_of(service)  # as llama-server does, whatever the action
    slot = _slot(request.path_params["id_slot"], service.slots.ids)
    salt = salt_of(key_of(request))
    if action in _OF_FILES:
        return JsonReply(await save_or_restore(service, request, slot, salt))
    if action == "erase":
        return JsonReply(await _erase(service, slot, salt))
    if action not in _IN_CELLS:
        raise invalid("Invalid action")
    settings = service.settings
    body = await read_body(request, min(settings.max_body, SHORT), settings.body_seconds)
    fields = Fields(loads(body or b"{}"))
    begin = time.perf_counter()
    told = await (_fork if action == "fork" else _edit)(service, slot, salt, fields)
    return JsonReply({**told, "timings": {f"{action}_ms": (time.perf_counter() - begin) * 1e3}})


async def _erase(service: Service, slot: int, salt: bytes) -> dict[str, Any]:
    text = await own_text(service.slots, slot, salt)
    n = 0
    if text.ids:
        forget = service.engine.forget_prefix
        n = await asyncio.to_thread(forget, text.ids, salt=text.salt_of_cells, adapters=text.adapters)
        service.slots.put(slot, Text([], salt))
    return {"id_slot": slot, "n_erased": n}


async def _fork(service: Service, slot: int, salt: bytes, fields: Fields) -> dict[str, Any]:
    """Another slot gets the same text, whose cells both have: none is copied."""
    slots = service.slots
    text = await own_text(slots, slot, salt)
    ids = slots.ids
    other = fields.integer("id_slot", -1, -1, ids[-1])
    other = slots.longest_free(but=slot) if other < 0 else other
    if other < 0:
        raise unavailable("fork: no other slot is free; name one in `id_slot` to wait for it")
    if other == slot or other not in ids:
        raise invalid(f"fork: id_slot must be another slot, from {ids[0]} to {ids[-1]}, got {other}")
    await slots.text(other)
    slots.put(other, text)
    return {"id_slot": slot, "id_slot_fork": other, "n_forked": await _n_cached(service, text)}


async def _edit(service: Service, slot: int, salt: bytes, fields: Fields) -> dict[str, Any]:
    """Tokens or messages of the text go; who names the slot goes on from what is left."""
    text = await own_text(service.slots, slot, salt)
    spans = await asyncio.to_thread(_spans, fields, text)  # templates take a while
    repair = {"repair": fields.integer("repair", 0, 0)} if "repair" in fields else {}
    edits = salt_without(text.salt_of_cells, text.ids, spans, **repair)
    found = await asyncio.to_thread(
        service.engine.edit_prefix,
        text.ids,
        spans,
        into=edits,
        salt=text.salt_of_cells,
        adapters=text.adapters,
        **repair,
    )
    if found.n_exact == found.n_cached:  # nothing that the engine has of it became another text's
        edits = text.edits
    service.slots.put(slot, Text(found.ids, salt, text.adapters, edits=edits, n_exact=found.n_exact))
    told = {"n_removed": len(text.ids) - len(found.ids), "n_tokens": len(found.ids)}
    return {"id_slot": slot, **told, "n_cached": found.n_cached, "n_exact": found.n_exact}


async def _n_cached(service: Service, text: Text) -> int:
    if not text.ids:
        return 0
    find = service.engine.find_prefix
    return await asyncio.to_thread(find, text.ids, salt=text.salt_of_cells, adapters=text.adapters)


def _slot(text: str, ids: range) -> int:
    slot = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
    if slot not in ids:
        raise invalid("Invalid slot ID")
    return slot


def _spans(fields: Fields, text: Text) -> list[tuple[int, int]]:
    """Of tokens. Raises WireError."""
    tokens, messages = fields.array("tokens"), fields.array("messages")
    if bool(tokens) == bool(messages) or len(tokens) + len(messages) > _MOST_SPANS:
        raise invalid(
            "edit: send `tokens`, such as [[4, 9]] for tokens 4 to 8, or `messages`, such as [1], "
            f"{_MOST_SPANS} of them at most"
        )
    if not text.ids:
        raise invalid("edit: the slot has no text of yours: ask something with its id_slot first")
    if messages:
        return _of_messages(messages, text)
    return tokens  # salt_without() checks what they are


def _of_messages(numbers: list[Any], text: Text) -> list[tuple[int, int]]:
    """What the template leaves out without them."""
    if text.without is None:
        raise invalid(
            "edit: which tokens a message has is known of a slot's last chat, until the first edit: send "
            "`tokens`, or the messages of one edit together"
        )
    if not all(type(number) is int for number in numbers):
        raise invalid(f"edit: a message must be its number, got {shown(numbers)}")
    left, gone = text.ids[: text.n_prompt], set[int]()
    where = list(range(len(left)))  # in the whole prompt, of each token that is left
    for number in numbers:
        gone.add(number)
        shorter = text.without(gone)
        begin, n_gone = common_length(left, shorter), len(left) - len(shorter)
        if n_gone < 0 or left[begin + n_gone :] != shorter[begin:]:
            raise invalid(f"edit: without message {number} the template writes others in another way, too")
        del where[begin : begin + n_gone]
        left = shorter
    ends = [0, *(at + 1 for at in where)]
    return [(end, at) for end, at in zip(ends, [*where, text.n_prompt], strict=True) if end < at]
