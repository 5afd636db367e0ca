"""`pykvgraph cells`: what operations do to the cells of a cache."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import click

from pykvgraph.checks import size_text
from pykvgraph.cli.show import print_json, printable
from pykvgraph.cli.verb import (
    Verb,
    defrag_option,
    examples,
    json_option,
    model_option,
    option,
    plot_option,
)

if TYPE_CHECKING:
    from pykvgraph.context.context import Context
    from pykvgraph.demos.cell_script import Operation
    from pykvgraph.kv_cache.maps.snapshot import CellMap
    from pykvgraph.types import CellGroup, CellsView, UpdateStats

COUNT = click.IntRange(min=1)


@dataclass(frozen=True)
class Step:
    """The cells at the start (no operation), or after an operation, whose sequence is marked."""

    operation: Operation | None
    stats: UpdateStats | None
    map: CellMap

    @property
    def title(self) -> str:
        """What was done."""
        return self.operation.text if self.operation else "at the start"


@click.command(
    cls=Verb,
    epilog=examples(
        "pykvgraph cells",
        "pykvgraph cells script.txt -c 256 --plot cells.png",
        r"printf 'decode 0 12\nseq_rm 0 4 8\n' | pykvgraph cells -",
    ),
)
@click.argument("script", required=False, type=click.File(encoding="utf-8", lazy=False))
@model_option(show_default="the embedded one")
@option("-c", "--ctx-size", "n_ctx", type=COUNT, metavar="N", default=64, help="Cells of the cache.")
@option(
    "-np",
    "--n-seq-max",
    type=click.IntRange(1, 256),
    metavar="N",
    default=4,
    help="Sequences are 0 to N - 1.",
)
@defrag_option(-1.0)
@option("-q", "--quiet", is_flag=True, help="Only the cells at the end.")
@plot_option("A picture with a row for each step.")
@json_option
def cells(
    script: IO[str] | None,
    model: str | None,
    n_ctx: int,
    n_seq_max: int,
    defrag_threshold: float,
    quiet: bool,
    plot: str | None,
    as_json: bool,
) -> None:
    """Show a cache's cells before and after each line of a script.

    SCRIPT is a file, - for stdin (cells - < script.txt), or nothing for a demonstration, and stdin isn't read
    then. One operation per line, # begins a comment:

    \b
      decode SEQ N          N more tokens, at the end of the sequence
      seq_rm SEQ P0 P1      remove positions P0 to P1 - 1; P0 below 0:
                            from the first; P1 below 0: to the last
      seq_cp SRC DST P0 P1  DST too sees these positions of SRC
      seq_keep SEQ          remove every other sequence
      seq_add SEQ P0 P1 D   add D to these positions
      seq_div SEQ P0 P1 D   divide these positions by D
      checkpoint SEQ        keep what it takes to come back to its end
      rewind SEQ P          go back to P, or to a checkpoint before it
      defrag fill|sort      ask for it; the next update or decode does it
      update                run defrag, then rotate K to its positions
      clear                 empty all cells

    Only defrag in the script compacts the cache, and with -dt 0 or more a decode, too.
    """
    import pykvgraph as kvg
    from pykvgraph.demos.cell_script import DEMONSTRATION, parse
    from pykvgraph.models import embedded_model
    from pykvgraph.viz import require_matplotlib

    if plot:
        require_matplotlib()
    operations = parse(_read(script) if script else DEMONSTRATION)
    steps: list[Step] = []
    failure: str | None = None
    with (
        kvg.Model(model or embedded_model(), device="cpu") as loaded,
        kvg.Context(
            loaded,
            n_ctx=n_ctx,
            n_batch=n_ctx,
            n_seq_max=n_seq_max,
            n_threads=1,
            n_threads_batch=1,
            defrag_threshold=defrag_threshold,
        ) as ctx,
    ):
        steps.append(Step(None, None, ctx.kv.cell_map()))
        _show_first(steps[0], quiet or as_json)
        for operation in operations:
            try:
                steps.append(_done(ctx, operation, steps[-1].map.seq))
            except kvg.KVGraphError as error:
                failure = f"line {operation.line}, {operation.text}: {' '.join(str(error).split())}"
                break
            _show(steps[-1], quiet or as_json)
    _show(steps[-1], as_json or not quiet)
    if plot:
        _plot(steps, plot)
    if as_json:
        print_json({"n_cells": n_ctx, "steps": [_step_json(step) for step in steps], "error": failure})
        sys.exit(1 if failure else 0)
    if failure:
        raise click.ClickException(failure)


def _read(script: IO[str]) -> str:
    try:
        return script.read()
    except UnicodeDecodeError as error:
        raise click.ClickException(f"{script.name} is no script: it is not text in UTF-8") from error


def _done(ctx: Context, operation: Operation, seq_before: int | None) -> Step:
    stats = operation.apply(ctx)
    seq = seq_before if operation.seq is None else operation.seq
    return Step(operation, stats, ctx.kv.cell_map(seq))


def _show_first(step: Step, hidden: bool) -> None:
    from pykvgraph.viz import legend

    if not hidden:
        click.echo(legend())
    _show(step, hidden)


def _show(step: Step, hidden: bool) -> None:
    if hidden:
        return
    click.echo()
    line = f"line {step.operation.line}: " if step.operation else ""
    click.secho(f"{line}{step.title}{_work(step.stats)}", bold=True, color=_colored())
    if step.operation and step.operation.comment:
        click.echo(printable(step.operation.comment))
    click.echo(step.map.text(width=max(_columns(), 20), color=_colored()), color=_colored())


def _work(stats: UpdateStats | None) -> str:
    """What was done to K and V, if anything."""
    if stats is None or stats.graphs == 0:
        return ""
    done = f"{stats.shifted_cells} cells shifted, {stats.moved_cells} moved"
    return f"  [{done}, {size_text(stats.moved_bytes)}]" if stats.moved_cells else f"  [{done}]"


def _colored() -> bool:
    """Whether stdout takes colours; https://no-color.org."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _columns() -> int:
    import shutil

    return shutil.get_terminal_size((80, 24)).columns


