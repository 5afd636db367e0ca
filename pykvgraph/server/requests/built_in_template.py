"""Chat templates that libllama has built in, in place of Jinja: `--no-jinja`."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from pykvgraph._native import libllama
from pykvgraph.errors import InvalidArgumentError, UnsupportedError


class BuiltInTemplate:
    """One of them, by its name, or by a Jinja source that libllama recognises.

    Raises UnsupportedError when it is none.
    """

    def __init__(self, source: str) -> None:
        self._llama = libllama.low_level()
        self._source = _bytes(source)
        if self._apply([("user", "Hi")], True) < 0:
            raise UnsupportedError(
                f"--no-jinja: libllama has no template like {source[:60]!r}; leave the option out"
            )

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt of a conversation, by the roles and contents alone.

        Raises InvalidArgumentError for a text that C can't have, and when libllama refuses the messages.
        """
        said = [(str(each["role"]), str(each.get("content") or "")) for each in messages]
        size = self._apply(said, add_generation_prompt)
        buffer = ctypes.create_string_buffer(max(size, 0) + 1)
        if size < 0 or self._apply(said, add_generation_prompt, buffer) != size:
            raise InvalidArgumentError("libllama refuses the messages")
        return buffer.raw[:size].decode("utf-8", "replace")

    def _apply(self, said: Sequence[tuple[str, str]], add_ass: bool, buffer: Any = None) -> int:
        """Writes the prompt into the buffer, and returns its length in bytes; below 0: it can't."""
        kind = self._llama.llama_chat_message
        chat = (kind * len(said))(*(kind(_bytes(role), _bytes(content)) for role, content in said))
        apply = self._llama.llama_chat_apply_template
        return int(apply(self._source, chat, len(said), add_ass, buffer, len(buffer) if buffer else 0))


def _bytes(text: str) -> bytes:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"a message has half a character: {error}") from None
    if b"\0" in data:
        raise InvalidArgumentError("a message has the character U+0000, where libllama would end it")
    return data
