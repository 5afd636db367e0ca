"""What every form of an answer has in common."""

from __future__ import annotations

import secrets
import string
import time
from typing import Any, Protocol

from pykvgraph.openai.errors import WireError, typed_error
from pykvgraph.openai.sample import Sample
from pykvgraph.types import Piece

MANY_PROBS = 1 << 12  # probabilities, whose JSON takes a while
_LETTERS = string.ascii_letters + string.digits


class Form(Protocol):
    """How an answer is written: events of a stream, or one JSON value."""

    closing: bytes  # what ends a stream
    is_long: bool = False  # whether its JSON takes a while, be it of a single event

    def events(self, sample: Sample, pieces: list[Piece]) -> list[bytes]:
        """JSON of the events for what was said."""

    def progress_events(self, sample: Sample) -> list[bytes]:
        """Those for how far the sample's prompt is."""

    def last_events(self, sample: Sample) -> list[bytes]:
        """Those at the end of a sample."""

    def end(self, samples: list[Sample]) -> list[bytes]:
        """Those at the end of all."""
        return []

    def whole(self, samples: list[Sample]) -> Any:
        """The answer of a body that wants no stream."""

    def error(self, error: WireError) -> dict[str, Any]:
        """The event when it goes wrong amid a stream."""
        return error.body()

    def framed(self, event: bytes) -> bytes:
        """An event as it is sent."""
        return b"data: %b\n\n" % event


class NamedForm(Form, Protocol):
    """One whose events are sent under the name that is their JSON's first value, `type`."""

    closing: bytes = b""

    def error(self, error: WireError) -> dict[str, Any]:
        """The event when it goes wrong amid a stream."""
        return typed_error(error)

    def framed(self, event: bytes) -> bytes:
        """An event as it is sent."""
        return b"event: %b\ndata: %b\n\n" % (event.split(b'"', 4)[3], event)


def new_id(prefix: str = "chatcmpl-") -> str:
    """A unique id."""
    return prefix + "".join(secrets.choice(_LETTERS) for _ in range(32))


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())
