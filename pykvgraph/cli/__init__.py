"""The command line, `pykvgraph`: one file per verb.

Every option can also be set in the environment, as KVGRAPH_ and its long name: KVGRAPH_MODEL for `-m`,
KVGRAPH_CTX_SIZE for `-c`. A verb is imported when it is asked for, and imports what it needs when it runs.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any, NoReturn

import click

from pykvgraph.cli.verb import examples, version_option

_NAMES = (
    *("batch", "bench", "cache", "cells", "chat", "cluster", "generate"),
    *("info", "inspect", "passkey", "perplexity", "plan", "quality", "rerank", "serve"),
)


class _Verbs(MutableMapping[str, click.Command]):
    """By their names; each is imported when it is asked for: most of them have much to import."""

    def __init__(self) -> None:
        self._known: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._known and name in _NAMES:
            self._known[name] = getattr(importlib.import_module(f"pykvgraph.cli.{name}"), name)
        return self._known[name]

    def __setitem__(self, name: str, verb: click.Command) -> None:
        self._known[name] = verb

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)


class _Command(click.Group):
    """A closed stdin is empty; what goes to a closed stdout or stderr is gone, and is no error.

    Output that can't be written, as to a full disk, is an error of one line.
    """

    def main(self, *args: Any, **extra: Any) -> Any:
        """As click's."""
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:
                # takes the stream's number, too, which would else be that of the next file
                setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for good
        try:
            try:
                return super().main(*args, **extra)
            finally:
                sys.stdout.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> NoReturn:
        """Ends the program; Python would try to write what is left, and say so, once more."""
        if error.errno != errno.EPIPE:  # the reader has gone: no error
            with contextlib.suppress(OSError):
                click.echo(f"Error: the output can't be written: {error.strerror}", err=True)
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


@click.group(
    cls=_Command,
    params=[version_option()],
    commands=_Verbs(),
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 100},
    epilog=examples("pykvgraph generate -m model.gguf -p 'Once upon a time'", "pykvgraph generate --help"),
)
def main() -> None:
    """Run GGUF models over a KV cache that can be edited.

    Every option can also be set in the environment, as its long name with KVGRAPH_ in front.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # not every locale can show every text