def _plot(steps: list[Step], path: str) -> None:
    from pykvgraph.viz import Row, plot_rows

    plot_rows([Row(step.title, step.map) for step in steps], path)


def _step_json(step: Step) -> dict[str, Any]:
    import dataclasses

    groups, states = zip(step.map.groups, step.map.views, strict=True), step.map.states
    return {
        "line": step.operation.line if step.operation else 0,
        "operation": step.title if step.operation else None,
        "stats": dataclasses.asdict(step.stats) if step.stats else None,
        "groups": [_group_json(group, view, step.map.seq) for group, view in groups],
        "checkpoints": step.map.checkpoints,
        "states": None if states is None else _states_json(states),
    }


def _group_json(group: CellGroup, view: CellsView, seq: int | None) -> dict[str, Any]:
    """The cells of a group that are used, and which of them the next token of the sequence attends over."""
    import numpy as np

    from pykvgraph.kv_cache.maps.group import attended_span

    span = range(0) if seq is None else attended_span(view, seq)
    return {
        "kind": group.kind,
        "window": group.window,
        "n_cells": len(view.pos),
        "n_used": view.n_used,
        "n_kv": view.n_kv,
        "attended": [span.start, span.stop] if span else None,
        "cells": [
            {
                "cell": int(cell),
                "pos": int(view.pos[cell]),
                "seq": np.flatnonzero(view.seq[cell]).tolist(),
                "shift": int(view.shift[cell]),
                "waiting": bool(view.waiting[cell]),
                "kept": int(view.held[cell]),
            }
            for cell in np.flatnonzero(view.pos >= 0)
        ],
    }


def _states_json(states: CellsView) -> dict[str, Any]:
    """Of the rows that are used: the position of the last token in it, whose it is, how often it is kept."""
    import numpy as np

    rows = [
        {
            "row": int(row),
            "pos": int(states.pos[row]),
            "seq": np.flatnonzero(states.seq[row]).tolist(),
            "kept": int(states.held[row]),
        }
        for row in np.flatnonzero(states.pos >= 0)
    ]
    return {"n_rows": len(states.pos), "rows": rows}
