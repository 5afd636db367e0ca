"""`pykvgraph generate`: prompt in, text out."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from typing import TYPE_CHECKING

import click

from pykvgraph.cli.beams import BeamOptions, beam_options
from pykvgraph.cli.llama_verb import LlamaVerb
from pykvgraph.cli.prompt import prompt_options
from pykvgraph.cli.run_options import RunOptions, run_options
from pykvgraph.cli.show import print_json, speed_text
from pykvgraph.cli.verb import Interruptible, examples, json_option, model_option, option
from pykvgraph.context.context_shift import N_KEEP
from pykvgraph.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pykvgraph.types import Piece, ShiftReport


@click.command(
    cls=LlamaVerb,
    epilog=examples(
        "pykvgraph generate -m model.gguf -p 'Once upon a time'",
        "pykvgraph generate -m model.gguf -n 2000 -c 512 --keep 4 --temp 0.8 -s 1",
        r"echo 'The end' | pykvgraph generate -m model.gguf -f - -n -1 --json",
        "pykvgraph generate -m model.gguf -p 'Tea is' --beam-width 4 --n-best 2",
    ),
)
@model_option(required=True)
@beam_options
@prompt_options
@run_options()
@option(
    "--keep",
    "n_keep",
    type=click.IntRange(min=0),
    metavar="N",
    show_default=f"{N_KEEP}, at most a quarter of -c",
    help="When the cache is full, keep the first N tokens and discard half of the rest.",
)
@json_option
def generate(
    model: str, run: RunOptions, prompt: str, n_keep: int | None, beams: BeamOptions, as_json: bool
) -> None:
    """Continue a prompt.

    Each piece of text goes to stdout as soon as it is known. When the cache is full, old tokens are removed
    (a context shift, see --keep) and the text goes on. Ctrl-C ends it: the exit code is 130 then.

    With --beam-width the likeliest texts are searched for, and printed when they are found.
    """
    import pykvgraph as kvg

    if beams.width > 1:
        if n_keep is not None:
            raise InvalidArgumentError("--keep: a search ends where the cache is full; leave out --keep")
        with kvg.Model(model, **run.where.model()) as loaded:
            beams.search(loaded, prompt, run.context_for(loaded), run.sampling, as_json)
        return

    shifts: list[ShiftReport] = []
    with (
        kvg.Model(model, **run.of_model()) as loaded,
        run.contexts(loaded) as (context, drafts),
    ):
        started, first = time.perf_counter(), 0.0
        ids = loaded.tokenizer.encode(prompt)
        if n_keep is None and prompt:
            _require_fitting(len(ids), context.n_ctx)
        shift = kvg.ContextShift(n_keep=_fitting_keep(n_keep, context.n_ctx), on_shift=shifts.append)
        stream = kvg.generate(context, ids, on_full=shift, **drafts, **run.sampling)
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
                "seed": run.sampling["seed"],
                "shifts": [dataclasses.asdict(report) for report in shifts],
                "n_ctx": context.n_ctx,
                "seconds": seconds,
            }
        )
    elif pieces and sys.stderr.isatty():
        told = f"{speed_text(len(pieces), first - started, seconds)}; {len(shifts)} shifts"
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
