"""`pykvgraph inspect`: what is in a GGUF file, and whether it would run."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pykvgraph.checks import size_text
from pykvgraph.cli.recipe import recipe_lines, tokenizer_text
from pykvgraph.cli.show import (
    abbreviated,
    new_table,
    print_json,
    print_table,
    printable,
    safe_cell,
)
from pykvgraph.cli.verb import Verb, examples, json_option, model_option, option
from pykvgraph.errors import ModelLoadError, UnsupportedError

if TYPE_CHECKING:
    from pathlib import Path

    from pykvgraph.model.tokenizer import Tokenizer
    from pykvgraph.types import LayerSpec, ModelInfo, TensorInfo

T = TypeVar("T")


@click.command(
    cls=Verb,
    epilog=examples(
        "pykvgraph inspect model.gguf", "pykvgraph inspect -m model.gguf --json", "pykvgraph inspect --list"
    ),
)
@click.argument("file", required=False, metavar="[MODEL]")
@model_option("The GGUF file, as in the other verbs.", argument="file")
@option("--list", "listed", is_flag=True, help="List the architectures that run, and leave.")
@json_option
def inspect(model: str | None, listed: bool, as_json: bool) -> None:
    """Show a GGUF's recipe, metadata and tensors.

    The recipe is how the file would run here. What keeps it from running, or from turning text into tokens,
    is told too, and the exit code is 1 then. Long arrays and texts are abbreviated; --json has them whole.
    --list needs no file: it tells how near the logits of each architecture are to libllama's, as errors (mean
    squares, normalized): with F32 and F16 cells, between libllama's own two attentions, and after edits of
    the cache; and what layers keep of earlier tokens. docs/architectures.md says more.
    """
    if listed:
        if model is not None:
            raise click.UsageError("--list tells of no file: leave the model out, or --list.")
        _print_architectures(as_json)
        return
    if model is None:
        raise click.UsageError("Missing the model: give -m, -hf or -mu.")
    from pykvgraph import GgufFile, Tokenizer

    with GgufFile(model) as gguf:
        metadata, tensors, parts = gguf.metadata, gguf.tensors, gguf.parts
        recipe, reason = _try(lambda: (gguf.model_info(), gguf.layers()))
    tokenizer, silence = _try(lambda: Tokenizer.from_file(model))
    if as_json:
        info, layers = recipe or (None, ())
        print_json(
            {
                "file": model,
                "parts": [str(part) for part, _ in parts],
                "size": sum(size for _, size in parts),
                "recipe": dataclasses.asdict(info) if info else None,
                "reason": reason,
                "layers": [dataclasses.asdict(layer) for layer in layers],
                "tokenizer": tokenizer_text(tokenizer, metadata) if tokenizer else None,
                "tokenizer_reason": silence,
                "metadata": metadata,
                "tensors": [dataclasses.asdict(tensor) for tensor in tensors],
            }
        )
    else:
        _print_summary(model, parts, metadata, tensors)
        _print_recipe(model, recipe, reason, metadata, tensors)
        _print_tokenizer(model, tokenizer, silence, metadata)
        click.echo()
        _print_metadata(metadata)
        click.echo()
        _print_tensors(tensors)
    if reason or silence:
        raise click.exceptions.Exit(1)


def _print_architectures(as_json: bool) -> None:
    """docs/architectures.md says what was compared, and how."""
    from pykvgraph.model.architectures import architectures, figure_text

    found = architectures()
    if as_json:
        print_json({"architectures": [dataclasses.asdict(each) for each in found]})
        return
    table = new_table("architecture", "files", "F32", "F16", "libllama's", "edited", "keeps")  # it may wrap
    for each in found:
        figures = [figure_text(figure) for figure in (each.exact, each.worst, each.own, each.edited)]
        table.add_row(each.name, str(each.files), *figures, ", ".join(each.cells))
    print_table(table)


def _try(what: Callable[[], T]) -> tuple[T | None, str | None]:
    """What it returns, or why it doesn't."""
    try:
        return what(), None
    except (UnsupportedError, ModelLoadError) as error:
        return None, str(error)


def _print_reason(what: str, path: str, reason: str | None) -> None:
    """In lines as wide as the terminal, without the file's name, which is in the first."""
    text = printable(reason or "")
    for name in (path, os.path.abspath(path)):
        text = text.removeprefix(f"{printable(name)}: ").removeprefix(f"{printable(name)} ")
    width = shutil.get_terminal_size().columns
    click.echo(click.wrap_text(f"{what}: {text}", width, subsequent_indent="  "))


def _print_summary(
    path: str, parts: Sequence[tuple[Path, int]], metadata: Mapping[str, Any], tensors: Sequence[TensorInfo]
) -> None:
    size = size_text(sum(size for _, size in parts))
    files = f" in {len(parts)} files" if len(parts) > 1 else ""
    click.echo(f"{printable(path)}: {size}{files}, {len(metadata)} keys, {len(tensors)} tensors")


def _print_recipe(
    path: str,
    recipe: tuple[ModelInfo, Sequence[LayerSpec]] | None,
    reason: str | None,
    metadata: Mapping[str, Any],
    tensors: Sequence[TensorInfo],
) -> None:
    if recipe is None:
        _print_reason("does not run", path, reason)
        return
    info, layers = recipe
    click.echo(f"runs as {printable(info.arch)}:")
    table = new_table("", "")
    table.show_header = False
    for subject, text in recipe_lines(info, layers, metadata, tensors):
        table.add_row(f"  {subject}", safe_cell(text))
    print_table(table)


def _print_tokenizer(
    path: str, tokenizer: Tokenizer | None, silence: str | None, metadata: Mapping[str, Any]
) -> None:
    if tokenizer is None:
        _print_reason("does not speak", path, silence)
    else:
        click.echo(f"speaks {printable(tokenizer_text(tokenizer, metadata))}")


def _print_metadata(metadata: Mapping[str, Any]) -> None:
    table = new_table("key", "value")
    for key, value in metadata.items():
        table.add_row(safe_cell(key), safe_cell(abbreviated(value)))
    print_table(table)


def _print_tensors(tensors: Sequence[TensorInfo]) -> None:
    table = new_table("tensor", "type", "shape", "size")
    for tensor in tensors:
        shape = " x ".join(map(str, tensor.shape))
        table.add_row(safe_cell(tensor.name), tensor.type, shape, size_text(tensor.size))
    print_table(table)
