"""How the verbs show what they found: tables, sizes, JSON. A file's own text can't steer the terminal."""

from __future__ import annotations

import ctypes
import json
import math
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


# of a value as it is shown to people
MAX_ITEMS = 6
MAX_CHARACTERS = 160

# in less, every column of a table wraps: one that doesn't could take all the room
NARROW = 60


def new_table(*headers: str) -> Table:
    """A table without lines; only the last column may wrap."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers[:-1]:
        table.add_column(header, no_wrap=True)
    table.add_column(headers[-1], overflow="fold")
    return table


def print_table(table: Table) -> None:
    """To stdout, as wide as the terminal, 80 columns where there is none."""
    from rich.console import Console

    console = Console()
    if console.width < NARROW:
        for column in table.columns:
            column.no_wrap, column.overflow = False, "fold"
    console.print(table)


def safe_cell(text: str) -> Text:
    """`text` as a cell: no markup, and no control character that could steer a terminal."""
    from rich.text import Text

    return Text(printable(text))


def printable(text: str) -> str:
    """`text` with what can't be seen written as an escape: a newline is a backslash and an n."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def abbreviated(value: Any) -> str:
    """A value for people, in one line: a list's first items, a text's first characters."""
    if isinstance(value, list):
        items = [_shortened(_as_json(item), 40) for item in value[:MAX_ITEMS]]
        return f"{len(value)} items: {', '.join(items)}{', …' if len(value) > MAX_ITEMS else ''}"
    return _shortened(value if isinstance(value, str) else _as_json(value), MAX_CHARACTERS)


def _as_json(value: Any) -> str:
    """A value as JSON; one that a float32 can hold in its fewest digits: 1e-05, not 9.999999747378752e-06."""
    if isinstance(value, float) and math.isfinite(value) and ctypes.c_float(value).value == value:
        import numpy as np

        return str(np.float32(value))
    return json.dumps(value, ensure_ascii=False)


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"


def speed_text(n_tokens: int, first: float, seconds: float) -> str:
    """How fast a text was said. first: seconds to the first token; seconds: to the end."""
    rate = f", then {(n_tokens - 1) / max(seconds - first, 1e-9):,.0f}/s" if n_tokens > 1 else ""
    return f"{n_tokens} tokens, the first after {first:.2f} s{rate}"


def number_text(value: float, n_digits: int) -> str:
    """A number rounded to its first digits, large ones written out: `19430`."""
    return f"{float(f'{value:.{n_digits}g}'):.15g}"


def print_json(value: dict[str, Any]) -> None:
    """One object on stdout, in one line; NaN and the infinities, which JSON lacks, become null."""
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    click.echo(json.dumps(_finite(value), ensure_ascii=not is_unicode, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
