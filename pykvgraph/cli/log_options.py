"""`-lv`, `-v`, `--log-file`, `--log-disable`: what is said of the work, as llama.cpp has them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import click

from pykvgraph.cli.verb import option

Command = Callable[..., None]

# KVGRAPH_LOG's words, by llama.cpp's numbers
_WORDS = ("", "error", "warning", "info", "debug")

_OPTIONS = (
    option(
        "-lv",
        "--verbosity",
        "--log-verbosity",
        "verbosity",
        type=click.IntRange(min=0),
        metavar="N",
        show_default="0, or what KVGRAPH_LOG says",
        help="What the native side says: 1: errors, 2: warnings too, 3: what it does, 4: everything.",
    ),
    option(
        "-v",
        "--verbose",
        "--log-verbose",
        "verbose",
        is_flag=True,
        help="-lv 4. Answers of `pykvgraph serve` also tell how they were made.",
    ),
    option("--log-file", type=click.Path(dir_okay=False), metavar="FILE", help="The log goes there, too."),
    option("--log-disable", is_flag=True, help="No log."),
)


def log_options(command: Command) -> Command:
    """The options; they hold from before the command runs."""

    @functools.wraps(command)
    def run(
        *, verbosity: int | None, verbose: bool, log_file: str | None, log_disable: bool, **others: Any
    ) -> None:
        if word := _WORDS[min(4 if verbose else verbosity or 0, 4)]:
            from pykvgraph._native.library import log_from

            log_from(word)
        if log_file:
            logging.basicConfig(format="%(message)s")  # the file's handler would else be the only one
            logging.getLogger().addHandler(logging.FileHandler(log_file, encoding="utf-8"))
        if log_disable:
            logging.disable()
        command(**others)

    for add in reversed(_OPTIONS):
        run = add(run)
    return run
