"""`--override-kv`, as llama.cpp has it."""

from __future__ import annotations

import re
from typing import Any

import click

from pykvgraph.cli.adapters import items_of
from pykvgraph.cli.verb import option

_BOOLS = {"true": True, "false": False}
_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")  # more are in no integer of 64 bits


class _Override(click.ParamType):  # type: ignore[type-arg]
    """KEY=TYPE:VALUE, or several with commas between them."""

    name = "KEY=TYPE:VALUE,.."

    def split_envvar_value(self, rv: str) -> list[str]:
        """The environment gives one list, blanks and all."""
        return [rv]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Pairs of a key and a value. A usage error for what is none."""
        if not isinstance(value, str):
            return value
        return tuple(self._pair(item, param, ctx) for item in items_of(value, self, param, ctx))

    def _pair(
        self, item: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, bool | int | float | str]:
        key, equals, typed = item.partition("=")
        kind, colon, value = typed.partition(":")
        if not (key and equals and colon):
            self.fail(f"{item!r} must be KEY=TYPE:VALUE", param, ctx)
        if kind == "str":
            return key, value
        if kind == "bool" and value in _BOOLS:
            return key, _BOOLS[value]
        if kind == "int" and _INTEGER.fullmatch(value):
            return key, int(value)
        if kind == "float":
            try:
                return key, float(value)
            except ValueError:
                pass
        if kind in ("bool", "int", "float"):
            self.fail(f"{item!r}: {value!r} is no {kind}", param, ctx)
        return self.fail(f"{item!r}: the type must be int, float, bool or str, got {kind!r}", param, ctx)


override_option = option(
    "--override-kv",
    "override_kv",
    type=_Override(),
    multiple=True,
    metavar="KEY=TYPE:VALUE,..",
    help="A metadata key's value in place of the file's: int, float, bool or str; may be repeated.",
)
