"""`--vs`: what a bench measures beside ours, libllama and programs."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from pykvgraph import env
from pykvgraph.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pykvgraph.bench.libllama import LibllamaModel
    from pykvgraph.bench.llama_bench import LlamaBench
    from pykvgraph.params.params import ContextParams

LIBLLAMA = "libllama"


class Rival(NamedTuple):
    """A program with its options. name: the same without the program's folder, to be printed."""

    name: str
    words: list[str]


@dataclass(frozen=True)
class Rivals:
    """On the same file as ours."""

    libllama: LibllamaModel | None
    programs: list[LlamaBench]


class CommandLine(click.types.StringParamType):
    """A command line. That of an environment variable is one, too, where click would split it at blanks."""

    name = "command"

    def split_envvar_value(self, rv: str) -> list[Any]:
        return [rv]


def rival_of(command: str) -> Rival:
    """The program of a command line, or of a path with blanks in it.

    Raises InvalidArgumentError when there is no such program, or when it can't be executed.
    """
    try:
        words = [command] if Path(command).is_file() else shlex.split(command)
    except ValueError as error:  # quotes that don't end
        raise InvalidArgumentError(f"--vs {command!r} is no command line: {error}") from None
    program = words[0] if words else ""
    if not shutil.which(program):
        raise InvalidArgumentError(f"--vs {command!r}: {_why_not(program)}")
    return Rival(" ".join([Path(program).name, *words[1:]]), words)


def _why_not(program: str) -> str:
    """Why this can't be started."""
    if program and Path(program).is_dir():
        return f"{program} is a folder: give the program in it"
    if program and os.access(program, os.X_OK):
        return f"it is on no PATH: give ./{program}"
    if program and os.path.exists(program):
        return f"{program} can't be executed: `chmod +x` makes a file a program"
    return f"there is no program {program}".strip()


def programs_of(others: Sequence[str]) -> list[Rival]:
    """Those beside libllama. Raises as rival_of does."""
    return [rival_of(other) for other in others if other != LIBLLAMA]


@contextmanager
def rivals_on(
    model: Path, device: str, others: Sequence[str], programs: Sequence[Rival], params: ContextParams
) -> Iterator[Rivals]:
    """They have loaded the model, on the device with this name. Raises as LibllamaModel and LlamaBench do."""
    from pykvgraph.bench.libllama import LibllamaModel
    from pykvgraph.bench.llama_bench import LlamaBench

    if programs and params.swa_full:
        raise InvalidArgumentError(
            "--swa-full: llama-bench has no such option, so leave it out, or this --vs"
        )
    # a build for GPUs copies weights of long prompts to one even with -ngl 0
    environment = env.without_gpus() if device == "CPU" else None
    opened = [LlamaBench(name, words, model, params, device, environment) for name, words in programs]
    libllama = LibllamaModel(model, device) if LIBLLAMA in others else None
    try:
        yield Rivals(libllama, opened)
    finally:
        if libllama is not None:
            libllama.close()
