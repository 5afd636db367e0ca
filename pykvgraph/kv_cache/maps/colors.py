"""The colours of cells, and of the letters on them."""

from __future__ import annotations

EMPTY_COLOR, HOLE_COLOR, SHARED_COLOR, HELD_COLOR = "#eeeeee", "#c6c6c6", "#d62728", "#555555"
SEQUENCE_COLORS = (
    "#1f77b4",
    "#2ca02c",
    "#ff7f0e",
    "#9467bd",
    "#17becf",
    "#8c564b",
    "#e377c2",
    "#bcbd22",
    "#7f7f7f",
    "#aec7e8",
)
BLACK, WHITE = "#000000", "#ffffff"
_LEVELS = (0, 95, 135, 175, 215, 255)  # of red, green and blue, in the 216 colours that terminals agree on


def color_of(seq: int) -> str:
    """The colour of a sequence's cells; colours come again after ten sequences."""
    return SEQUENCE_COLORS[seq % len(SEQUENCE_COLORS)]


def contrast(one: str, other: str) -> float:
    """From 1, no contrast, to 21, black on white (WCAG 2.1)."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def ink(color: str) -> str:
    """Black or white: the one that can be read better on the colour."""
    return max(BLACK, WHITE, key=lambda letters: contrast(letters, color))


def terminal_color(color: str) -> tuple[int, str]:
    """The nearest of a terminal's 216 colours: its number, and what it looks like."""
    places = [min(range(6), key=lambda i: abs(_LEVELS[i] - part)) for part in _rgb(color)]
    number = 16 + 36 * places[0] + 6 * places[1] + places[2]
    return number, "#" + "".join(f"{_LEVELS[place]:02x}" for place in places)


def _rgb(color: str) -> list[int]:
    return [int(color[i : i + 2], 16) for i in (1, 3, 5)]


def _luminance(color: str) -> float:
    """From 0, black, to 1, white (WCAG 2.1)."""
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (value / 255 for value in _rgb(color))
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
