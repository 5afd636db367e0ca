"""Which tokens of a stream a worker tells, for another one that may have to go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from pykvgraph.server.http.reply import JobReply
from pykvgraph.types import Piece


def piece_of(token: int, text: str) -> Piece:
    return Piece(text, token, -1.0, None, 0, ())


# the first token is half a letter: its text comes with the second one
BUNCHES = [[piece_of(7, "")], [piece_of(8, "\u00e9")], [piece_of(9, "")]]


@pytest.mark.parametrize(
    ("n_probs", "tells", "wanted"),
    [
        (0, True, b":said 7\n\n:said 8\n\n\xc3\xa9;:said 9\n\n."),
        (2, True, b":said 7,8\n\n\xc3\xa9;:said 9\n\n."),
        (0, False, b"\xc3\xa9;."),
    ],
)
def test_tokens_with_probabilities_are_told_with_their_text(n_probs: int, tells: bool, wanted: bytes) -> None:
    """A token that is told is repeated without its probability, so the client must have that already."""
    sample = SimpleNamespace(tells_probs=n_probs > 0, n_probs=n_probs)

    class OneJob:
        def __init__(self) -> None:
            self.tells, self.samples = tells, [sample]

        async def said(self) -> AsyncIterator[Any]:
            for bunch in [*BUNCHES, []]:
                yield sample, bunch

    form = SimpleNamespace(
        is_long=False,
        events=lambda sample, pieces: [each.text.encode() + b";" for each in pieces if each.text],
        last_events=lambda sample: [b"."],
        end=lambda samples: [],
        framed=lambda event: event,
    )
    reply = JobReply(OneJob(), form, streams=True, ping_seconds=0, io_seconds=1)  # type: ignore[arg-type]

    async def all_of_it() -> bytes:
        return b"".join([data async for data in reply._events()])

    assert asyncio.run(all_of_it()) == wanted
