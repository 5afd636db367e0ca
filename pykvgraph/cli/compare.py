"""`--compare` of `pykvgraph batch`: the same prompts again, with nothing shared, and where answers differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from pykvgraph.cli.question import Line
    from pykvgraph.context.context import Context


class Answered(NamedTuple):
    """The tokens of the samples that answered a line; ids: of its prompt."""

    line: Line
    ids: Sequence[int]
    samples: list[tuple[int, ...]]


@dataclass(frozen=True)
class Difference:
    """token: how many tokens of an answer are the same in both runs. shared, alone: the next one; None: none.

    gap: by how much the logit of `alone` is above that of `shared`, behind the same tokens in a context of
    their own; None where one of them is missing.
    """

    line: int
    sample: int
    token: int
    shared: int | None
    alone: int | None
    gap: float | None


def differences(pairs: Iterable[tuple[Answered, Answered]], ctx: Context) -> list[Difference]:
    """Of the same line, with prefixes shared and without; ctx: with room for the longest, for the gaps."""
    return [
        _difference(one, i, mine, its, ctx)
        for one, other in pairs
        for i, (mine, its) in enumerate(zip(one.samples, other.samples, strict=True))
        if mine != its
    ]


def _difference(
    said: Answered, sample: int, mine: Sequence[int], its: Sequence[int], ctx: Context
) -> Difference:
    from pykvgraph.context.common_length import common_length

    n = common_length(mine, its)
    a, b = (tokens[n] if n < len(tokens) else None for tokens in (mine, its))
    gap = None if a is None or b is None else _gap(ctx, [*said.ids, *mine[:n]], a, b)
    return Difference(said.line.number, sample, n, a, b, gap)


def _gap(ctx: Context, ids: Sequence[int], a: int, b: int) -> float:
    from pykvgraph.context.batch import Batch

    ctx.reset()
    batch = Batch()
    for begin in range(0, len(ids), ctx.n_batch):
        batch.clear()
        batch.extend(ids[begin : begin + ctx.n_batch], begin, (0,), "last")
        ctx.decode(batch)
    logits = ctx.logits()[-1]
    return float(logits[b] - logits[a])


def longest(said: Iterable[Answered]) -> int:
    """Tokens of the longest text, its prompt included."""
    return max((len(each.ids) + len(tokens) for each in said for tokens in each.samples), default=1)


def report(n_answers: int, n_drawn: int, found: Sequence[Difference]) -> dict[str, Any]:
    """What --json tells. n_drawn: lines that were not asked again, as their answers are drawn anew."""
    counts = {"n_answers": n_answers, "n_equal": n_answers - len(found), "n_drawn": n_drawn}
    return {**counts, "differences": [dataclasses.asdict(each) for each in found]}


def show(told: dict[str, Any]) -> None:
    """For people, on stderr."""
    drawn = f"; {told['n_drawn']} lines have no seed, and were not asked again" if told["n_drawn"] else ""
    click.echo(
        f"{told['n_equal']} of {told['n_answers']} answers are the same with nothing shared{drawn}", err=True
    )
    for each in told["differences"]:
        gap = "" if each["gap"] is None else f", whose logit is {each['gap']:.6f} above it"
        names = ["the end" if each[name] is None else f"token {each[name]}" for name in ("shared", "alone")]
        click.echo(
            f"line {each['line']}, sample {each['sample']}: after {each['token']} tokens {names[0]}, and "
            f"with nothing shared {names[1]}{gap}",
            err=True,
        )
