"""`-c` and `--margin`: how large a verb's context is, and where its K and V are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    from pykvgraph.context.auto_n_ctx import Draft
    from pykvgraph.model.model import Model


def sized(
    model: Model,
    asked: int | Literal["auto"],
    most: int,
    context: dict[str, Any],
    margin: int,
    draft: Draft | None = None,
) -> dict[str, Any]:
    """The context's arguments, with n_ctx: as was asked for; auto: up to `most`, as there is memory for.

    What kv_tier="auto" keeps on devices is decided here, too: for both `margin` % of the free memory are left
    to others. draft: its context has as many cells. Says so where those that were asked for leave less.
    """
    from pykvgraph.context.auto_n_ctx import fitting_n_ctx, fitting_tier, warning_of_memory

    if asked == "auto":
        n_ctx = fitting_n_ctx(model, most, context, margin=margin, draft=draft)
    else:
        n_ctx = asked
        if warning := warning_of_memory(model, asked, context, margin, draft):
            click.echo(warning, err=True)
    tier = fitting_tier(model, n_ctx, context, margin=margin, draft=draft)
    return {**context, "n_ctx": n_ctx, **tier}
