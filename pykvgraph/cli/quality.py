"""`pykvgraph quality`: what an operation on the cache costs, in the next tokens and in tasks."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from pykvgraph.cli.progress import progress_on_terminal
from pykvgraph.cli.prompt import text_option
from pykvgraph.cli.show import new_table, print_json, print_table, printable, safe_cell
from pykvgraph.cli.verb import (
    Interruptible,
    Verb,
    examples,
    flash_attn_option,
    json_option,
    model_option,
    option,
    plot_option,
    threads_option,
    ubatch_option,
)
from pykvgraph.cli.where import Where, where_options

if TYPE_CHECKING:
    from pykvgraph.demos.quality import CaseResult

_TASKS = ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe", "erase", "chat", "early")
_LEAST_LENGTH = 16
_LENGTH, _COUNT = click.IntRange(min=_LEAST_LENGTH), click.IntRange(min=1)


class _Tasks(click.ParamType):  # type: ignore[type-arg]
    """Names with commas between them."""

    name = "tasks"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(dict.fromkeys(name for name in str(value).split(",") if name))
        unknown = [name for name in names if name not in _TASKS]
        if unknown:
            self.fail(f"{unknown[0]!r} is no task: expected some of {', '.join(_TASKS)}", param, ctx)
        return names


class _Case(click.types.StringParamType):
    """A case; the environment has one a line."""

    def split_envvar_value(self, rv: str) -> list[str]:
        """Blanks part the words of a case."""
        return rv.splitlines()


@click.command(
    cls=Verb,
    epilog=examples(
        "pykvgraph quality -m model.gguf -f a.txt --case 'ctk q8_0' --case 'ctk q4_0'",
        "pykvgraph quality -m model.gguf -f a.txt --case 'edit 300:600' --trials 50",
        "pykvgraph quality -m model.gguf -f a.txt --case 'link 4x200' --tasks vt,cwe",
    ),
)
@model_option(required=True)
@text_option("The text that texts are taken from, in UTF-8; -: stdin.", required=True)
@option(
    "--case",
    "cases",
    type=_Case(),
    multiple=True,
    metavar="CASE",
    help="A case (see above); may be repeated.",
)
@option(
    "--tasks",
    type=_Tasks(),
    metavar="NAME,..",
    default="",
    show_default="none",
    help=f"Tasks: {', '.join(_TASKS)}.",
)
@option("--length", type=_LENGTH, metavar="N", default=1024, help="Tokens of a text.")
@option("--trials", type=_COUNT, metavar="N", default=10, help="Texts to read, one after the other.")
@option("-s", "--seed", type=click.IntRange(min=0), metavar="N", default=1, help="Seed of what is drawn.")
@ubatch_option
@flash_attn_option
@threads_option()
@where_options
@plot_option("A picture: what cases cost against the cells that they keep.")
@json_option
def quality(
    model: str,
    text: str,
    cases: tuple[str, ...],
    tasks: tuple[str, ...],
    length: int,
    trials: int,
    seed: int,
    n_threads: int | None,
    where: Where,
    plot: str | None,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Tell what an operation on the cache costs.

    Each trial takes a text out of -f and reads it as each case says; the next 200 tokens are then predicted,
    and compared with what the case `full` predicts. Cases:

    \b
      full                               everything is decoded as it stands
      ctk TYPE, ctv TYPE                 a type of K, or of V; also before the
                                         cases below: ctk q8_0 edit 300:600
      shift keep=K discard=N [cells=N]   in fewer cells than the text has (half
                                         of it): context shifts, when full
      self-extend N                      N neighbours share a position
      edit A:B [repair=K]                B - A tokens more at position A, which
                                         are cut out once all is read; K tokens
                                         behind the cut are decoded again
      link NxM [repair=K]                N parts of M tokens at the end, each
                                         read alone, and then linked; the first
                                         K tokens of each are decoded again
      forget POLICY SHARE|cells=N        the cells that matter least go: a share
                        [composite]      of them when all is read (0.5), or all
                                         the time, so that N are left; each head
                                         chooses those that it keeps
      CASE asked                         what a task asks is read with its text,
                                         before anything is forgotten

    Tasks hide something in a text of --length tokens and ask for it. Six are RULER's, by its definitions. Of
    erase's two facts an edit cuts out one; the other must be known then, and that one not. chat asks for what
    was said in 5 of 50 turns, early for what was said in 5 of the first 10.
    """
    import pykvgraph as kvg
    from pykvgraph.demos.quality import Quality
    from pykvgraph.demos.quality_cases import parse_case
    from pykvgraph.viz import require_matplotlib

    start = time.perf_counter()
    parsed = [parse_case(case) for case in cases]
    if plot:
        require_matplotlib()
    sizes |= {"n_threads": n_threads, "n_threads_batch": n_threads, **where.context()}
    with kvg.Model(model, **where.model()) as loaded:
        job = Quality(loaded, text, parsed, tasks, length=length, seed=seed, **sizes)
        with Interruptible() as work, progress_on_terminal() as progress:
            bar = progress.add_task("", total=trials * job.steps_of_trial())

            def tick() -> None:
                progress.update(bar, advance=1, description=f"trial {job.n_trials + 1} of {trials}")

            job.run(trials, tick)
    results = job.results() if job.n_trials else []
    if as_json:
        told = [dataclasses.asdict(each) for each in results]
        for each in told:
            del each["policy"]
        print_json(
            {
                "cases": told,
                "n_trials": job.n_trials,
                "length": length,
                "seed": seed,
                "seconds": time.perf_counter() - start,
            }
        )
    elif results:
        _show(results)
    if plot and results:
        _plot(f"{job.n_trials} text{'s' * (job.n_trials > 1)} of {length} tokens", results, plot)
    work.end()


def _show_kept(results: Sequence[CaseResult]) -> None:
    """Where the cells are that were not forgotten."""
    from pykvgraph.kv_cache.maps.lines import as_text
    from pykvgraph.kv_cache.maps.shares import shares_line

    # composite cells share a position: where they are says nothing
    words = [each.policy.split() for each in results]
    forgetful = [r for r, w in zip(results, words, strict=True) if "forget" in w and "composite" not in w]
    if forgetful:
        click.echo("\nCells left, from the beginning to the end of texts: # all, 1 to 9 tenths, . none")
    for each in forgetful:
        line = as_text([shares_line(each.kept)], color=sys.stdout.isatty())
        click.echo(f"{line} {printable(each.case)}")


def _show(results: Sequence[CaseResult]) -> None:
    table = new_table("cells", "KL mean", "median", "99 %", "same top", "PPL", "case")
    for each in results:
        table.add_row(
            f"{each.n_cells:.0f}",
            *(f"{value:.4f}" for value in (each.kl_mean, each.kl_median, each.kl_99)),
            f"{each.same_top:.1%}",
            f"{each.perplexity:.2f}",
            safe_cell(each.case),
        )
    print_table(table)
    if results[0].tasks:
        table = new_table("right", "task", "case")
        for name in results[0].tasks:
            for each in results:
                table.add_row(f"{each.tasks[name]:.0%}", name, safe_cell(each.case))
        print_table(table)
    _show_kept(results)


def _plot(title: str, results: Sequence[CaseResult], path: str) -> None:
    from pykvgraph.viz import QualityPoint, plot_quality

    points = [
        QualityPoint(
            each.case,
            each.policy,
            each.n_cells,
            {
                "KL divergence, mean": each.kl_mean,
                "same top token": each.same_top,
                "perplexity": each.perplexity,
                **each.tasks,
            },
        )
        for each in results
    ]
    plot_quality(title, points, path)
