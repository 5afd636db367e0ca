"""`pykvgraph bench`: measures the speed, and compares it with libllama's and other programs'."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pykvgraph.bench.tests import EXTRA_TESTS
from pykvgraph.cli.adapters import Adapters, adapter_options
from pykvgraph.cli.bench_rows import Printer
from pykvgraph.cli.bench_runs import params_of, run_one, run_requests, run_tiers, run_turns
from pykvgraph.cli.bench_streams import OtherEnd, receive_streams, run_streams, stream_options
from pykvgraph.cli.rival import CommandLine, programs_of, rivals_on
from pykvgraph.cli.verb import (
    Interruptible,
    Numbers,
    Verb,
    batch_option,
    cache_type_options,
    defrag_option,
    examples,
    json_option,
    model_option,
    option,
    plot_option,
    swa_option,
    threads_option,
    ubatch_option,
)
from pykvgraph.cli.where import Where, where_options
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.params.params import ContextParams, default_threads

if TYPE_CHECKING:
    from pykvgraph.bench.requests import Served
    from pykvgraph.bench.streams import StreamSpeed
    from pykvgraph.bench.tests import Test
    from pykvgraph.bench.tiers import TierSpeed
    from pykvgraph.bench.turns import MeasuredTurn
    from pykvgraph.context.trace import Span

COUNT = click.IntRange(min=1)
N_EXTRA_TOKENS = 32
MIN_CACHE_DEPTH = 64
N_BATCH = 2048  # as in llama-bench
TURNS, PREFIX, TIERS, STREAM = "turns", "prefix", "tiers", "stream"
PLAIN = {"offload_kqv": ContextParams.offload_kqv, "kv_tier": ContextParams.kv_tier}


class _Clients(click.ParamType):  # type: ignore[type-arg]
    """`8x3`: clients, and requests of each."""

    name = "clients"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", str(value))
        if not found:
            self.fail(f"{value!r} is not as 8x3, for 8 clients with 3 requests each", param, ctx)
        return int(found[1]), int(found[2])


@click.command(
    cls=Verb,
    epilog=examples(
        "pykvgraph bench -m model.gguf",
        "pykvgraph bench -m model.gguf -p 512 -n 64 -d 0,4032 --vs libllama",
        "pykvgraph bench -m model.gguf --vs libllama --vs path/llama-bench",
        "pykvgraph bench -m model.gguf -d 4032 --cache shift --cache holes --json",
        "pykvgraph bench -m model.gguf -d 4000 --cache turns --plot turns.png",
        "pykvgraph bench -m model.gguf -d 512 --cache prefix --plot prefix.png",
        "pykvgraph bench -m model.gguf -d 4000 --cache tiers --plot tiers.png",
        "pykvgraph bench -m model.gguf -d 2000 --cache stream --plot stream.png",
        "pykvgraph bench -m model.gguf --cache stream --receive tcp:10.0.0.2:5005",
        "pykvgraph bench -m model.gguf -d 512 --server 8x3 --vs llama-server",
    ),
)
@model_option(required=True)
@option(
    "-p",
    "--n-prompt",
    type=Numbers(),
    metavar="N,N,..",
    default="512",
    help="Tokens decoded at once (pp); 0: no test.",
)
@option(
    "-n",
    "--n-gen",
    type=Numbers(),
    metavar="N,N,..",
    default="128",
    help="Tokens one by one (tg); 0: no test.",
)
@option("-d", "--n-depth", type=Numbers(), metavar="N,N,..", default="0", help="Tokens already in the cache.")
@option(
    "--cache",
    "extra",
    type=click.Choice([*EXTRA_TESTS, TURNS, PREFIX, TIERS, STREAM]),
    multiple=True,
    help="Also run a cache test (see above); may be repeated.",
)
@stream_options
@option("-r", "--repetitions", type=COUNT, metavar="N", default=5, help="Runs of each test, after a warm-up.")
@option(
    "--server",
    "clients",
    type=_Clients(),
    metavar="CxR",
    help="Measure `serve` alone: C clients with R requests each (see above).",
)
@option(
    "--vs",
    "others",
    type=CommandLine(),
    metavar="libllama|COMMAND",
    multiple=True,
    help="Also measure libllama, or a llama-bench; may be repeated. With --server: another server.",
)
@threads_option()
@batch_option(N_BATCH)
@ubatch_option
@cache_type_options
@swa_option
@defrag_option(None, show_default="never; of turns and prefix 0.1")
@where_options
@adapter_options
@json_option
@option(
    "-o",
    "--output",
    type=click.Choice(["md", "csv", "json"]),
    default="md",
    help="How to print; json: as --json.",
)
@plot_option("With --cache turns, prefix, tiers or stream, or with --server: a PNG of it.")
def bench(
    model: str,
    n_prompt: tuple[int, ...],
    n_gen: tuple[int, ...],
    n_depth: tuple[int, ...],
    extra: tuple[str, ...],
    other_end: OtherEnd,
    repetitions: int,
    clients: tuple[int, int] | None,
    others: tuple[str, ...],
    n_threads: int | None,
    where: Where,
    adapters: Adapters,
    output: str,
    as_json: bool,
    plot: str | None,
    **sizes: Any,
) -> None:
    """Measure the speed of prompts (pp) and generation (tg).

    The table has the median of the runs and their standard deviation, in tokens per second.

    With --vs every repetition runs all engines by turns, on the CPU unless -dev names a device. libllama
    runs with flash attention (-fa 1, its default) and without (-fa 0). "ours is" compares the medians.

    \b
    --vs COMMAND is a llama-bench, of llama.cpp or a fork (ik_llama.cpp),
    with options of its own if there are any: --vs 'ik/llama-bench -rtr 1'.
    It is started anew for each turn, on the same file, with -p, -n, -d, -t,
    -b, -ub, -ctk and -ctv as here, and measures its time itself. Where it
    has no -d, tokens behind others (tg) take its -gp, and prompts (pp) there
    are left out. The cache tests are not for it.

    \b
    The cache tests, after -d tokens:
      shift     half of the text is discarded: the first token after that,
                including K-shift and defrag; the tokens after it; and as
                many tokens in a new cache of the same length
      holes     decoding while every other cell is a hole, and after defrag
      defrag    defrag of holes in one run, and of single holes, in cells per
                second; memcpy of as many bytes, for comparison
      state     saving a sequence to memory, and loading it; memcpy
      seqs      8 and 32 sequences of unequal length decode together, after
                half of their cells were removed and defrag has sorted them
      overhead  the complete token loop (for libllama: llama_decode only),
                and the time that ours spends outside the graph
      turns     a conversation of 10 turns whose first prompt has -d tokens:
                two messages are edited, an answer is asked for twice
                again; tokens decoded again, and the time to the first
                token of each answer: of a TokenSequence, which is told where
                messages begin, and of an Engine. Without --vs;
                benchmarks/turns.py puts llama-server through the same
      prefix    24 requests to an Engine, 8 at a time: prompts that share -d
                tokens and have up to as many own ones, 64 tokens said;
                tokens a second, the time to the first token and from one
                token to the next; and the same without sharing, where each
                prompt is decoded whole, by turns. Without --vs
      tiers     K and V on the device; in host memory, copied to the device
                layer by layer (-kvt host); in host memory, where the CPU
                attends (-nkvo): a prompt of -d tokens, then 32 tokens one by
                one; what K, V and graphs take on devices. What has no room
                there is left out. Without --vs
      stream    a prompt of -d tokens and 32 tokens behind it, which travel to
                another process (memory, device: to a thread), levels 0 to 3
                (naive, + buffered copies, + layer by layer, all) and without,
                by turns: the time until all is there, and what of
                it is more than without; "behind": that after the prompt's
                last decode; "total": prompt and tokens. The prompt's cells
                are every second one, so that level 0 sends each alone. To
                another machine: --receive there, --to here. Without --vs

    \b
    With --server nothing else is measured: a server of its own answers each
    client's requests one after the other, 64 tokens each; their prompts share
    -d tokens and have 64 to 512 own ones. --vs: the command line of a server
    that takes llama-server's options, which alternates with ours on the same
    requests: --vs 'llama-server -b 512'. Both have as many slots as clients.
    """
    import pykvgraph as kvg
    from pykvgraph.viz import plot_streams, plot_tiers

    if adapters.given and (clients or others or STREAM in extra):
        raise InvalidArgumentError("--lora is for tests of this engine alone, in one process: leave it out")
    if clients:
        from pykvgraph.cli.bench_server import measure_servers

        if len(others) > 1:
            raise InvalidArgumentError("--server compares with one other server: give --vs once")
        other = others[0] if others else None
        measure_servers(
            Path(model), clients, n_depth, repetitions, n_threads, other, as_json or output == "json", plot
        )
        return
    programs = programs_of(others)
    if others:
        placed = "," in where.device or where.n_gpu_layers >= 0 or where.rpc or where.kv_overrides
        if placed or where.context() != PLAIN:
            raise InvalidArgumentError(
                "--vs compares on one device that has everything: give one -dev and leave out the rest"
            )
        where = dataclasses.replace(where, device="cpu") if where.device == "auto" else where
    sizes = {name: value for name, value in sizes.items() if value is not None} | where.context()
    if other_end.receive:
        if plot or as_json or output == "json":
            raise click.UsageError(
                "--plot and --json are for the other end, with --to: --receive measures nothing"
            )
        receive_streams(model, where, n_threads, sizes, other_end.receive, other_end.token)
        return
    tests = chosen_tests(n_prompt, n_gen, n_depth, extra)
    long = [depth for depth in n_depth if depth >= MIN_CACHE_DEPTH]
    depths, shared, tiered, streamed = (
        long if name in extra else [] for name in (TURNS, PREFIX, TIERS, STREAM)
    )
    if not tests and not any((depths, shared, tiered, streamed)):
        raise InvalidArgumentError("nothing to measure: give -p, -n or --cache")
    check_plot(plot, extra)
    turns: dict[str, list[MeasuredTurn]] = {}
    served: dict[str, list[Served]] = {}
    speeds: list[TierSpeed] = []
    spans: list[Span] = []
    flows: list[StreamSpeed] = []
    with kvg.Model(model, **where.model()) as loaded:
        loaded._require_whole()
        if tiered and set(loaded.layer_devices) == {"CPU"}:
            raise InvalidArgumentError(
                "--cache tiers: the CPU has all layers, so K and V are in host memory anyway; give a -dev"
            )
        sizes["adapters"] = adapters.load(loaded)
        n_threads = n_threads or default_threads(loaded.n_params)
        params = params_of(n_threads, sizes)
        printer = Printer("json" if as_json else output, loaded, n_threads, tests)
        beside = rivals_on(Path(model), loaded.device, others, programs, params)
        with Interruptible() as work, beside as rivals:
            printer.begin(rivals)
            for test in tests:
                printer.add(run_one(loaded, rivals, test, repetitions, params, sizes["adapters"]))
            for depth in depths:
                for through, each in run_turns(loaded, depth, repetitions, n_threads, sizes).items():
                    turns[f"{through}, {depth} tokens"] = each
                    printer.add_turns(depth, through, each)
            for depth in shared:
                runs = run_requests(loaded, depth, repetitions, n_threads, sizes)
                served |= {f"{depth} tokens, {how}": each for how, each in runs.items()}
                printer.add_served(depth, runs)
            for depth in tiered:
                found, spans = run_tiers(loaded, depth, repetitions, n_threads, sizes)
                speeds += found
                printer.add_tiers(found)
            for rows in run_streams(loaded, streamed, repetitions, n_threads, sizes, where, other_end):
                flows += rows
                printer.add_streams(rows)
    printer.end()
    if plot and flows:
        plot_streams(f"{Path(model).name}, {loaded.device}", flows, plot)
    elif plot and speeds:
        plot_tiers(f"{Path(model).name}, {loaded.device}", speeds, spans, plot)
    elif plot:
        draw(Path(model).name, turns, served, plot)
    work.end()


def check_plot(plot: str | None, extra: tuple[str, ...]) -> None:
    from pykvgraph.viz import require_matplotlib

    if plot and len({TURNS, PREFIX, TIERS, STREAM} & set(extra)) != 1:
        raise click.UsageError(
            "--plot draws one of these: give --cache turns, prefix, tiers or stream, or --server"
        )
    if plot:
        require_matplotlib()


def draw(
    model: str, turns: Mapping[str, list[MeasuredTurn]], served: Mapping[str, list[Served]], plot: str
) -> None:
    from pykvgraph.viz import plot_served, plot_turns

    if turns:
        plot_turns({model: turns}, plot)
    elif served:
        plot_served(model, served, plot)


def chosen_tests(
    n_prompt: tuple[int, ...], n_gen: tuple[int, ...], n_depth: tuple[int, ...], extra: tuple[str, ...]
) -> list[Test]:
    from pykvgraph.bench import tests

    if extra and max(n_depth) < MIN_CACHE_DEPTH:
        raise InvalidArgumentError(
            f"--cache needs a cache with something in it: give -d {MIN_CACHE_DEPTH} or more"
        )
    names = [name for name in extra if name not in (TURNS, PREFIX, TIERS, STREAM)]
    chosen = []
    for depth in n_depth:
        chosen += [tests.prompt(n, depth) for n in n_prompt if n]
        chosen += [tests.generation(n, depth) for n in n_gen if n]
        if depth >= MIN_CACHE_DEPTH:
            chosen += [test for name in names for test in tests.extra_tests(name, N_EXTRA_TOKENS, depth)]
    return chosen
