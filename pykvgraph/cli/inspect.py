"""`pykvgraph inspect`: what is in a GGUF file, and whether it would run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from pykvgraph.cli.show import (
    abbreviated,
    new_table,
    print_json,
    print_table,
    printable,
    safe_cell,
    size_text,
)
from pykvgraph.cli.verb import Verb, examples, json_option, option
from pykvgraph.errors import ModelLoadError, UnsupportedError

if TYPE_CHECKING:
    from pykvgraph.types import ModelInfo, TensorInfo


@click.command(
    cls=Verb, epilog=examples("pykvgraph inspect model.gguf", "pykvgraph inspect -m model.gguf --json")
)
@click.argument("file", required=False, metavar="[MODEL]")
@option("-m", "--model", metavar="FILE", help="The GGUF file, as in the other verbs.")
@json_option
def inspect(file: str | None, model: str | None, as_json: bool) -> None:
    """Show a GGUF's metadata, tensors and recipe.

    The recipe is how the file would run here, or why it would not. Long arrays and texts are abbreviated;
    --json has them whole.
    """
    path = file or model
    if path is None:
        raise click.UsageError("Missing the GGUF file: name it, or use -m.")
    from pykvgraph import GgufFile

    recipe: ModelInfo | None = None
    reason: str | None = None
    with GgufFile(path) as gguf:
        metadata, tensors, parts = gguf.metadata, gguf.tensors, gguf.parts
        try:
            recipe = gguf.model_info()
        except (UnsupportedError, ModelLoadError) as error:
            reason = str(error)
    size = sum(size for _, size in parts)
    if as_json:
        print_json(
            {
                "file": path,
                "size": size,
                "recipe": dataclasses.asdict(recipe) if recipe else None,
                "reason": reason,
                "metadata": metadata,
                "tensors": [dataclasses.asdict(tensor) for tensor in tensors],
            }
        )
        return
    click.echo(f"{printable(path)}: {size_text(size)}, {len(metadata)} keys, {len(tensors)} tensors")
    click.echo(f"runs as {_recipe_text(recipe)}" if recipe else f"does not run: {printable(reason or '')}")
    click.echo()
    _print_metadata(metadata)
    click.echo()
    _print_tensors(tensors)


def _recipe_text(recipe: ModelInfo) -> str:
    return (
        f"{recipe.arch}: {recipe.n_layer} layers of {recipe.n_embd},"
        f" {recipe.n_head} heads on {recipe.n_head_kv} KV heads of {recipe.head_dim},\n"
        f"  vocabulary {recipe.n_vocab}, trained context {recipe.n_ctx_train},"
        f" {recipe.n_params:,} parameters in {size_text(recipe.weight_bytes)}"
    )


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
