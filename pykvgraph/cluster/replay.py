"""A stream that was cut off, and the same one from another worker: what the client has isn't sent again."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from typing import Any

# what two answers to the same request need not have in common
_VARYING = frozenset(
    (
        *("id", "item_id", "call_id", "created", "created_at", "completed_at", "id_slot"),
        "sequence_number",
        *("timings", "usage", "tokens_cached", "logprobs", "completion_probabilities"),
    )
)


# Bytes of a stream that are kept, to be compared with when it is repeated: 50,000 tokens or more.
MOST_SENT = 16 << 20


# How far a prompt is: no part of the answer, and another worker decodes it in other parts. In a text the
# quotes would be escaped.
_PROGRESS = b'"prompt_progress":'


class RepeatError(Exception):
    """The stream can't be repeated: the repeated one says something else, or it was too long to be kept."""


_DIFFERS = "the worker is gone, and another one says something else"


class Replay:
    """The events that a client has been sent.

    The answers of a request may take turns in another order, so events are compared with those of their own
    answer. Ids are random: those of the repeated stream are written as the client knows them.
    """

    def __init__(self) -> None:
        self._sent: list[bytes] = []
        self._n_bytes = 0
        self._expected: dict[Any, deque[bytes]] = {}
        self._names: dict[bytes, bytes] = {}
        self._repeats = False

    def again(self) -> None:
        """The stream begins anew. Raises RepeatError."""
        if self._n_bytes > MOST_SENT:
            raise RepeatError("the worker is gone, and its answer is too long to be repeated")
        self._names = {}
        self._repeats = True
        self._expected = defaultdict(deque)
        for event in self._sent:
            self._expected[_place(_value(event))].append(event)

    def take(self, event: bytes) -> bytes:
        """What the client gets of an event, b"": nothing, as it has it. Raises RepeatError."""
        if event.startswith(b":"):
            return event  # a sign of life
        if _PROGRESS in event:
            return b"" if self._repeats else event
        if self._expected:
            value = _value(event)
            expected = self._expected.get(_place(value))
            if expected:
                self._compare(_value(expected.popleft()), value)
                return b""
            for name, known in self._names.items():
                event = event.replace(name, known)
        self._n_bytes += len(event)
        if self._n_bytes <= MOST_SENT:
            self._sent.append(event)
        else:
            self._sent.clear()
        return event

    def end(self) -> None:
        """The stream has ended. Raises RepeatError when the client has more of it."""
        if any(self._expected.values()):
            raise RepeatError(_DIFFERS)

    def _compare(self, sent: Any, value: Any) -> None:
        if isinstance(sent, dict) and isinstance(value, dict) and sent.keys() == value.keys():
            for name in sent:
                if name not in _VARYING:
                    self._compare(sent[name], value[name])
                elif isinstance(sent[name], str) and isinstance(value[name], str):
                    self._names[json.dumps(value[name]).encode()] = json.dumps(sent[name]).encode()
        elif isinstance(sent, list) and isinstance(value, list) and len(sent) == len(value):
            for pair in zip(sent, value, strict=True):
                self._compare(*pair)
        elif sent != value:
            raise RepeatError(_DIFFERS)


def _value(event: bytes) -> Any:
    """The JSON of an event; text where it has none."""
    _, _, data = event.partition(b"data: ")
    try:
        return json.loads(data)
    except ValueError:
        return data


def _place(value: Any) -> Any:
    """Which answer of the request an event belongs to, where it says so."""
    if not isinstance(value, dict):
        return None
    choices = value.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else value
    return first.get("index")
