"""How `pykvgraph bench` prints: each result as soon as it is there; JSON at the end."""

from __future__ import annotations

import csv
import dataclasses
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from pykvgraph.checks import size_text
from pykvgraph.cli.show import new_table, number_text, print_json, print_table

if TYPE_CHECKING:
    from pykvgraph.bench.requests import Served
    from pykvgraph.bench.runner import Result
    from pykvgraph.bench.streams import StreamSpeed
    from pykvgraph.bench.tests import Test
    from pykvgraph.bench.tiers import TierSpeed
    from pykvgraph.bench.turns import MeasuredTurn
    from pykvgraph.cli.rival import Rivals
    from pykvgraph.model.model import Model

WAITS = ("first_p50", "first_p95", "gap_p50", "gap_p95", "gap_max")
_SPEEDS = ("mean", "deviation", "median")
STREAMS_WIDTH = len("libllama -fa 1, streams")


class Printer:
    """Takes the results of one test after the other. `output`: "md", "csv" or "json"."""

    def __init__(self, output: str, model: Model, n_threads: int, tests: Sequence[Test]) -> None:
        self._output, self._model, self._n_threads = output, model, n_threads
        self._rows: list[dict[str, Any]] = []
        self._turn_rows: list[dict[str, Any]] = []
        self._served_rows: list[dict[str, Any]] = []
        self._tier_rows: list[dict[str, Any]] = []
        self._stream_rows: list[dict[str, Any]] = []
        self._test_width = max((len(test.name) for test in tests), default=0)
        self._several = any(test.n_seq > 1 for test in tests)
        self._engine_width = len("pykvgraph")
        self._ratio = ""  # the head of the column with ratios to rivals
        if output == "md":
            size = f"{model.n_params / 1e6:.1f} M parameters, {size_text(model.weight_bytes)}"
            threads = f"{n_threads} thread{'s' if n_threads > 1 else ''}"
            click.echo(f"{model.arch}, {size}; {model.device}, {threads}")

    def begin(self, rivals: Rivals) -> None:
        """They are measured, too."""
        if rivals.libllama is not None or rivals.programs:
            self._ratio = "ours is"
        widths = [self._engine_width, *(len(program.name) for program in rivals.programs)]
        if rivals.libllama is not None:
            widths.append(STREAMS_WIDTH if self._several else len("libllama -fa 1"))
        self._engine_width = max(widths)

    def add(self, results: Sequence[Result]) -> None:
        """The results of one test, ours first."""
        rows = [_row(result, results[0], self._model, self._n_threads) for result in results]
        if self._output == "csv":
            _print_csv(rows, header=not self._rows)
        elif self._output == "md":
            if not self._rows:
                self._print_line("test", "depth", "engine", "median", "", self._ratio, bold=True)
            for row in rows:
                if row["refused"]:
                    self._print_refused(row)
                    continue
                median = f"{number_text(row['median'], 4)} ± {number_text(row['deviation'], 2)}"
                ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}x"
                self._print_line(row["test"], row["depth"], row["engine"], median, row["unit"], ratio)
        self._rows += rows

    def _print_refused(self, row: dict[str, Any]) -> None:
        engine = f"{row['engine']:<{self._engine_width}}"
        click.echo(
            f"{row['test']:<{self._test_width}} {row['depth']:>6} {engine}  left out: {row['refused']}"
        )

    def _print_line(
        self, test: str, depth: Any, engine: str, median: str, unit: str, ratio: str, bold: bool = False
    ) -> None:
        line = (
            f"{test:<{self._test_width}} {depth:>6} {engine:<{self._engine_width}} "
            f"{median:>18} {unit:<7} {ratio:>7}"
        )
        click.secho(line.rstrip(), bold=bold)

    def add_turns(self, depth: int, through: str, turns: Sequence[MeasuredTurn]) -> None:
        """The turns of one conversation, and what held it."""
        rows = [_row_of_turn(turn, depth, through) for turn in turns]
        if self._output == "csv":
            _print_csv(rows, header=not self._turn_rows)
        elif self._output == "md":
            _print_turns(depth, through, turns)
        self._turn_rows += rows

    def add_served(self, depth: int, runs: Mapping[str, Sequence[Served]]) -> None:
        """The requests that begin with so many equal tokens, by whether these were shared."""
        rows = [{"prefix": how, **row_of_served(depth, each)} for how, each in runs.items()]
        if self._output == "csv":
            _print_csv(rows, header=not self._served_rows)
        elif self._output == "md":
            _print_served(rows)
        self._served_rows += rows

    def add_tiers(self, speeds: Sequence[TierSpeed]) -> None:
        """The same prompt and tokens, for each place where K and V can be."""
        rows = [dataclasses.asdict(each) for each in speeds]
        if self._output == "csv":
            _print_csv(rows, header=not self._tier_rows)
        elif self._output == "md":
            _print_tiers(speeds)
        self._tier_rows += rows

    def add_streams(self, speeds: Sequence[StreamSpeed]) -> None:
        """The same prompt and tokens over one transport, for each level."""
        rows = [dataclasses.asdict(each) for each in speeds]
        if self._output == "csv":
            _print_csv(rows, header=not self._stream_rows)
        elif self._output == "md":
            _print_streams(speeds)
        self._stream_rows += rows

    def end(self) -> None:
        """Prints the JSON, if that is wanted."""
        if self._output == "json":
            found = {"results": self._rows, "turns": self._turn_rows, "prefix": self._served_rows}
            print_json({**found, "tiers": self._tier_rows, "streams": self._stream_rows})


