"""`truncation` of /v1/responses: items go from the beginning of a conversation until the others fit."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

from pykvgraph.checks import shown
from pykvgraph.openai.errors import invalid
from pykvgraph.server.requests.fields import Fields

_KINDS = ("disabled", "auto")
_INSTRUCTIONS = ("system", "developer")
_MOST_ROOM = 4  # an answer that may be long gets one part in so many of the context


def truncation_of(fields: Fields) -> str:
    """Raises WireError."""
    kind = fields.text("truncation", "disabled")
    if kind not in _KINDS:
        raise invalid(f"truncation must be one of {', '.join(_KINDS)}, got {shown(kind)}")
    return kind


def truncated(fields: Fields, n_ctx: int, fits: Callable[[Fields, int], bool]) -> Fields:
    """A body of /v1/responses, without the first items that must go so that its prompt and an answer fit.

    The answer has room for max_output_tokens, or for a quarter of the context if these are more or none are
    said. Instructions stay, and the last item does, so that it may still be too long. fits: whether a body's
    prompt has so many tokens at most. Raises WireError, and what fits() raises.
    """
    items = fields.get("input")
    if truncation_of(fields) == "disabled" or not isinstance(items, list):
        return fields
    most = max(n_ctx // _MOST_ROOM, 1)
    room = min(fields.integer("max_output_tokens", most, 1), most)
    last = _call_id(items[-1]) if items else None
    stays = {last} - {None}  # the call of which the last item is the result
    may_go = [n for n, item in enumerate(items[:-1]) if not (_instructs(item) or _call_id(item) in stays)]

    def left(n_gone: int) -> Fields:
        return fields.replaced(input=_without(items, set(may_go[:n_gone])))

    n_gone = bisect.bisect_left(range(len(may_go)), True, key=lambda n: fits(left(n), n_ctx - room))
    return left(n_gone)


def _instructs(item: Any) -> bool:
    return isinstance(item, dict) and item.get("role") in _INSTRUCTIONS


def _without(items: list[Any], gone: set[int]) -> list[Any]:
    """The result of a call goes with the call."""
    calls = {_call_id(items[number]) for number in gone} - {None}
    kept = [item for number, item in enumerate(items) if number not in gone]
    return [item for item in kept if _call_id(item) not in calls]


def _call_id(item: Any) -> str | None:
    given = item.get("call_id") if isinstance(item, dict) else None
    return given if isinstance(given, str) else None
