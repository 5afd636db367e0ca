"""What a person says in a chat: lines of a terminal, with a history, or of a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

_MORE = "\\"  # at a line's end: the message goes on in the next one


class Input(Protocol):
    """Where messages come from."""

    def read(self, begun: str = "") -> str | None:
        """The next message, never an empty one; None: there are no more. begun: what may be edited."""


class PipeInput:
    """Lines of stdin."""

    def read(self, begun: str = "") -> str | None:
        """As Input says; nobody can edit what was begun."""
        lines: list[str] = []
        for line in sys.stdin:
            lines.append(line.rstrip("\r\n"))
            if lines[-1].endswith(_MORE):
                lines[-1] = lines[-1].removesuffix(_MORE)
            elif text := "\n".join(lines).strip():
                return text
            else:
                lines.clear()
        return "\n".join(lines).strip() or None


class TerminalInput:
    """A prompt: Enter sends, Alt-Enter or a backslash at the end begins another line, arrows go back.

    Raises KeyboardInterrupt for Ctrl-C.
    """

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import InMemoryHistory

        self._session: PromptSession[str] = PromptSession(
            "> ",
            history=InMemoryHistory(),
            multiline=True,
            enable_suspend=True,  # Ctrl-Z
            prompt_continuation="  ",
            key_bindings=_bindings(),
        )

    def read(self, begun: str = "") -> str | None:
        """As Input says; None after Ctrl-D."""
        try:
            while not (text := self._session.prompt(default=begun).strip()):
                pass
        except EOFError:
            return None
        return text


def _bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith(_MORE):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def alt_enter(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
