"""`pykvgraph passkey`: does a long context really work?"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pykvgraph.cli.show import new_table, print_json, print_table
from pykvgraph.cli.verb import (
    Cells,
    Interruptible,
    Verb,
    cache_type_options,
    defrag_option,
    examples,
    json_option,
    margin_option,
    model_option,
    option,
    plot_option,
    swa_option,
    threads_option,
)
from pykvgraph.cli.where import Where, where_options
from pykvgraph.demos.passkey import Task
from pykvgraph.params.params import ContextParams

if TYPE_CHECKING:
    from pykvgraph.context.context import Context
    from pykvgraph.demos.passkey import Trial
    from pykvgraph.types import CellsView, ShiftReport

COUNT = click.IntRange(min=1)
DEPTHS = 10
LENGTHS = (0.5, 1.0, 2.0, 3.0, 4.0)  # in contexts


@click.command(
    cls=Verb,
    epilog=examples(
        "pykvgraph passkey",
        "pykvgraph passkey --n-junk 250 --n-grp 2 --i-pos 90 --trials 10",
        "pykvgraph passkey --grid --trials 2 --plot grid.png",
    ),
)
@model_option(show_default="the embedded one")
@option(
    "--n-junk", type=click.IntRange(1, 2**31 - 1), metavar="N", default=Task.n_junk, help="Pieces of junk."
)
@option(
    "--i-pos", type=click.IntRange(min=0), metavar="N", show_default="random", help="Pieces before the key."
)
@option(
    "--n-grp",
    type=COUNT,
    metavar="N",
    default=Task.n_grp,
    help="How many neighbouring tokens share a position (self-extend).",
)
@option(
    "--keep",
    "--n-keep",
    "n_keep",
    type=click.IntRange(min=0),
    metavar="N",
    default=Task.n_keep,
    help="Keep the first N positions when the cache is full.",
)
@option(
    "-c",
    "--ctx-size",
    "n_ctx",
    type=Cells(),
    metavar="N",
    show_default=f"trained context, at most {ContextParams.n_ctx}, x n-grp + n-keep",
    help="Cells of the cache; auto: trained context x n-grp + n-keep, or what memory has room for.",
)
@margin_option
@option(
    "-b",
    "--batch-size",
    "n_batch",
    type=COUNT,
    metavar="N",
    show_default=f"{ContextParams.n_batch}, at most a quarter of -c",
    help="Tokens in one decode.",
)
@cache_type_options
@swa_option
@defrag_option()
@option(
    "--no-hadamard",
    is_flag=True,
    help="Quantize K and V as they are, not mixed by a Hadamard matrix.",
)
@threads_option()
@where_options
@option(
    "-s",
    "--seed",
    type=click.IntRange(min=0),
    metavar="N",
    default=Task.seed,
    help="Seed of the first trial's key; each next trial adds 1.",
)
@option("--trials", type=COUNT, metavar="N", default=1, help="Keys to ask for, one after the other.")
@option("--grid", is_flag=True, help="Accuracy over depth and length, up to 4 contexts; long.")
@plot_option("A picture of the cells while the first text is read; with --grid, of the grid.")
@json_option
def passkey(where: Where, **arguments: Any) -> None:
    """Hide a key in more text than the cache holds, then ask for it.

    Exit code 0 only if every key was found; with --grid, every key that was still in the window, if any was.

    --grid reads 105 trained contexts for each of --trials, which takes hours with a large model. Each place
    of the grid is a line on stderr as soon as it is known, where that is no terminal. One key in a short
    text is quick: --n-junk 100 --trials 1.
    """
    import pykvgraph as kvg
    from pykvgraph.cli.n_ctx import sized
    from pykvgraph.demos.passkey import default_n_ctx
    from pykvgraph.models import embedded_model
    from pykvgraph.viz import require_matplotlib

    start = time.perf_counter()
    source = click.get_current_context().get_parameter_source
    for name, typed in (("n_junk", "--n-junk"), ("i_pos", "--i-pos")):
        if arguments["grid"] and source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--grid has lengths and depths of its own: leave out {typed}")
    if arguments["plot"]:
        require_matplotlib()
    task = Task(
        arguments["n_junk"], arguments["i_pos"], arguments["n_grp"], arguments["n_keep"], arguments["seed"]
    )
    as_json = arguments["as_json"]
    with kvg.Model(arguments["model"] or embedded_model(), **where.model()) as model:
        context = {
            "type_k": arguments["type_k"],
            "type_v": arguments["type_v"],
            "hadamard": not arguments["no_hadamard"],
            "n_threads": arguments["n_threads"],
            "n_threads_batch": arguments["n_threads"],
            **where.context(),
            "swa_full": arguments["swa_full"],
            "defrag_threshold": arguments["defrag_threshold"],
        }
        asked = arguments["n_ctx"] or default_n_ctx(model, task.n_grp, task.n_keep)
        most = model.n_ctx_train * task.n_grp + task.n_keep
        context = sized(model, asked, most, context, arguments["margin"])
        n_ctx = context["n_ctx"]
        n_batch = arguments["n_batch"] or min(ContextParams.n_batch, max(1, n_ctx // 4))
        with kvg.Context(model, n_batch=n_batch, **context) as ctx:
            trials: list[Trial] = []
            with Interruptible() as work:
                if arguments["grid"]:
                    grid(ctx, task, arguments["trials"], as_json, arguments["plot"], trials)
                else:
                    for index in range(arguments["trials"]):
                        plot = arguments["plot"] if index == 0 else None
                        trials.append(one(ctx, task, index, as_json, plot))
    counted = [trial for trial in trials if trial.in_window or not arguments["grid"]]
    found = sum(trial.found for trial in counted)
    seconds = time.perf_counter() - start
    if as_json:
        print_json(summary(trials, found, n_ctx, seconds))
    elif len(trials) > 1:
        click.echo(f"{found} of {len(counted)} keys found, {seconds:.1f} s")
    work.end()
    sys.exit(0 if counted and found == len(counted) else 1)


def one(ctx: Context, task: Task, index: int, quiet: bool, plot: str | None = None) -> Trial:
    """The trial with the index-th seed, a line per shift and a verdict unless quiet. plot: a film's path."""
    from pykvgraph.demos.passkey import run
    from pykvgraph.viz import Frame, plot_film

    frames: list[Frame] = []

    def add(done: str, cells: CellsView, key_cells: list[int]) -> None:
        frames.append(Frame(done, cells, key_cells))

    def show(report: ShiftReport) -> None:
        end = report.n_keep + report.n_discard
        click.echo(f"  shift: positions {report.n_keep} to {end - 1} given up, {report.stats}")

    task = dataclasses.replace(task, seed=task.seed + index)
    trial = run(ctx, task, None if quiet else show, add if plot else None)
    if plot:
        text = f"{trial.n_tokens} tokens through {ctx.kv.n_cells} cells"
        plot_film(frames, plot, f"{text}: the key (red) was {'' if trial.found else 'not '}found")
    if not quiet:
        click.echo(
            f"{trial.n_tokens} tokens in {ctx.kv.n_cells} cells, "
            f"the key after {trial.i_pos} of {task.n_junk} lines"
            f"{', groups of ' + str(task.n_grp) if task.n_grp > 1 else ''}: {trial.seconds:.1f} s"
        )
        where = "" if trial.in_window else ", and no longer in the window"
        verdict = click.style("found", fg="green") if trial.found else click.style("not found", fg="red")
        click.echo(f"the key was {trial.key}{where}; the answer {trial.answer!r}: {verdict}")
    return trial


