"""The models that come with the package, trained by this project."""

from __future__ import annotations

from pathlib import Path

from pykvgraph.errors import InvalidArgumentError

NAMES = ("passkey", "dialogue")


def embedded_model(name: str = "passkey") -> Path:
    """Where an embedded GGUF file is.

    "passkey" finds a number hidden in junk text; "dialogue" chats and remembers what it is told. Raises
    InvalidArgumentError for another name.
    """
    if name not in NAMES:
        raise InvalidArgumentError(f"there is no embedded model {name!r}: name one of {', '.join(NAMES)}")
    return Path(__file__).parent / f"{name}.gguf"
