"""The texts of a vocabulary's tokens, as a GGUF file has them; taken apart when somebody asks for them."""

from __future__ import annotations

import functools

from pykvgraph._native.fork import renew_cached_properties_in_child


class TokenStrings:
    """joined: each token's text, with a NUL behind it."""

    def __init__(self, joined: bytes) -> None:
        self._joined = b"\0" + joined
        self.n = joined.count(b"\0")

    def __contains__(self, text: bytes) -> bool:
        return text in self._all

    @functools.cached_property
    def single_bytes(self) -> frozenset[int]:
        """The bytes that a SentencePiece vocabulary has a token for."""
        if b"\0%b\0" % b"\0".join(b"<0x%02X>" % byte for byte in range(256)) in self._joined:
            return frozenset(range(256))  # as nearly every one has them, one behind the other
        return frozenset(
            byte for byte in range(256) if b"<0x%02X>" % byte in self or (byte and bytes([byte]) in self)
        )

    @property
    def without_token(self) -> bytes:
        """Bytes that a vocabulary of merges has no token for, as SentencePiece or as GPT-2 writes them."""
        if len(self.single_bytes) == 256:
            return b""
        return bytes(byte for byte, character in _alphabet().items() if character.encode() not in self)

    def is_part(self, character: str) -> bool:
        """Whether a token has this character and others."""
        data = character.encode()
        return self._joined.count(data) > self._joined.count(b"\0%b\0" % data)

    @functools.cached_property
    def _all(self) -> frozenset[bytes]:
        return frozenset(self._joined.split(b"\0")[1:-1])


renew_cached_properties_in_child(TokenStrings)


def _alphabet() -> dict[int, str]:
    """GPT-2's characters for bytes: itself for one that can be seen, for the others U+0100 and on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted({*range(256)} - {*seen})
    return {byte: chr(byte) for byte in seen} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}
