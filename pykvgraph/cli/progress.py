"""How far long work is: a bar on a terminal, which what libraries print to stderr doesn't tear."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


@contextlib.contextmanager
def progress_on_terminal(shown: bool = True) -> Iterator[Progress]:
    """On a terminal, as wide as that is. shown: whether it is known how much there is to do."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    if not shown or not sys.stderr.isatty():
        yield Progress(disable=True, console=Console(stderr=True))
        return
    with _stderr_alone() as stderr:
        console = Console(file=stderr, width=os.get_terminal_size(stderr.fileno()).columns or None)
        with Progress(*columns, console=console, expand=True) as progress:
            yield progress


@contextlib.contextmanager
def _stderr_alone() -> Iterator[IO[str]]:
    """A stderr for one alone; what libraries print there meanwhile comes behind the block."""
    with tempfile.TemporaryFile() as others, open(os.dup(2), "w", encoding="utf-8") as own:
        os.dup2(others.fileno(), 2)
        try:
            yield own
        finally:
            os.dup2(own.fileno(), 2)
            others.seek(0)
            shutil.copyfileobj(others, own.buffer)
