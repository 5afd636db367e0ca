"""Who is at the other end: both prove that they know the token, and it never travels.

| who | sends |
|---|---|
| listener | `kvgs`, the version, 3 zeros, 32 random bytes |
| connector | the same with random bytes of its own, and its proof |
| listener | its proof |

A proof is the HMAC-SHA-256, by the token, of who proves and of the random bytes of both. Without a token the
key is empty. Each end proves something else, so a proof that is sent back is worth nothing.
"""

from __future__ import annotations

import hmac
import secrets
import struct

from pykvgraph.stream.transports.frame import MAGIC, VERSION, FrameError

_OPENING = struct.Struct("<4sB3s32s")
_PROOF_BYTES = 32
CHALLENGE_BYTES = _OPENING.size
ANSWER_BYTES = _OPENING.size + _PROOF_BYTES
WELCOME_BYTES = _PROOF_BYTES


class ListenerSide:
    """What a listener sends and expects, for one connection."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._own = secrets.token_bytes(32)

    def challenge(self) -> bytes:
        return _OPENING.pack(MAGIC, VERSION, b"", self._own)

    def welcome(self, answer: bytes) -> bytes:
        """What to send to one that answered so. Raises FrameError when it doesn't know the token."""
        other = _random_of(answer)
        expected = _proof(self._token, b"connector", self._own, other)
        if not hmac.compare_digest(expected, answer[CHALLENGE_BYTES:]):
            raise FrameError("it has another token")
        return _proof(self._token, b"listener", self._own, other)


class ConnectorSide:
    """The same for one that connects."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._own = secrets.token_bytes(32)
        self._expected = b""

    def answer(self, challenge: bytes) -> bytes:
        """Raises FrameError."""
        other = _random_of(challenge)
        self._expected = _proof(self._token, b"listener", other, self._own)
        proof = _proof(self._token, b"connector", other, self._own)
        return _OPENING.pack(MAGIC, VERSION, b"", self._own) + proof

    def check(self, welcome: bytes) -> None:
        """Raises FrameError when the listener doesn't know the token."""
        if not hmac.compare_digest(self._expected, welcome):
            raise FrameError("it has another token")


def _random_of(message: bytes) -> bytes:
    magic, version, zeros, random = _OPENING.unpack_from(message)
    if magic != MAGIC or any(zeros):
        raise FrameError("it is no pykvgraph")
    if version != VERSION:
        raise FrameError(f"it speaks version {version}, and version {VERSION} is known here")
    return bytes(random)


def _proof(token: bytes, who: bytes, listener: bytes, connector: bytes) -> bytes:
    return hmac.digest(token, b"kvgs 1 " + who + listener + connector, "sha256")
