"""`--spec-type`, `-md`, `-hfd` and `--draft-max`, as llama.cpp has them: what proposes tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from pykvgraph.cli.verb import option
from pykvgraph.errors import KVGraphError

if TYPE_CHECKING:
    from pykvgraph.types import ModelInfo

Command = Callable[..., None]

# of llama-server's those that there are here
SPEC_TYPES = ("none", "draft-simple", "draft-mtp", "ngram-simple")


def spec_type_option(unless_given: str) -> Callable[[Command], Command]:
    """--spec-type; unless_given: what --help says of leaving it out."""
    return option(
        "--spec-type",
        metavar="TYPE",
        show_default=unless_given,
        help="Drafts: ngram-simple: what followed the last tokens where they came before; draft-simple: what "
        "the model of -md proposes; draft-mtp: what the model's own draft head does, or the assistant of -md "
        "(gemma4-assistant); none.",
    )


OF_ENGINE = (
    "draft-simple with -md, draft-mtp with an assistant there or a draft head in the model's file, else none"
)


def model_draft_option(text: str) -> Callable[[Command], Command]:
    """-md; text: what --help says of it."""
    return option(
        "-md",
        "--model-draft",
        "--spec-draft-model",
        "model_draft",
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help=text,
    )


_OPTIONS = (
    model_draft_option(
        "A smaller GGUF file of the same vocabulary, or the model's assistant (gemma4-assistant), which "
        "proposes tokens; texts stay as they are."
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


def spec_type_of(
    wanted: str | None, model_draft: str | None, model: str, kv_overrides: dict[str, bool | int | float | str]
) -> str:
    """--spec-type, or what the files have where it isn't given: one of SPEC_TYPES.

    model_draft: the file of -md; None: there is none. kv_overrides: of the model. Raises click.UsageError for
    a type that isn't one of these, and for one that doesn't go with -md.
    """
    if wanted not in (None, *SPEC_TYPES):
        raise click.UsageError(f"--spec-type {wanted}: here it is one of {', '.join(SPEC_TYPES)}")
    if wanted == "draft-simple" and not model_draft:
        raise click.UsageError("--spec-type draft-simple: name the draft model, with -md FILE")
    if model_draft:
        found = _kind_of_file(model_draft, wanted)
        if wanted == "draft-simple" != found:
            raise click.UsageError(
                "--spec-type draft-simple: the file of -md is an assistant, whose drafts are draft-mtp: "
                "leave out --spec-type"
            )
        if wanted not in (None, found):
            raise click.UsageError(f"--spec-type {wanted} has no use for -md: leave one of them out")
        return found
    return wanted or ("draft-mtp" if _has_draft_head(model, kv_overrides) else "none")


def draft_arguments(spec_type: str, model_draft: str | None) -> dict[str, Any]:
    """What Model is told of drafts: its draft_heads and assistant.

    spec_type: as spec_type_of() has found it. model_draft: the file of -md, or None.
    """
    is_mtp = spec_type == "draft-mtp"
    return {"draft_heads": is_mtp and not model_draft, "assistant": model_draft if is_mtp else None}


def _has_draft_head(model: str, kv_overrides: dict[str, bool | int | float | str]) -> bool:
    info = _info(model, kv_overrides)
    return info is not None and info.has_draft_head


def _kind_of_file(model_draft: str, wanted: str | None) -> str:
    """A file that says nothing is taken for what is wanted of it: who loads it says why it can't be."""
    info = _info(model_draft, {})
    if info is None:
        return "draft-mtp" if wanted == "draft-mtp" else "draft-simple"
    return "draft-mtp" if info.n_embd_target > 0 else "draft-simple"


def _info(model: str, kv_overrides: dict[str, bool | int | float | str]) -> ModelInfo | None:
    """What the file says; None for what is no model that runs here: who loads it says why."""
    from pykvgraph.model.gguf_file import GgufFile

    try:
        with GgufFile(model, kv_overrides=kv_overrides) as file:
            return file.model_info()
    except (KVGraphError, OSError, MemoryError):
        return None
