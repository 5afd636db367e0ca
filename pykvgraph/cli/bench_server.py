"""`pykvgraph bench --server 8x3`: our server, and another one on the same requests, by turns."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from pykvgraph.cli.bench_rows import WAITS, row_of_served
from pykvgraph.cli.rival import rival_of
from pykvgraph.cli.show import new_table, number_text, print_json, print_table
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.params.other_python import python_command
from pykvgraph.params.params import default_threads

if TYPE_CHECKING:
    from pykvgraph.bench.requests import Served
    from pykvgraph.model.model import Model

OURS = "pykvgraph"
OWN = (64, 512)  # tokens of a prompt behind those that all share, at most
_N_WORDS = 400  # characters of a server's last words


def measure_servers(
    path: Path,
    clients: tuple[int, int],
    depths: Sequence[int],
    repetitions: int,
    n_threads: int | None,
    rival: str | None,
    as_json: bool,
    plot: str | None,
) -> None:
    """Prints a table for each number of shared tokens; with JSON, all rows at the end."""
    import pykvgraph as kvg
    from pykvgraph.bench.requests import N_ANSWER, write_prompts
    from pykvgraph.viz import plot_served, require_matplotlib

    if plot:
        require_matplotlib()
    n_clients, n_each = clients
    commands = _commands(rival)
    served: dict[str, list[Served]] = {}
    rows = []
    with kvg.Model(path, device="cpu") as model:
        n = str(n_threads or default_threads(model.n_params))
        threads = ["-t", n, "-tb", n]
        for depth in depths:
            prompts = write_prompts(model, depth, own_tokens(model.n_ctx_train, depth), n_clients * n_each)
            n_ctx = n_clients * (max(map(len, prompts)) + N_ANSWER)
            options = ["-m", str(path), "-c", str(n_ctx), "-np", str(n_clients), *threads]
            runs = _alternate(
                {name: [*command, *options] for name, command in commands.items()},
                model,
                prompts,
                n_clients,
                repetitions,
            )
            found = [
                {"server": name, "clients": n_clients, **row_of_served(depth, runs[name])} for name in runs
            ]
            rows += found
            served |= {f"{name}, {depth} shared": each for name, each in runs.items()}
            if not as_json:
                _print(found)
    if as_json:
        print_json({"servers": rows})
    if plot:
        plot_served(f"{path.name}, {n_clients} clients", served, plot)


def _commands(rival: str | None) -> dict[str, list[str]]:
    """How each server is started, by its name."""
    commands = {OURS: [*python_command("from pykvgraph.cli import main; main()"), "serve"]}
    if rival:
        name, words = rival_of(rival)
        commands[name] = words
    return commands


def own_tokens(n_ctx_train: int, n_shared: int) -> tuple[int, int]:
    """How many own tokens a prompt may have, least and most: servers cut what the model has not learned."""
    from pykvgraph.bench.requests import N_ANSWER

    least, most = OWN[0], min(OWN[1], n_ctx_train - n_shared - N_ANSWER)
    if most < least:
        raise InvalidArgumentError(
            f"-d {n_shared}: with {least} own tokens and {N_ANSWER} of an answer that is more than the "
            f"{n_ctx_train} tokens on which the model was trained"
        )
    return least, most


def _alternate(
    commands: dict[str, list[str]],
    model: Model,
    prompts: Sequence[Sequence[int]],
    n_clients: int,
    repetitions: int,
) -> dict[str, list[Served]]:
    """Each server, started anew each time."""
    runs: dict[str, list[Served]] = {name: [] for name in commands}
    with (
        tempfile.TemporaryFile() as log,
        click.progressbar(
            length=repetitions * len(commands),
            label=f"{n_clients} clients",
            file=sys.stderr,
            hidden=not sys.stderr.isatty(),
        ) as progress,
    ):
        for _ in range(repetitions):
            for name, command in commands.items():
                try:
                    runs[name].append(_serve(command, model, prompts, n_clients, log))
                except (OSError, RuntimeError) as error:
                    raise click.ClickException(f"{name}: {error}{_last_words(log)}") from None
                progress.update(1)
    return runs


def _serve(
    command: Sequence[str], model: Model, prompts: Sequence[Sequence[int]], n_clients: int, log: IO[bytes]
) -> Served:
    """The requests, behind a short one that warms up."""
    from pykvgraph.bench.requests import serve_over_http
    from pykvgraph.bench.servers import Client, started

    with started(command, log) as port:
        client = Client(port, model.tokenizer)
        for _ in client.complete(prompts[-1][-4:], 4):
            pass
        return serve_over_http(client, prompts, n_clients)


def _last_words(log: IO[bytes]) -> str:
    log.seek(0)
    said = log.read().decode(errors="replace").strip()
    return f"; it said: ...{said[-_N_WORDS:]}" if said else ""


def _print(rows: Sequence[dict[str, Any]]) -> None:
    """A table of servers; first: from a request to its first token; gap: from a token to the next one."""
    shared = f"prompts that share {rows[0]['depth']} tokens"
    click.echo(f"{rows[0]['clients']} clients, {shared}; waits in seconds:")
    table = new_table("server", "prompts", "decoded", "t/s", "first p50", "p95", "gap p50", "p95", "max")
    for row in rows:
        speed = number_text(row["tokens_per_second"], 4)
        waits = [f"{row[name]:.3f}" for name in WAITS]
        table.add_row(str(row["server"]), str(row["n_prompt"]), str(row["n_decoded"]), speed, *waits)
    print_table(table)
