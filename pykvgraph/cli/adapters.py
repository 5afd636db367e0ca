"""`--lora`, `--lora-scaled`: LoRA adapters, as llama.cpp has them."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from pykvgraph.cli.verb import option
from pykvgraph.params.params import MOST_SCALE

if TYPE_CHECKING:
    from pykvgraph.model.adapter import Adapter
    from pykvgraph.model.model import Model

Command = Callable[..., None]


@dataclass(frozen=True)
class Adapters:
    """What was asked for: paths and scales."""

    given: tuple[tuple[str, float], ...]

    def load(self, model: Model) -> list[tuple[Adapter, float]]:
        """As Context takes them. Raises what Model.load_adapter() raises."""
        return [(model.load_adapter(path), scale) for path, scale in self.given]


class _Paths(click.ParamType):  # type: ignore[type-arg]
    """Files, with commas between them; a name with a comma is put in double quotes."""

    name = "FILE,.."

    def split_envvar_value(self, rv: str) -> list[str]:
        """The environment gives one list, blanks and all."""
        return [rv]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Pairs of a path and a scale. A usage error for an empty name."""
        if not isinstance(value, str):
            return value
        return tuple(self.pair(item, param, ctx) for item in items_of(value, self, param, ctx))

    def pair(self, item: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        """Of one item."""
        if not item:
            self.fail("a file's name is empty", param, ctx)
        return item, 1.0


class _ScaledPaths(_Paths):
    """The same with a scale behind each."""

    name = "FILE:SCALE,.."

    def pair(self, item: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        """Of one item. A usage error where no number is behind the last colon."""
        path, _, scale = item.rpartition(":")
        try:
            number = float(scale)
        except ValueError:
            number = float("nan")
        if not path or not abs(number) <= MOST_SCALE:
            self.fail(
                f"{item!r} must be FILE:SCALE, with a number up to {MOST_SCALE:g} for SCALE", param, ctx
            )
        return path, number


def items_of(
    text: str, kind: click.ParamType[Any], param: click.Parameter | None, ctx: click.Context | None
) -> list[str]:
    """What stands between commas, as llama.cpp reads it: in double quotes a comma is one of the text.

    A usage error for a line break outside of them.
    """
    rows = list(csv.reader(io.StringIO(text, newline="")))
    if len(rows) > 1 or text.endswith(("\n", "\r")):
        kind.fail(f"{text!r} has a line break that is not in double quotes", param, ctx)
    return rows[0] if rows and rows[0] else [""]


_OPTIONS = (
    option(
        "--lora",
        type=_Paths(),
        multiple=True,
        metavar="FILE,..",
        help="A LoRA adapter, or several with commas between them; may be repeated.",
    ),
    option(
        "--lora-scaled",
        type=_ScaledPaths(),
        multiple=True,
        metavar="FILE:SCALE,..",
        help="The same, times a scale each.",
    ),
)


def adapter_options(command: Command) -> Command:
    """The options; the command gets them as one argument, `adapters`: those of --lora first."""

    @functools.wraps(command)
    def run(*, lora: tuple[Any, ...], lora_scaled: tuple[Any, ...], **others: Any) -> None:
        command(adapters=Adapters(tuple(pair for some in (*lora, *lora_scaled) for pair in some)), **others)

    for add in reversed(_OPTIONS):
        run = add(run)
    return run
