"""`-p`, `-f` and `-e`: the prompt, as llama.cpp takes it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import IO, Any

import click

from pykvgraph.cli.verb import option

_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "\\": "\\", "'": "'", '"': '"'}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|(.))", re.DOTALL)

_Command = Callable[..., None]


def escape_option(help_text: str, **settings: Any) -> Callable[[_Command], _Command]:
    """`-e` and `--no-escape`, the same in every verb but for what has escapes.

    It is read before the others, which ask the click context for it: None when nothing is given.
    """
    return option(
        "-e", "--escape/--no-escape", "escape", is_eager=True, default=None, help=help_text, **settings
    )


_OPTIONS = (
    option("-p", "--prompt", metavar="TEXT", default="", help="What the text begins with; -: stdin has it."),
    option(
        "-f",
        "--file",
        "prompt_file",
        type=click.File(encoding="utf-8", errors="strict"),
        metavar="FILE",
        help="A file with the prompt, without the newline at its end; -: stdin.",
    ),
    escape_option(r"In the prompt, \n, \t, \xHH, \uHHHH and \\ are escapes."),
)


def prompt_options(command: _Command) -> _Command:
    """The options; the command gets the text as one argument, `prompt`."""

    @functools.wraps(command)
    def run(*, prompt: str, prompt_file: IO[str] | None, escape: bool | None, **others: Any) -> None:
        if prompt and prompt_file:
            raise click.UsageError("-p and -f both give the prompt: leave one out")
        source = click.open_file("-", encoding="utf-8") if prompt == "-" else prompt_file
        text = prompt if source is None else read_text(source)
        command(prompt=unescaped(text) if escape else text, **others)

    for add in reversed(_OPTIONS):
        run = add(run)
    return run


def text_option(help_text: str, **settings: Any) -> Callable[[_Command], _Command]:
    """`-f` in verbs that read a text and go on with none; the command gets it as `text`, or None."""

    def add(command: _Command) -> _Command:
        @functools.wraps(command)
        def run(*, text_file: IO[str] | None, **others: Any) -> None:
            command(text=None if text_file is None else read_text(text_file), **others)

        return option(
            "-f",
            "--file",
            "text_file",
            type=click.File(encoding="utf-8", errors="strict", lazy=True),
            metavar="FILE",
            help=help_text,
            **settings,
        )(run)

    return add


def read_text(source: IO[str]) -> str:
    """All of it, without the newline at its end. A usage error for what is not text in UTF-8."""
    try:
        return source.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{source.name} can't be read: it is not text in UTF-8") from error


def escaped(text: str) -> str:
    """The text with its newlines as they are typed."""
    return text.replace("\n", r"\n")


def unescaped(text: str) -> str:
    """The text with its escapes replaced; a backslash before another character stays."""

    def replaced(match: re.Match[str]) -> str:
        code = match[1] or match[2]
        return chr(int(code, 16)) if code else _ESCAPES.get(match[3], match[0])

    return _ESCAPE.sub(replaced, text)
