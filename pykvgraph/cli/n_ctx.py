"""`-c` and `--margin`: how many cells a verb's context gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    from pykvgraph.context.auto_n_ctx import Draft
    from pykvgraph.model.model import Model


def cells_for(
    model: Model,
    asked: int | Literal["auto"],
    most: int,
    context: dict[str, Any],
    margin: int,
    draft: Draft | None = None,
) -> int:
    """As many as were asked for; auto: up to `most`, as many as there is memory for.

    draft: its context has as many. Says so where those that were asked for leave less than `margin` % of the
    free memory to others.
    """
    from pykvgraph.context.auto_n_ctx import fitting_n_ctx, warning_of_memory

    if asked == "auto":
        return fitting_n_ctx(model, most, context, margin=margin, draft=draft)
    if warning := warning_of_memory(model, asked, context, margin, draft):
        click.echo(warning, err=True)
    return asked