def _print_csv(rows: Sequence[dict[str, Any]], header: bool) -> None:
    writer = csv.DictWriter(sys.stdout, [key for key in rows[0] if key != "seconds"], extrasaction="ignore")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    sys.stdout.flush()


def _print_turns(depth: int, through: str, turns: Sequence[MeasuredTurn]) -> None:
    """old: tokens that the cache had already; again: those of them that were decoded again."""
    click.echo(f"{through}, turns after a prompt of {depth} tokens:")
    table = new_table("turn", "prompt", "old", "again", "new", "first token")
    for turn in turns:
        counts = (turn.n_prompt, turn.n_old, turn.n_again, turn.n_new)
        table.add_row(turn.name, *map(str, counts), f"{turn.seconds * 1e3:.1f} ms")
    n_again, n_new = sum(turn.n_again for turn in turns), sum(turn.n_new for turn in turns)
    seconds = sum(turn.seconds for turn in turns)
    table.add_row("all", "", "", str(n_again), str(n_new), f"{seconds * 1e3:.1f} ms")
    print_table(table)


def _row_of_turn(turn: MeasuredTurn, depth: int, through: str) -> dict[str, Any]:
    """One line of the output."""
    return {
        "depth": depth,
        "through": through,
        "turn": turn.name,
        "n_prompt": turn.n_prompt,
        "n_old": turn.n_old,
        "n_again": turn.n_again,
        "n_new": turn.n_new,
        "first_token_ms": turn.seconds * 1e3,
    }


def row_of_served(depth: int, runs: Sequence[Served]) -> dict[str, Any]:
    """Medians over the runs; of the waits, the middle, the 95th of 100, and the longest."""

    def median(of: Callable[[Served], float]) -> float:
        return statistics.median(map(of, runs))

    return {
        "depth": depth,
        "n_prompt": runs[0].n_prompt,
        "n_decoded": max(run.n_decoded for run in runs),
        "tokens_per_second": median(lambda run: run.speed),
        "first_p50": median(lambda run: quantile(run.first, 0.5)),
        "first_p95": median(lambda run: quantile(run.first, 0.95)),
        "gap_p50": median(lambda run: quantile(run.gaps, 0.5)),
        "gap_p95": median(lambda run: quantile(run.gaps, 0.95)),
        "gap_max": median(lambda run: max(run.gaps)),
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that is not below so large a share of them."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _print_served(rows: Sequence[dict[str, Any]]) -> None:
    """first: from a request to its first token; gap: from a token to the next one."""
    click.echo(f"requests that begin with the same {rows[0]['depth']} tokens; waits in seconds:")
    table = new_table("prefix", "prompts", "decoded", "t/s", "first p50", "p95", "gap p50", "p95", "max")
    for row in rows:
        counts = row["n_prompt"], row["n_decoded"], number_text(row["tokens_per_second"], 4)
        table.add_row(row["prefix"], *map(str, counts), *(f"{row[name]:.3f}" for name in WAITS))
    print_table(table)


def _print_tiers(speeds: Sequence[TierSpeed]) -> None:
    """What K, V and graphs take on devices; the CPU is none."""
    table = new_table("K and V", "tokens", "prompt t/s", "t/s", "on devices", "with graphs")
    for each in speeds:
        rates = number_text(each.prompt, 4), number_text(each.generation, 4)
        held = size_text(each.cache_bytes), size_text(each.cache_bytes + each.compute_bytes)
        table.add_row(each.tier, str(each.depth), *rates, *held)
    print_table(table)


def _print_streams(speeds: Sequence[StreamSpeed]) -> None:
    """more: than without a stream. behind: of the prompt, after its last decode. total: of both."""
    click.echo(f"over {speeds[0].transport}, a prompt of {speeds[0].depth} tokens:")
    table = new_table("level", "prompt", "more", "behind", "token", "more", "total", "more")
    for each in speeds:
        prompt = f"{each.prompt:.3f} s", f"{each.prompt_more * 1e3:.1f} ms", f"{each.behind * 1e3:.1f} ms"
        token = f"{each.token * 1e3:.2f} ms", f"{each.token_more * 100:.1f} %"
        total = f"{each.total:.3f} s", f"{each.total_more * 100:.1f} %"
        if each.level is None:
            table.add_row("none", prompt[0], "", "", token[0], "", total[0], "")
        else:
            table.add_row(str(each.level), *prompt, *token, *total)
    print_table(table)


def _row(result: Result, ours: Result, model: Model, n_threads: int) -> dict[str, Any]:
    """One line of the output. ratio: our median divided by this engine's. What is refused has no numbers."""
    speeds = {} if result.refused else {name: getattr(result, name) for name in _SPEEDS}
    return {
        "test": result.test.name,
        "depth": result.test.depth,
        "engine": result.engine,
        "version": result.version,
        **{name: speeds.get(name) for name in _SPEEDS},
        "unit": result.test.unit,
        "ratio": None if ours is result or result.refused else ours.median / result.median,
        "refused": result.refused,
        "n_params": model.n_params,
        "weight_bytes": model.weight_bytes,
        "device": model.device,
        "n_threads": n_threads,
        "seconds": list(result.seconds),
    }
