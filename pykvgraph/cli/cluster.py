"""`pykvgraph cluster`: what workers do, and what the router would do before thousands of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pykvgraph.cli.cluster_status import show_status
from pykvgraph.cli.show import new_table, print_json, print_table, printable
from pykvgraph.cli.verb import Numbers, Verb, examples, json_option, option, plot_option

if TYPE_CHECKING:
    from pykvgraph.bench.cluster_simulation.costs import Costs
    from pykvgraph.bench.cluster_simulation.simulation import Outcome
    from pykvgraph.viz import Routed

SERVER = "http://127.0.0.1:8080"  # serve's, unless it is told otherwise
MOST_WORKERS = 10_000
_N_CTX = 4096  # of the cache in which steps are measured
_NAMES = {
    "router": "router",
    "index": "central index",
    "load": "by load alone",
    "tiers": "router, tiers",
    "roles": "roles",
}


@click.command(
    cls=Verb,
    epilog=examples(
        "pykvgraph cluster simulate small.gguf large.gguf",
        "pykvgraph cluster simulate model.gguf --workers 10,1000 --plot routing.png",
        "pykvgraph cluster status http://127.0.0.1:8080",
    ),
)
@click.argument("what", type=click.Choice(["simulate", "status"]))
@click.argument("given", nargs=-1, metavar="MODELS|URL", type=click.Path())
@option(
    "--workers",
    "n_workers",
    type=Numbers(),
    metavar="N,N,..",
    default="1,10,100,1000",
    help=f"With simulate: how many, one after the other; at most {MOST_WORKERS}.",
)
@plot_option("With simulate: draw what caches had, waits and choices over the number of workers.")
@option("--api-key", metavar="KEY", help="With status: a key of the server.")
@json_option
def cluster(
    what: str,
    given: tuple[str, ...],
    n_workers: tuple[int, ...],
    plot: str | None,
    api_key: str | None,
    as_json: bool,
) -> None:
    """Show the workers of a server, or simulate thousands of them.

    status asks a running serve --workers, at http://127.0.0.1:8080 unless a URL is given, what each of its
    workers does. With simulate, workers only pass the time, and files of models say how long a step takes.

    The steps of each model are measured on this machine, in about a second. People then talk in turns with
    so many workers like it, and the router of serve --workers chooses who answers: by its own memory of what
    it has sent where; by a central index of all caches, as if it knew them at every moment; and by load
    alone. Then by its own memory again, before workers whose memory holds four times as many tokens beside
    their caches (tiers), and where some of these workers only read long prompts for the others (roles).
    """
    if what == "status":
        if len(given) > 1:
            raise click.UsageError("status: one URL")
        show_status(given[0] if given else SERVER, api_key, as_json)
        return
    if not given:
        raise click.UsageError("simulate: a GGUF file is missing")
    if not 1 <= min(n_workers) <= max(n_workers) <= MOST_WORKERS:
        raise click.UsageError(f"--workers: from 1 to {MOST_WORKERS}")
    from pykvgraph.viz import plot_routing, require_matplotlib

    if plot:
        require_matplotlib()
    rows: list[dict[str, Any]] = []
    runs: dict[str, list[Routed]] = {}
    n_workers = tuple(dict.fromkeys(n_workers))
    for model in given:
        costs = _costs(model)
        name = printable(Path(model).stem)
        for found in _simulated(costs, n_workers):
            runs.setdefault(name, []).extend(found.values())
            rows += _described(name, found)
            if not as_json:
                _print(rows[-len(found) :])
    if as_json:
        print_json({"runs": rows})
    if plot:
        plot_routing(runs, plot)


def _costs(model: str) -> Costs:
    from pykvgraph import Context, Model
    from pykvgraph.bench.cluster_simulation.costs import Costs
    from pykvgraph.engine.step_times import times_of

    with Model(model, device="cpu") as opened, Context(opened, n_ctx=_N_CTX) as ctx:
        return Costs(times_of(ctx), sum(group.cell_bytes for group in ctx.kv.groups if group.kind != "state"))


def _simulated(costs: Costs, sizes: Sequence[int]) -> Iterator[dict[str, Routed]]:
    """Of each number of workers, what became of it by each policy."""
    from pykvgraph.bench.cluster_simulation.simulation import POLICIES, people_for, simulate

    n_people = people_for(costs)
    for n in sizes:
        yield {
            policy: _routed(simulate(costs, n, n_people, policy))
            for policy in POLICIES
            if policy != "roles" or n > 1
        }


def _routed(outcome: Outcome) -> Routed:
    from numpy import percentile

    from pykvgraph.viz import Routed

    p50, p95 = percentile(outcome.first, (50, 95))
    return Routed(
        outcome.n_workers,
        outcome.policy,
        outcome.n_readers,
        outcome.hits,
        float(p50),
        float(p95),
        float(percentile(outcome.token, 50)),
        float(percentile(outcome.gap, 95)),
        outcome.tokens_per_second,
        outcome.choice_seconds,
        outcome.busy,
    )


def _described(model: str, found: Mapping[str, Routed]) -> list[dict[str, Any]]:
    best = found["index"].hits
    return [
        {"model": model, **each._asdict(), "of_index": each.hits / best if best else 1.0}
        for each in found.values()
    ]


def _print(rows: Sequence[dict[str, Any]]) -> None:
    """One table for each number of workers. cached: of the prompts' tokens. first: until the first token."""
    click.echo(f"{rows[0]['model']}, workers: {rows[0]['n_workers']}")
    table = new_table(
        "who chooses", "cached", "of index", "first", "p95", "token", "gap p95", "choice", "busy"
    )
    for row in rows:
        table.add_row(
            _NAMES[row["policy"]] + (f", {row['n_readers']} read" if row["n_readers"] else ""),
            f"{row['hits']:.1%}",
            f"{row['of_index']:.1%}",
            f"{row['first_p50']:.2f} s",
            f"{row['first_p95']:.1f} s",
            f"{1e3 * row['token_p50']:.0f} ms",
            f"{1e3 * row['gap_p95']:.0f} ms",
            f"{1e6 * row['choice_seconds']:.0f} us",
            f"{row['busy']:.0%}",
        )
    print_table(table)
