"""The loop of one text: something is said by an output, and decoded when the next is asked for."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

from pykvgraph.context.context import LastOutput

Said = TypeVar("Said")  # a Piece, or a token
Sent = TypeVar("Sent")


def decode_text(
    last: LastOutput | None,
    say: Callable[[LastOutput], Said | None],
    append: Callable[[Said, Sent | None], LastOutput | None],
) -> Generator[Said, Sent | None, None]:
    """Yields what say(output) returns for one output after another; generate(), chats and Llama are drivers.

    last: the first output, of the prompt. append(said, sent) decodes what was said, and returns the next
    output; it is called when the caller asks for more, so that a text can be left without a token too many
    in the cache. sent: what the caller sent into the generator. The text ends where either returns None.
    """
    while last is not None:
        said = say(last)
        if said is None:
            return
        last = append(said, (yield said))
