"""Lines of text whose parts may have a colour behind them, for a terminal or as HTML."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from pykvgraph.kv_cache.maps.colors import BLACK, ink, terminal_color

GAP = 3  # columns between blocks that are side by side


class Segment(NamedTuple):
    """A part of a line. color: what is behind the letters; "": nothing."""

    text: str
    color: str = ""


Line = list[Segment]


def merged(segments: Sequence[Segment]) -> Line:
    """The same line, in which neighbours of one colour are one segment."""
    runs = itertools.groupby(segments, key=lambda segment: segment.color)
    return [Segment("".join(segment.text for segment in run), color) for color, run in runs]


def length(line: Line) -> int:
    return sum(len(segment.text) for segment in line)


def as_text(lines: Sequence[Line], *, color: bool = False) -> str:
    """The lines as text, without a newline at the end. color: use ANSI escapes, of 256 colours."""
    show = _escaped if color else (lambda segment: segment.text)
    return "\n".join("".join(map(show, line)) for line in lines)


def as_html(lines: Sequence[Line]) -> str:
    """The lines as one HTML element, which scrolls when there are many."""
    spans = "\n".join("".join(map(_span, line)) for line in lines)
    return f'<pre style="line-height: 1.25; max-height: 40em; overflow: auto">{spans}</pre>'


def beside(blocks: Sequence[Sequence[Line]], width: int) -> list[Line] | None:
    """The blocks side by side; None when that takes more than `width` columns."""
    widths = [max(map(length, block)) for block in blocks]
    if sum(widths) + GAP * (len(blocks) - 1) > width and len(blocks) > 1:
        return None
    lines: list[Line] = []
    for parts in itertools.zip_longest(*blocks, fillvalue=[]):
        line: Line = []
        begin = 0
        for part, columns in zip(parts, widths, strict=True):
            if part:
                line += [Segment(" " * (begin - length(line))), *part]
            begin += columns + GAP
        lines.append(line)
    return lines


def _escaped(segment: Segment) -> str:
    if not segment.color:
        return segment.text
    number, shown = terminal_color(segment.color)
    letters = 16 if ink(shown) == BLACK else 231
    return f"\x1b[38;5;{letters};48;5;{number}m{segment.text}\x1b[0m"


def _span(segment: Segment) -> str:
    text = html.escape(segment.text)
    if not segment.color:
        return text
    return f'<span style="background: {segment.color}; color: {ink(segment.color)}">{text}</span>'
