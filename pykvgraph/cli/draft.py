"""`-md`, `-hfd` and `--draft-max`, as llama.cpp has them: a smaller model that proposes tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from pykvgraph.cli.verb import option

Command = Callable[..., None]

_OPTIONS = (
    option(
        "-md",
        "--model-draft",
        "--spec-draft-model",
        "model_draft",
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="A smaller GGUF file of the same vocabulary, which proposes tokens; texts stay as they are.",
    ),
    option(
        "-hfd",
        "-hfrd",
        "--hf-repo-draft",
        "--spec-draft-hf",
        "draft_repo",
        metavar="USER/NAME[@COMMIT][:QUANT]",
        help="The same, of Hugging Face.",
    ),
    option(
        "--draft-max",
        "--draft",
        "--draft-n",
        "--spec-draft-n-max",
        "draft_max",
        type=click.IntRange(min=1),
        metavar="N",
        default=16,
        help="Most tokens of a draft.",
    ),
)


def draft_options(command: Command) -> Command:
    """The options; the command gets the path as `model_draft`, whichever of both it was, and `draft_max`."""

    @functools.wraps(command)
    def run(*, model_draft: str | None, draft_repo: str | None, **others: Any) -> None:
        if draft_repo:
            from pykvgraph.cli.download import downloaded

            if model_draft:
                raise click.UsageError("-md and -hfd each name the draft model: leave one out")
            model_draft = downloaded(draft_repo, from_hub=True)
        command(model_draft=model_draft, **others)

    for add in reversed(_OPTIONS):
        run = add(run)
    return run
