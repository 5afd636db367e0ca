"""Where tokens of a text end, whatever the model says next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pykvgraph.model.tokenizer import Tokenizer

_NEAR = 256  # characters before the end of a text, more than a token has


def settled(tokenizer: Tokenizer, text: str, follows: Sequence[str]) -> str:
    """The longest beginning of a text at whose end a token ends, whichever of the others follows the text.

    A model has learned from whole texts, in which a token may have the end of this text and the beginning of
    the next one. Names of control tokens are these tokens.
    """
    far, near = text[:-_NEAR], text[-_NEAR:]
    data = near.encode("utf-8", "replace")  # encode() says what can't be written
    ends = set(range(len(data) + 1))
    for other in follows:
        tokens = tokenizer.encode(near + other, add_special=False, parse_special=True)
        pieces = [tokenizer.token_to_piece(token, special=True) for token in tokens]
        ends &= set(_ends(pieces, data + other.encode("utf-8", "replace")))
    # in the midst of a character is no end of a text
    n = max((end for end in ends if end == len(data) or data[end] & 0xC0 != 0x80), default=0)
    return far + data[:n].decode() if n else ""


def _ends(pieces: Iterable[bytes], text: bytes) -> list[int]:
    """After how many bytes of a text its tokens end; none where their bytes aren't those of the text."""
    pieces = list(pieces)
    said = b"".join(pieces)
    if not said.endswith(text):  # there may be a space in front of it
        return []
    at = len(text) - len(said)
    return [at := at + len(piece) for piece in pieces]
