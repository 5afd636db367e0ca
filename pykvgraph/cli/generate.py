"""`pykvgraph generate`: prompt in, text out."""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from pykvgraph.checks import INT32_MAX
from pykvgraph.cli.prompt import prompt_options
from pykvgraph.cli.sampling import sampling_options
from pykvgraph.cli.show import print_json
from pykvgraph.cli.verb import (
    Interruptible,
    Verb,
    batch_option,
    cache_type_options,
    examples,
    json_option,
    model_option,
    option,
    swa_option,
    threads_option,
    ubatch_option,
)
from pykvgraph.cli.where import Where, where_options
from pykvgraph.context_shift import N_KEEP
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.params import MAX_SEED, ContextParams, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pykvgraph.types import Piece, ShiftReport

COUNT = click.IntRange(min=1)


class _StopString(click.types.StringParamType):
    """A text; the environment gives one, spaces and all, where click would make one of each word."""

    def split_envvar_value(self, rv: str) -> list[str]:
        return [rv]


class _NumberOfTokens(click.IntRange):
    """A number from 1 on; -1 for as many as the model wants."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A usage error for 0."""
        return INT32_MAX if str(value) == "-1" else super().convert(value, param, ctx)


@click.command(
    cls=Verb,
    epilog=examples(
        "pykvgraph generate -m model.gguf -p 'Once upon a time'",
        "pykvgraph generate -m model.gguf -n 2000 -c 512 --keep 4 --temp 0.8 -s 1",
        r"echo 'The end' | pykvgraph generate -m model.gguf -f - -n -1 --json",
    ),
)
@model_option(required=True)
@prompt_options
@option(
    "-n",
    "--n-predict",
    "max_tokens",
    type=_NumberOfTokens(min=1),
    metavar="N",
    default=SamplingParams.max_tokens,
    help="Most tokens to generate; -1: until the model ends the text.",
)
@option(
    "-c",
    "--ctx-size",
    "n_ctx",
    type=COUNT,
    metavar="N",
    show_default=f"the model's, at most {ContextParams.n_ctx}",
    help="Cells of the cache.",
)
@batch_option()
@ubatch_option
@cache_type_options
@swa_option
@threads_option("CPU threads for one token.")
@option(
    "-tb",
    "--threads-batch",
    "n_threads_batch",
    type=COUNT,
    metavar="N",
    show_default="as -t",
    help="CPU threads for more than one.",
)
@where_options
@option(
    "--temp",
    "temperature",
    type=click.FloatRange(min=0),
    metavar="X",
    default=SamplingParams.temperature,
    help="Temperature; 0 is greedy.",
)
@option(
    "--top-k",
    type=click.IntRange(min=0),
    metavar="N",
    default=SamplingParams.top_k,
    help="Draw from the N likeliest tokens; 0: from all.",
)
@option(
    "--top-p",
    type=click.FloatRange(0, 1),
    metavar="P",
    default=SamplingParams.top_p,
    help="Draw from the likeliest tokens that together have probability P; 1: from all.",
)
@option(
    "--min-p",
    type=click.FloatRange(0, 1),
    metavar="P",
    default=SamplingParams.min_p,
    help="Draw from tokens with at least P times the likeliest's probability; 0: from all.",
)
@sampling_options
@option(
    "-s",
    "--seed",
    type=click.IntRange(0, MAX_SEED),
    metavar="N",
    show_default="random",
    help="Seed of the draws.",
)
@option(
    "--keep",
    "n_keep",
    type=click.IntRange(min=0),
    metavar="N",
    show_default=f"{N_KEEP}, at most a quarter of -c",
    help="When the cache is full, keep the first N tokens and discard half of the rest.",
)
@option(
    "--stop", multiple=True, type=_StopString(), metavar="TEXT", help="End before this text; may be repeated."
)
@json_option
def generate(
    model: str,
    where: Where,
    prompt: str,
    n_ctx: int | None,
    n_batch: int,
    n_ubatch: int,
    type_k: str,
    type_v: str,
    swa_full: bool,
    n_threads: int | None,
    n_threads_batch: int | None,
    n_keep: int | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Continue a prompt.

    Each piece of text goes to stdout as soon as it is known. When the cache is full, old tokens are removed
    (a context shift, see --keep) and the text goes on. Ctrl-C ends it: the exit code is 130 then.
    """
    import pykvgraph as kvg

    if sampling["seed"] is None:
        sampling["seed"] = secrets.randbelow(MAX_SEED + 1)  # --json tells it
    shifts: list[ShiftReport] = []
    with (
        kvg.Model(model, **where.model()) as loaded,
        kvg.Context(
            loaded,
            n_ctx=n_ctx or min(loaded.n_ctx_train, ContextParams.n_ctx),
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            type_k=type_k,
            type_v=type_v,
            n_threads=n_threads,
            n_threads_batch=n_threads_batch,
            offload_kqv=where.offload_kqv,
            swa_full=swa_full,
        ) as context,
    ):
        if n_ctx and n_ctx > loaded.n_ctx_train:
            click.echo(f"-c {n_ctx}: the model was trained on {loaded.n_ctx_train} tokens.", err=True)
        started, first = time.perf_counter(), 0.0
        ids = loaded.tokenizer.encode(prompt)
        if n_keep is None and prompt:
            _require_fitting(len(ids), context.n_ctx)
        shift = kvg.ContextShift(n_keep=_fitting_keep(n_keep, context.n_ctx), on_shift=shifts.append)
        stream = kvg.generate(context, ids, on_full=shift, **sampling)
        pieces: list[Piece] = []
        with Interruptible() as work:
            for piece in stream if as_json else _shown(stream):
                pieces.append(piece)
                first = first or time.perf_counter()
        seconds = time.perf_counter() - started
    if as_json:
        print_json(
            {
                "prompt": prompt,
                "text": "".join(piece.text for piece in pieces),
                "tokens": [piece.token for piece in pieces],
                "finish_reason": pieces[-1].finish_reason if pieces else None,
                "n_prompt": len(ids),
                "n_generated": len(pieces),
                "seed": sampling["seed"],
                "shifts": [dataclasses.asdict(report) for report in shifts],
                "n_ctx": context.n_ctx,
                "seconds": seconds,
            }
        )
    elif pieces and sys.stderr.isatty():
        rest = max(started + seconds - first, 1e-9)
        rate = f", then {(len(pieces) - 1) / rest:,.0f}/s" if len(pieces) > 1 else ""
        told = f"{len(pieces)} tokens, the first after {first - started:.2f} s{rate}; {len(shifts)} shifts"
        click.secho(f"[{told}]", dim=True, err=True, color=False if os.environ.get("NO_COLOR") else None)
    work.end()


def _require_fitting(n_prompt: int, n_ctx: int) -> None:
    if n_prompt > n_ctx:
        raise InvalidArgumentError(
            f"the prompt has {n_prompt} tokens, and the cache {n_ctx} cells. Raise -c, or give --keep N: "
            "then old tokens after the first N are removed whenever the cache is full"
        )


def _fitting_keep(n_keep: int | None, n_ctx: int) -> int:
    """How many tokens to keep: as asked, if that leaves something to discard."""
    if n_keep is None:
        return min(N_KEEP, n_ctx // 4)
    if n_keep >= n_ctx:
        raise InvalidArgumentError(
            f"--keep {n_keep} leaves nothing to discard of a cache of {n_ctx} cells. Lower it, or raise -c"
        )
    return n_keep


def _shown(stream: Iterator[Piece]) -> Iterator[Piece]:
    """The same pieces; each one's text goes to stdout at once, and a newline after the last."""
    try:
        for piece in stream:
            click.echo(piece.text, nl=False)
            yield piece
    finally:
        click.echo()
