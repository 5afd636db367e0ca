"""`pykvgraph chat`: a conversation that goes on when the context is full."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from pykvgraph.cli.chat_input import Input, PipeInput, TerminalInput
from pykvgraph.cli.llama_verb import LlamaVerb
from pykvgraph.cli.run_options import RunOptions, run_options
from pykvgraph.cli.verb import examples, model_option, option

if TYPE_CHECKING:
    from pykvgraph.chat import Conversation
    from pykvgraph.cli.talk import Talk
    from pykvgraph.context.context import Context
    from pykvgraph.kv_cache.maps.lines import Line


# pykvgraph.context.cell_scores has them; a test compares
POLICIES = ("window", "keydiff", "snapkv", "tova")


@click.command(
    cls=LlamaVerb,
    epilog=examples(
        "pykvgraph chat",
        "pykvgraph chat -m model.gguf --system 'Be brief.' -c 2048 --show-cache",
        "pykvgraph chat --demo",
        "printf 'Hello.\\nAnd now?\\n' | pykvgraph chat -m model.gguf --temp 0",
    ),
)
@model_option(show_default="an embedded one, for small talk")
@option(
    "-sys", "--system", "--system-prompt", metavar="TEXT", default="", help="What the model is told first."
)
@option(
    "--keep",
    "--n-keep",
    "n_keep",
    type=click.IntRange(min=0),
    metavar="N",
    show_default="the system prompt",
    help="When the cache is full, keep the first N tokens, and the turn in which they end.",
)
@option(
    "--n-discard",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="half of what isn't kept",
    help="Give up whole turns then, until N tokens are free.",
)
@option(
    "--self-extend",
    type=click.IntRange(min=1),
    metavar="N",
    default=1,
    help="A cache N times as long as the model was trained on, where N old tokens share a position.",
)
@option(
    "--forget",
    type=click.Choice(POLICIES),
    metavar="POLICY",
    show_default="turns are given up",
    help=f"Forget the cells that matter least when the cache is full: {', '.join(POLICIES)}.",
)
@option("--show-cache", is_flag=True, help="A strip of the cells under the answer, coloured by turn.")
@option("--demo", is_flag=True, help="Play dialogues in 512 cells, and show what is recalled of them.")
@option("--trials", type=click.IntRange(min=1), metavar="N", default=20, help="Dialogues of --demo.")
@run_options(temperature=0.8, max_tokens=512)
def chat(
    model: str | None,
    run: RunOptions,
    system: str,
    n_keep: int | None,
    n_discard: int | None,
    self_extend: int,
    forget: str | None,
    show_cache: bool,
    demo: bool,
    trials: int,
) -> None:
    """Talk with a model.

    When the cache is full, the oldest turns are given up (a context shift), or with --forget the cells that
    matter least, and the talk goes on. /help lists the commands. Ctrl-C stops an answer. When stdin or stdout
    is no terminal, each line is a message, only answers go to stdout, and Ctrl-C ends the talk: the exit code
    is 130 then.
    """
    if demo and run.model_draft:
        raise click.UsageError("--demo has no use for -md: leave one of them out")
    if demo:
        from pykvgraph.cli import chat_demo

        return chat_demo.demo(model, run, trials)

    import pykvgraph as kvg
    from pykvgraph.chat import Conversation
    from pykvgraph.cli.chat_page import Page
    from pykvgraph.cli.talk import Talk
    from pykvgraph.models import embedded_model
    from pykvgraph.sequence.sequence import checkpoint_cells

    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with (
        kvg.Model(model or embedded_model("dialogue"), **run.of_model()) as loaded,
        run.contexts(loaded, self_extend, checkpoint_cells=checkpoint_cells(loaded)) as (context, drafts),
    ):
        conversation = Conversation(
            context,
            system=system,
            n_keep=n_keep,
            n_discard=n_discard,
            self_extend=self_extend,
            on_extend=lambda n: talk.extended(n),
            on_discard=lambda report: talk.discarded(report),
            forget=forget,
            on_forget=lambda report: talk.forgotten(report),
            **drafts,
        )
        page = Page(on_terminal, (lambda width: _strip(context, conversation, width)) if show_cache else None)
        params = kvg.SamplingParams(**run.sampling)
        given = _input(on_terminal)
        talk = Talk(context, conversation, page, given, params, is_piped=not on_terminal)
        if conversation.is_plain:
            page.note("the model has no chat template: turns are lines of User: and Assistant:")
        if on_terminal:
            page.note(f"{context.n_ctx} cells for {loaded.path.name}; /help lists the commands")
        _loop(talk, given, page.note)


def _input(on_terminal: bool) -> Input:
    if on_terminal:
        return TerminalInput()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # what can't be read doesn't end the talk
    return PipeInput()


def _loop(talk: Talk, given: Input, note: Callable[[str], None]) -> None:
    """Ctrl-C at the prompt ends it when it comes twice in a row; during an answer it stops that."""
    n_interrupts = 0
    while True:
        try:
            line = given.read()
        except KeyboardInterrupt:
            n_interrupts += 1
            if n_interrupts == 2 or not isinstance(given, TerminalInput):
                raise
            note("Ctrl-C again ends the chat")
            continue
        n_interrupts = 0
        if line is None or not talk.handle(line):
            return


def _strip(context: Context, conversation: Conversation, width: int) -> Line:
    from pykvgraph.kv_cache.maps.strip import strip

    return strip(context.kv.cells(), conversation.turn_positions, conversation.n_forgotten, width)
