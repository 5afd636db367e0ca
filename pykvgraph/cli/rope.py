"""`--rope-...` and `--yarn-orig-ctx`, as llama.cpp has them: how positions are rotated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import click

from pykvgraph.cli.verb import option
from pykvgraph.cli.where import Where

Command = Callable[..., None]

_SIZE = click.FloatRange(min=0, min_open=True)
_OPTIONS = (
    option(
        "--rope-scaling",
        type=click.Choice(["none", "linear", "yarn"]),
        show_default="the model's",
        help="How positions are scaled.",
    ),
    option("--rope-scale", type=_SIZE, metavar="X", help="Positions are divided by X, for longer texts."),
    option("--rope-freq-scale", type=_SIZE, metavar="X", help="The same; X is 1 over --rope-scale."),
    option(
        "--rope-freq-base", type=_SIZE, metavar="X", show_default="the model's", help="Base of the rotation."
    ),
    option(
        "--yarn-orig-ctx",
        type=click.IntRange(min=0),
        metavar="N",
        show_default="the model's",
        help="Tokens that a model was trained on before YaRN; 0: the model's.",
    ),
)


def rope_options(command: Command) -> Command:
    """The options; they become overrides in the command's argument `where`, for its argument `model`."""

    @functools.wraps(command)
    def run(
        *,
        where: Where,
        model: str | None,
        rope_scaling: str | None,
        rope_scale: float | None,
        rope_freq_scale: float | None,
        rope_freq_base: float | None,
        yarn_orig_ctx: int | None,
        **others: Any,
    ) -> None:
        if rope_scale and rope_freq_scale:
            raise click.UsageError("--rope-scale and --rope-freq-scale say the same: leave one out")
        values = {
            "freq_base": rope_freq_base,
            "scaling.type": rope_scaling,
            "scaling.factor": 1 / rope_freq_scale if rope_freq_scale else rope_scale,
            "scaling.original_context_length": yarn_orig_ctx or None,
        }
        given = {key: value for key, value in values.items() if value is not None}
        if given:
            front = f"{_architecture(model)}.rope"
            overrides = {f"{front}.{key}": value for key, value in given.items()}
            where = dataclasses.replace(where, kv_overrides={**overrides, **where.kv_overrides})
        command(where=where, model=model, **others)

    for add in reversed(_OPTIONS):
        run = add(run)
    return run


def _architecture(model: str | None) -> str:
    """What the keys of the file begin with. Raises what GgufFile raises."""
    if model is None:
        raise click.UsageError("--rope-... and --yarn-... are about a model's file: give -m")
    from pykvgraph import GgufFile

    with GgufFile(model) as file:
        return file.model_info().arch