def grid(ctx: Context, task: Task, n_trials: int, quiet: bool, plot: str | None, trials: list[Trial]) -> None:
    """Every depth at every length, added to `trials`; a table of accuracies, and a plot when asked for.

    The table has what there is when it is interrupted.
    """
    from pykvgraph.demos.passkey import N_ANSWER, run, tokens_per_line

    per_line = tokens_per_line(ctx.model)
    depths = [(i + 0.5) / DEPTHS for i in range(DEPTHS)]
    lengths = [
        max(1, int((length * ctx.model.n_ctx_train * task.n_grp - 64 - N_ANSWER) / per_line))
        for length in LENGTHS
    ]
    cells: dict[tuple[int, int], list[Trial]] = {}
    jobs = [
        (row, column, i) for column in range(len(lengths)) for row in range(DEPTHS) for i in range(n_trials)
    ]
    on_terminal = sys.stderr.isatty()
    hidden = quiet or not on_terminal
    n_lines = sum(lengths[column] for _, column, _ in jobs)  # a trial takes as long as its text is
    try:
        with click.progressbar(length=n_lines, label="grid", file=sys.stderr, hidden=hidden) as bar:
            for row, column, _ in jobs:
                n_junk = lengths[column]
                seed = task.seed + len(trials)
                trial = run(
                    ctx, dataclasses.replace(task, n_junk=n_junk, i_pos=int(depths[row] * n_junk), seed=seed)
                )
                trials.append(trial)
                cells.setdefault((row, column), []).append(trial)
                bar.update(n_junk)
                if not quiet and not on_terminal and len(cells[row, column]) == n_trials:
                    click.echo(_place(LENGTHS[column], depths[row], cells[row, column]), err=True)
    finally:
        accuracy = [
            [_accuracy(cells.get((row, column), [])) for column in range(len(lengths))]
            for row in range(DEPTHS)
        ]
        if not quiet:
            _show_grid(accuracy, depths, lengths)
        if plot:
            _plot_grid(accuracy, depths, lengths, plot)


