"""`pykvgraph plan`: what a model and its cache take, and how large a cache the memory has room for."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pykvgraph.cli.show import new_table, print_json, print_table, safe_cell
from pykvgraph.cli.verb import (
    Verb,
    batch_option,
    cache_type_options,
    examples,
    json_option,
    model_option,
    option,
    plot_option,
    swa_option,
    ubatch_option,
)
from pykvgraph.cli.where import Where, where_options
from pykvgraph.errors import UnsupportedError
from pykvgraph.plan.fitting import MARGIN
from pykvgraph.sizes import size_text

if TYPE_CHECKING:
    from pykvgraph.plan.fitting import Fit

TYPES = ("f16", "q8_0", "q4_0")  # of the second table


@click.command(
    cls=Verb,
    epilog=examples(
        "pykvgraph plan -m model.gguf",
        "pykvgraph plan -m model.gguf -np 8 -ctk q8_0 -ctv q8_0",
        "pykvgraph plan -m model.gguf --plot plan.png",
    ),
)
@model_option(required=True)
@option(
    "-c",
    "--ctx-size",
    "n_ctx",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="what the model was trained on, for each of -np",
    help="The most cells to plan for.",
)
@option(
    "-np",
    "--parallel",
    "n_seq_max",
    type=click.IntRange(1, 256),
    metavar="N",
    default=1,
    help="Sequences at a time.",
)
@option(
    "--margin",
    type=click.IntRange(0, 99),
    metavar="P",
    default=MARGIN,
    help="Per cent of the free memory to leave to others.",
)
@batch_option()
@ubatch_option
@cache_type_options
@swa_option
@where_options
@plot_option("Also draw what more or fewer cells take.")
@json_option
def plan(
    model: str, where: Where, n_ctx: int | None, margin: int, as_json: bool, plot: str | None, **sizes: Any
) -> None:
    """Show how large a cache the memory has room for.

    Nothing is loaded. Each size is planned as a context would allocate it: weights, cells, graphs. What may
    be taken is --margin per cent less than what is free: on a device what the device tells, on the host the
    least of what the kernel has, of what control groups leave, and of ulimit. `-c auto` of other verbs, and
    n_ctx="auto" in Python, take what is found here.
    """
    from pykvgraph.gguf_file import GgufFile
    from pykvgraph.plan.fitting import fit_n_ctx

    with GgufFile(model) as file:
        info = file.model_info()
    most = n_ctx or info.n_ctx_train * sizes["n_seq_max"]
    arguments = {**where.model(), "offload_kqv": where.offload_kqv, **sizes}
    fit = fit_n_ctx(model, most, margin=margin, **arguments)
    chosen = (sizes["type_k"], sizes["type_v"])
    by_type = {name: fit.n_ctx for name in TYPES if chosen == (name, name)}
    for name in TYPES:
        with contextlib.suppress(UnsupportedError):  # heads that a type's blocks don't fit
            if name not in by_type:
                other = {**arguments, "type_k": name, "type_v": name}
                by_type[name] = fit_n_ctx(model, most, margin=margin, **other).n_ctx
    if as_json:
        print_json({**dataclasses.asdict(fit), "most": most, "n_ctx_by_type": by_type})
    else:
        show_fit(fit, most, by_type)
    if plot:
        from pykvgraph.viz.plan_plot import plot_plan

        plot_plan(Path(model).name, fit, lambda cells: _parts(model, cells, arguments), plot)


def show_fit(fit: Fit, most: int, by_type: dict[str, int]) -> None:
    """What is taken, what limits it, and other types of K and V."""
    table = new_table("takes on", "layers", "weights", "cache", "graphs", "in all", "may take")
    for part, limit in zip(fit.parts, fit.limits, strict=True):
        total = part.weight_bytes + part.cache_bytes + part.compute_bytes
        amounts = (part.weight_bytes, part.cache_bytes, part.compute_bytes, total, limit + part.mapped_bytes)
        table.add_row(safe_cell(part.device), str(part.n_layer), *map(size_text, amounts))
    print_table(table)
    reason = f"{fit.full} has no room for more" if fit.full else "as many as were asked for"
    click.echo(f"\n-c {fit.n_ctx}: {fit.n_ctx:,} of {most:,} cells fit; {reason}.\n")
    types = new_table("K and V", "cells")
    for name, n_ctx in by_type.items():
        types.add_row(name, f"{n_ctx:,}")
    print_table(types)


def _parts(model: str, n_ctx: int, arguments: dict[str, Any]) -> Any:
    from pykvgraph.plan.memory import plan_memory

    return plan_memory(model, n_ctx=n_ctx, **arguments)
