"""`pykvgraph chat --demo`: what a chat remembers beyond the end of its context."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from pykvgraph.cli.show import new_table, print_table

if TYPE_CHECKING:
    from pykvgraph.cli.run_options import RunOptions
    from pykvgraph.demos.recall import Dialogue, Said

N_CTX = 512  # small, so that one sees soon what is given up
N_SHOWN = 2  # turns of small talk at the beginning of a stretch of it


def demo(model: str | None, run: RunOptions, n_dialogues: int) -> None:
    """Plays a dialogue for everybody to read, then the others, and prints how much was recalled in all."""
    import pykvgraph as kvg
    from pykvgraph.cli.chat_page import Page
    from pykvgraph.cli.talk import discard_text
    from pykvgraph.demos.recall import play
    from pykvgraph.models import embedded_model
    from pykvgraph.sequence.sequence import checkpoint_cells

    page = Page(sys.stdout.isatty())
    told = _Narrator(page.note)
    seed = run.sampling["seed"]
    with (
        kvg.Model(model or embedded_model("dialogue"), **run.where.model()) as loaded,
        kvg.Context(
            loaded, **run.context_for(loaded, most=N_CTX, checkpoint_cells=checkpoint_cells(loaded))
        ) as ctx,
    ):
        dialogues = [
            play(ctx, seed, on_turn=told.said, on_discard=lambda gone: told.note(discard_text(gone)))
        ]
        hidden = not sys.stderr.isatty()
        others = range(seed + 1, seed + n_dialogues)
        with click.progressbar(others, label="dialogues", file=sys.stderr, hidden=hidden) as bar:
            dialogues += [play(ctx, each) for each in bar]
        _print_totals(dialogues, ctx.n_ctx)


class _Narrator:
    """Writes turns down, of small talk only the first few in a row."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._n_small = 0

    def said(self, said: Said) -> None:
        if said.why == "system":
            click.echo(f"system prompt: {said.message}")
            return
        if said.why == "small talk":
            self._n_small += 1
            if self._n_small > N_SHOWN:
                return
        else:
            self._skipped()
        if said.place is not None:
            self._note(
                f"a fact in the {said.place}" if said.place != "given up" else "a fact that was given up"
            )
        click.echo(f"> {said.message}\n{said.answer}")

    def note(self, text: str) -> None:
        self._skipped()
        self._note(text)

    def _skipped(self) -> None:
        if self._n_small > N_SHOWN:
            self._note(f"{self._n_small - N_SHOWN} more turns of small talk")
        self._n_small = 0


def _print_totals(dialogues: list[Dialogue], n_ctx: int) -> None:
    from pykvgraph.demos.dialogue import DID_NOT_TELL
    from pykvgraph.demos.recall import totals

    n_tokens = sum(dialogue.n_tokens for dialogue in dialogues)
    click.echo(f"\n{len(dialogues)} dialogues, {n_tokens // len(dialogues)} tokens each, in {n_ctx} cells:")
    table = new_table("where the fact was", "asked", "recalled", f'"{DID_NOT_TELL}"', "wrong")
    for place, counts in totals(dialogues).items():
        results = (f"{counts[result]}" for result in ("recalled", "denied", "wrong"))
        table.add_row(place, f"{counts['asked']}", *results)
    print_table(table)