def _place(length: float, depth: float, trials: list[Trial]) -> str:
    """What is known of a place of the grid, for who sees no bar."""
    share = _accuracy(trials)
    told = "the key was given up" if share is None else f"{share:.0%} found"
    return f"{length:g} ctx, depth {depth:.0%}: {told}, {sum(trial.seconds for trial in trials):.1f} s"


def _accuracy(trials: list[Trial]) -> float | None:
    """Share of keys found; None where none was in the window, or asked for."""
    inside = [trial for trial in trials if trial.in_window]
    return sum(trial.found for trial in inside) / len(inside) if inside else None


def _show_grid(accuracy: list[list[float | None]], depths: list[float], lengths: list[int]) -> None:
    table = new_table("depth", *(f"{length:g} ctx" for length in LENGTHS))
    table.add_row("lines", *map(str, lengths))
    for depth, row in zip(depths, accuracy, strict=True):
        table.add_row(f"{depth:.0%}", *("-" if share is None else f"{share:.0%}" for share in row))
    print_table(table)
    click.echo("share of keys found; - : the key was given up before the question")
    shares = [share for row in accuracy for share in row if share is not None]
    if shares and not any(shares):
        click.echo("no key was found: the model can't do this, or not with these cache types")


def _plot_grid(
    accuracy: list[list[float | None]], depths: list[float], lengths: list[int], path: str
) -> None:
    from pykvgraph.viz import new_figure, save_figure

    figure = new_figure(6, 5)
    axes = figure.add_subplot()
    values = [[float("nan") if share is None else share for share in row] for row in accuracy]
    image = axes.imshow(values, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axes.set_facecolor("lightgrey")  # seen where there is no value
    for y, row in enumerate(accuracy):
        for x, share in enumerate(row):
            axes.text(x, y, "out" if share is None else f"{share:.0%}", ha="center", va="center", fontsize=9)
    axes.set_xticks(
        range(len(lengths)), [f"{c:g} ctx\n{n} lines" for c, n in zip(LENGTHS, lengths, strict=True)]
    )
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_xlabel("length of the text")
    axes.set_ylabel("depth of the key")
    axes.set_title("Keys found (out: given up before the question)")
    figure.colorbar(image, label="share of keys found")
    save_figure(figure, path)


def summary(trials: list[Trial], found: int, n_ctx: int, seconds: float) -> dict[str, Any]:
    """What `--json` prints. found: of all keys, or with --grid of the n_in_window that were in the window."""
    return {
        "found": found,
        "n_in_window": sum(trial.in_window for trial in trials),
        "n_trials": len(trials),
        "trials": [dataclasses.asdict(trial) for trial in trials],
        **{
            name: sum(getattr(trial, name) for trial in trials)
            for name in ("discards", "shifted_cells", "moved_cells", "key_cells_moved", "n_tokens")
        },
        "n_ctx": n_ctx,
        "seconds": seconds,
    }
