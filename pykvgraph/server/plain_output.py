"""What a model says, as it is: all of it is content."""

from __future__ import annotations

from typing import Any


class PlainOutput:
    """Text in, deltas of the message out."""

    def __init__(self) -> None:
        self._text: list[str] = []

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The deltas that are certain by now."""
        self._text.append(text)
        return [{"content": text}] if text else []

    def end(self) -> list[dict[str, Any]]:
        """Those that were held back."""
        return []

    def message(self) -> dict[str, Any]:
        """All of it."""
        return {"role": "assistant", "content": "".join(self._text)}
