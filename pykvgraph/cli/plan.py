"""`pykvgraph plan`: what a model and its cache take, and how large a cache the memory has room for."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pykvgraph.checks import size_text
from pykvgraph.cli.draft import draft_arguments, model_draft_option, spec_type_of, spec_type_option
from pykvgraph.cli.show import new_table, print_json, print_table, safe_cell
from pykvgraph.cli.verb import (
    Verb,
    batch_option,
    cache_type_options,
    examples,
    json_option,
    margin_option,
    model_option,
    option,
    plot_option,
    swa_option,
    ubatch_option,
)
from pykvgraph.cli.where import Where, where_options
from pykvgraph.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pykvgraph.plan.fitting import Fit
    from pykvgraph.plan.time_model import StepSample, TimeModel

TYPES = ("f16", "q8_0", "q4_0")  # of the second table
_TIMED_CELLS = 4096  # of a cache in which steps are measured


@click.command(
    cls=Verb,
    epilog=examples(
        "pykvgraph plan -m model.gguf",
        "pykvgraph plan -m model.gguf -np 8 -ctk q8_0 -ctv q8_0",
        "pykvgraph plan -m model.gguf --time --plot plan.png",
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
@margin_option
@batch_option()
@ubatch_option
@cache_type_options
@swa_option
@where_options
@spec_type_option("draft-mtp where the model's file has a draft head, or with -md, else none")
@model_draft_option("The model's assistant (gemma4-assistant), which drafts for it.")
@option("--time", "is_timed", is_flag=True, help="Also load the model, and measure how long steps last.")
@plot_option("Also draw what more or fewer cells take, and with --time what was measured.")
@json_option
def plan(
    model: str,
    where: Where,
    n_ctx: int | None,
    margin: int,
    spec_type: str | None,
    model_draft: str | None,
    is_timed: bool,
    as_json: bool,
    plot: str | None,
    **sizes: Any,
) -> None:
    """Show how large a cache the memory has room for.

    Nothing is loaded, unless --time is given. Each size is planned as a context would allocate it: weights,
    cells, graphs. A draft head of the model's own counts, unless --spec-type none leaves it out, and so does
    an assistant; another draft model has a plan of its own. What may be taken is --margin per cent less than
    what is free: on a device what the device tells, on the host the least of what the kernel has, of what
    control groups leave, and of ulimit. `-c auto` of other verbs, and n_ctx="auto" in Python, take what is
    found here.

    With --time, steps of a few sizes are measured in a second or two, and remembered for the file, the
    devices and the settings; a line through them says how long a prompt and a token take.
    """
    from pykvgraph.model.gguf_file import GgufFile
    from pykvgraph.plan.fitting import fit_n_ctx
    from pykvgraph.plan.memory_model import learn_memory

    with GgufFile(model, kv_overrides=where.kv_overrides) as file:
        info = file.model_info()
    most = n_ctx or info.n_ctx_train * sizes["n_seq_max"]
    kind = spec_type_of(spec_type, model_draft, model, where.kv_overrides)
    if kind == "draft-simple":
        raise click.UsageError("-md: a draft model has a plan of its own, only an assistant counts here")
    of_model = {**where.model(), **draft_arguments(kind, model_draft)}
    arguments = {**of_model, **where.context(), **sizes}
    fit = fit_n_ctx(model, most, margin=margin, **arguments)
    chosen = (sizes["type_k"], sizes["type_v"])
    by_type = {name: fit.n_ctx for name in TYPES if chosen == (name, name)}
    for name in TYPES:
        with contextlib.suppress(UnsupportedError):  # heads that a type's blocks don't fit
            if name not in by_type:
                other = {**arguments, "type_k": name, "type_v": name}
                by_type[name] = fit_n_ctx(model, most, margin=margin, **other).n_ctx
    memory = learn_memory(model, **arguments)
    times, samples = (
        _times(model, of_model, fit, {**sizes, **where.context()}, bool(plot)) if is_timed else (None, [])
    )
    speed = _speed(times, min(fit.n_ctx, info.n_ctx_train), sizes["n_ubatch"]) if times else {}
    if as_json:
        found = {"most": most, "n_ctx_by_type": by_type, "memory": dataclasses.asdict(memory)}
        print_json({**dataclasses.asdict(fit), **found, **speed})
    else:
        show_fit(fit, most, by_type)
        click.echo(f"\nA cell takes {size_text(round(memory.n_out))}.")
        for line in _told(speed):
            click.echo(line)
    if plot:
        from pykvgraph.viz.plan_plot import plot_plan

        title = Path(model).name
        plot_plan(title, fit, lambda cells: _parts(model, cells, arguments), plot, times, samples)


def _times(
    model: str, of_model: dict[str, Any], fit: Fit, of_context: dict[str, Any], is_plotted: bool
) -> tuple[TimeModel, list[StepSample]]:
    """What is remembered of this model's steps, or measured; a picture shows what is measured now."""
    import pykvgraph as kvg
    from pykvgraph.engine.step_times import learn_times, times_of

    context = {**of_context, "n_ctx": min(fit.n_ctx, _TIMED_CELLS)}
    with kvg.Model(model, **of_model) as loaded, kvg.Context(loaded, **context) as ctx:
        return learn_times(ctx)[:2] if is_plotted else (times_of(ctx), [])


def _speed(times: TimeModel, n_tokens: int, n_ubatch: int) -> dict[str, Any]:
    """Seconds of a prompt that fills the cache, and tokens a second behind nothing and behind that prompt."""
    return {
        "times": dataclasses.asdict(times),
        "n_prompt": n_tokens,
        "prompt_seconds": times.prefill(1, n_tokens, n_ubatch),
        "tokens_per_second_empty": 1 / times.next_token(0, 0),
        "tokens_per_second_full": 1 / times.next_token(n_tokens, 0),
    }


def _told(speed: dict[str, Any]) -> Iterator[str]:
    if speed:
        n_prompt, seconds = speed["n_prompt"], speed["prompt_seconds"]
        yield f"The first token behind a prompt of {n_prompt:,} tokens comes after {seconds:.3g} s."
        empty, full = speed["tokens_per_second_empty"], speed["tokens_per_second_full"]
        yield f"A text gets {empty:,.1f} tokens a second at its beginning, {full:,.1f} behind such a prompt."


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
