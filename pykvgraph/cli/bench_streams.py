"""`pykvgraph bench --cache stream`: to a process here, or between two machines, with a command at each."""

from __future__ import annotations

import functools
import secrets
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from pykvgraph.cli.bench_runs import progress
from pykvgraph.cli.verb import Interruptible, option
from pykvgraph.cli.where import Where
from pykvgraph.params.params import default_threads

if TYPE_CHECKING:
    from pykvgraph.bench.streams import StreamSpeed
    from pykvgraph.model.model import Model

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class OtherEnd:
    """Where the other end of a stream is. over: transports to one here; none: all that are here.

    to: the address at which it waits on another machine. receive: the address at which this is that end.
    token: what both of them know.
    """

    over: tuple[str, ...] = ()
    to: str | None = None
    receive: str | None = None
    token: str | None = None


def stream_options(command: F) -> F:
    """`--over`, `--receive`, `--to` and `--stream-token`: the verb gets them as `other_end`."""

    @functools.wraps(command)
    def run(
        *,
        over: tuple[str, ...],
        receive: str | None,
        to: str | None,
        stream_token: str | None,
        extra: tuple[str, ...],
        **others: Any,
    ) -> None:
        if (receive or to) and "stream" not in extra:
            raise click.UsageError("--receive and --to are ends of --cache stream: give that")
        if bool(receive) + bool(to) + bool(over) > 1:
            raise click.UsageError("--receive, --to and --over each say where the other end is: give one")
        command(extra=extra, other_end=OtherEnd(over, to, receive, stream_token), **others)

    wrapped: Any = run
    for names, settings in _OPTIONS:
        wrapped = option(*names, **settings)(wrapped)
    return cast(F, wrapped)


_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (
        ("--stream-token",),
        {"metavar": "TEXT", "help": "What --receive and --to both know. Default: one is made, and printed."},
    ),
    (
        ("--to",),
        {"metavar": "ADDRESS", "help": "--cache stream to the machine that waits there, by --receive."},
    ),
    (
        ("--receive",),
        {
            "metavar": "ADDRESS",
            "help": "Wait there for another machine's --cache stream; tcp:HOST:0: any port.",
        },
    ),
    (
        ("--over",),
        {
            "type": click.Choice(["memory", "device", "unix", "tcp", "mpi", "file"]),
            "multiple": True,
            "help": "A transport of --cache stream here; may be repeated. Default: all that are here.",
        },
    ),
)


def run_streams(
    model: Model,
    depths: Sequence[int],
    repetitions: int,
    n_threads: int,
    sizes: dict[str, Any],
    where: Where,
    other: OtherEnd,
) -> Iterator[list[StreamSpeed]]:
    """Each depth over one transport after the other."""
    from pykvgraph.bench.stream_ends import measure_over, other_machine, transports_here
    from pykvgraph.bench.streams import measure_streams, n_ticks

    sizes = {**sizes, "n_threads": n_threads, "n_threads_batch": n_threads}
    if other.to and depths:
        with other_machine(other.to, other.token) as end:
            for depth in depths:
                with progress(f"to {other.to}", n_ticks(repetitions)) as bar:
                    tick = functools.partial(bar.update, 1)
                    found = measure_streams(model, end, depth, repetitions, sizes, tick)
                yield found
        return
    for depth in depths:
        for kind in other.over or transports_here():
            with progress(f"over {kind}", n_ticks(repetitions)) as bar:
                tick = functools.partial(bar.update, 1)
                found = measure_over(kind, model, depth, repetitions, sizes, where.of_model(), tick)
            yield found


def receive_streams(
    path: str, where: Where, n_threads: int | None, sizes: dict[str, Any], at: str, token: str | None
) -> None:
    """What --receive does: takes one sender's streams. Prints the command that the other machine needs."""
    import pykvgraph as kvg
    from pykvgraph.bench.stream_ends import receive_from

    if token is None and at.partition(":")[0] in ("tcp", "unix"):
        token = secrets.token_hex(16)

    def tell(address: str) -> None:
        if address.startswith("mpi:"):
            return  # mpiexec has started both ends
        command = f"pykvgraph bench -m {shlex.quote(path)} -p 0 -n 0 -d 2000 --cache stream --to {address}"
        click.echo(f"waiting at {address}; at the other end:")
        click.echo(command + (f" --stream-token {token}" if token else ""))
        sys.stdout.flush()

    with kvg.Model(path, **where.model()) as loaded, Interruptible() as work:
        n_threads = n_threads or default_threads(loaded.n_params)
        sizes = {**sizes, "n_threads": n_threads, "n_threads_batch": n_threads}
        click.echo(f"{receive_from(loaded, at, token, sizes, tell)} streams came")
    work.end()
