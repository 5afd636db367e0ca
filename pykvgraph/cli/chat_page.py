"""Where a chat is written: answers as they come, dim lines of what happens, a strip of the cells."""

from __future__ import annotations

import sys
import time
import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING

from pykvgraph.kv_cache.maps.colors import ink

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from pykvgraph.kv_cache.maps.lines import Line
    from pykvgraph.kv_cache.maps.snapshot import CellMap

_EVERY = 0.08  # seconds from one picture of the strip to the next
_STRIP_LINES = 3  # of the terminal's height, for the strip: what is taller than the terminal is not shown
_MARGIN = 1  # some terminals go to the next line after a full one


class Page:
    """Answers go to stdout; all else to stderr, or to the same terminal.

    on_terminal: whether stdout is a terminal. strip: gives the line of cells that is kept under an answer,
    for a number of columns; None: there is none.
    """

    def __init__(self, on_terminal: bool, strip: Callable[[int], Line] | None = None) -> None:
        from rich.console import Console

        self.console: Console = Console(stderr=not on_terminal, highlight=False, markup=False, emoji=False)
        self._on_terminal = on_terminal
        self._strip = strip if on_terminal else None
        self._live: Live | None = None
        self._shown_at = 0.0
        self._line = ""  # the last line of the answer so far
        self._waiting: list[str] = []  # notes
        self._begun = False  # whether something of the answer was written

    def write(self, text: str) -> None:
        """More of an answer; white space in front of it, or of what follows a note, is left out."""
        if self._waiting and (parts := text.split(maxsplit=1)) and parts[0] != text:
            word = "" if text[0].isspace() else parts[0]  # the rest of the word
            self._write(word)
            text = text[len(word) :]
            self._show_waiting()
        self._write(text)

    def _write(self, text: str) -> None:
        text = text if self._begun else text.lstrip()
        if not text:
            return
        self._begun = True
        shown = _harmless(text) if self._on_terminal else text
        *lines, self._line = (self._line + shown).split("\n")
        if self._strip is None:
            sys.stdout.write(shown)
            sys.stdout.flush()
            return
        live = self._started()
        for line in lines:
            live.console.print(line, soft_wrap=False)
        self._refresh(live)

    def note(self, text: str) -> None:
        """A dim line; an answer goes on below it. In the midst of a word it waits for the word's end."""
        if self._on_terminal and self._line and not self._line[-1].isspace():
            self._waiting.append(text)
            return
        if self._on_terminal:
            self._break_line()
            self._begun = False
        self.console.print(f"[{_harmless(text)}]", style="dim", soft_wrap=not self._on_terminal)

    def show(self, text: str) -> None:
        """Lines that somebody asked for."""
        self.console.print(_harmless(text), soft_wrap=True)

    def show_map(self, cells: CellMap) -> None:
        """A picture of the cells, in colours on a terminal."""
        from rich.text import Text

        color = self.console.is_terminal and not self.console.no_color
        self.console.print(Text.from_ansi(cells.text(width=max(self.console.width, 40), color=color)))

    def end(self) -> None:
        """The answer is over."""
        self._break_line()
        if self._live is not None:
            self._live.stop()
        self._live, self._begun, self._line = None, False, ""
        self._show_waiting()

    def _show_waiting(self) -> None:
        notes, self._waiting = self._waiting, []
        if notes:
            self._break_line()
        for note in notes:
            self.note(note)

    def _break_line(self) -> None:
        """What comes next begins a line."""
        if self._live is not None:
            if self._line:
                self._live.console.print(self._line)
            self._line = ""
            self._refresh(self._live, now=True)
        elif self._line:
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._line = ""

    def _started(self) -> Live:
        if self._live is None:
            from rich.live import Live

            self._live = Live(console=self.console, auto_refresh=False, transient=False)
            self._live.start()
        return self._live

    def _refresh(self, live: Live, now: bool = False) -> None:
        moment = time.monotonic()
        if now or moment - self._shown_at >= _EVERY:
            live.update(self._picture(), refresh=True)
            self._shown_at = moment

    def _picture(self) -> Text:
        from rich.text import Text

        assert self._strip is not None
        width, height = self.console.size
        lines = Text(self._line).wrap(self.console, width)[-max(height - _STRIP_LINES, 1) :]
        picture = Text("".join(f"{line.plain}\n" for line in lines if self._line))
        for segment in self._strip(self.console.width - _MARGIN):
            style = f"{ink(segment.color)} on {segment.color}" if segment.color else "dim"
            picture.append(segment.text, style)
        return picture


def _harmless(text: str) -> str:
    """Without characters that could steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")
