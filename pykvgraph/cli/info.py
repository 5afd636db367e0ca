"""`pykvgraph info`: what runs here, and on what."""

from __future__ import annotations

import dataclasses
from importlib import metadata
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pykvgraph.checks import size_text
from pykvgraph.cli.show import new_table, print_json, print_table, printable, safe_cell
from pykvgraph.cli.verb import (
    Verb,
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
from pykvgraph.params.cache_type import CACHE_TYPES
from pykvgraph.params.params import ContextParams

if TYPE_CHECKING:
    from pykvgraph.model.device_types import Abilities, DeviceInfo, DevicePart, LibraryInfo

ATTENTION = {"flash": "flash", "plain": "plain", "attend": "our kernel", "": "-"}


@click.command(
    cls=Verb,
    epilog=examples(
        "pykvgraph info",
        "pykvgraph info -m model.gguf -c 32768 -ngl 20    # and what it would take",
        "pykvgraph info --json",
    ),
)
@model_option("A GGUF file to ask the devices about, in place of the embedded model; also shows its memory.")
@option(
    "-c",
    "--ctx-size",
    "n_ctx",
    type=click.IntRange(min=1),
    metavar="N",
    default=ContextParams.n_ctx,
    help="Cells.",
)
@ubatch_option
@cache_type_options
@swa_option
@threads_option()
@where_options
@json_option
def info(model: str | None, where: Where, as_json: bool, **sizes: Any) -> None:
    """Show versions, library paths, devices, and what these can do.

    Each device is asked whether it runs the operations of decode, K-shift and defrag of a model: with -m of
    that one, else of the embedded one, whose heads of 32 are the CPU's to shift in quantized types. What a
    device lacks in a decode the CPU does. An RPC server's can't be asked. With -m, the memory that the model
    and a context of these sizes would take.
    """
    import pykvgraph
    from pykvgraph.models import embedded_model

    if model is None:
        refuse_sizes(click.get_current_context())
    where.connect()
    library = pykvgraph.library_info()
    devices = pykvgraph.devices()
    asked = {
        device.name: [
            pykvgraph.abilities(model or embedded_model(), device.name, cache_type)
            for cache_type in CACHE_TYPES
        ]
        for device in devices
        if device.type != "accel"
    }
    memory = pykvgraph.plan_memory(model, **where.model(), **where.context(), **sizes) if model else None
    if as_json:
        print_json(summary(library, devices, asked, memory))
        return
    show_library(library)
    show_devices(devices)
    show_abilities(asked)
    if memory:
        show_memory(memory, devices)


def refuse_sizes(ctx: click.Context) -> None:
    """A usage error for whoever typed what only a model's memory depends on."""
    for param in ctx.command.params:
        typed = ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
        if typed and param.name not in ("rpc", "as_json"):
            raise click.UsageError(f"{param.opts[0]} is about a model's memory: give -m too")


def summary(
    library: LibraryInfo,
    devices: tuple[DeviceInfo, ...],
    asked: dict[str, list[Abilities]],
    memory: tuple[DevicePart, ...] | None,
) -> dict[str, Any]:
    return {
        "pykvgraph": library.version,
        "ggml": {"running": library.ggml_version_running, "built": library.ggml_version_built},
        "llama_cpp_python": metadata.version("llama-cpp-python"),
        "libraries": [str(path) for path in (library.path, *library.ggml_paths)],
        "devices": [
            {
                **dataclasses.asdict(device),
                "abilities": [dataclasses.asdict(one) for one in asked.get(device.name, ())],
            }
            for device in devices
        ],
        "memory": memory and [dataclasses.asdict(part) for part in memory],
    }


def show_library(library: LibraryInfo) -> None:
    ggml_version = f"{library.ggml_version_running}, built against {library.ggml_version_built}"
    for name, version in (
        ("pykvgraph", library.version),
        ("ggml", ggml_version),
        ("llama-cpp-python", metadata.version("llama-cpp-python")),
    ):
        click.echo(f"{name:<17} {version}")
    click.echo("\nlibraries")
    for path in (library.path, *library.ggml_paths):
        click.echo(f"  {path}")  # whole, so that it can be copied
    click.echo()


def show_devices(devices: tuple[DeviceInfo, ...]) -> None:
    table = new_table("device", "type", "free", "total", "description")
    for device in devices:
        table.add_row(
            safe_cell(device.name),
            device.type,
            size_text(device.memory_free),
            size_text(device.memory_total),
            safe_cell(device.description),
        )
    print_table(table)


def show_abilities(asked: dict[str, list[Abilities]]) -> None:
    """A row per device, several where cache types differ; below it why what was refused."""
    table = new_table("runs on", "attention", "K-shift", "defrag", "left to the CPU", "cache")
    reasons: list[str] = []
    for device, answers in asked.items():
        groups: dict[Abilities, list[Abilities]] = {}
        for answer in answers:
            refused = "refused" if answer.refused else ""  # whose texts name the type
            kind = dataclasses.replace(answer, cache_type="", refused=refused)
            groups.setdefault(kind, []).append(answer)
        for alike in groups.values():
            cache_types = " ".join(one.cache_type for one in alike)
            if alike[0].refused:
                if alike[0].refused not in reasons:
                    reasons.append(alike[0].refused)
                cells = (f"refused ({reasons.index(alike[0].refused) + 1})", "-", "-", "-")
            else:
                cells = ability_cells(device, alike[0])
            table.add_row(safe_cell(device), *cells, cache_types)
    click.echo()
    print_table(table)
    for number, reason in enumerate(reasons, 1):
        click.echo(f"({number}) {printable(reason)}")


def ability_cells(device: str, answer: Abilities) -> tuple[str, str, str, str]:
    """Attention, K-shift, defrag, and what is left to the CPU."""
    falls_back = ", ".join(answer.fallbacks)
    return (
        ATTENTION[answer.attention],
        "yes" if answer.shift_on_device else "by the CPU",
        "yes" if answer.can_defrag else "-",
        falls_back or ("can't be asked" if device.startswith("RPC") else "-"),
    )


def show_memory(memory: tuple[DevicePart, ...], devices: tuple[DeviceInfo, ...]) -> None:
    free = {device.name: device.memory_free for device in devices}
    table = new_table("takes on", "layers", "weights", "cache", "graphs", "in all", "free")
    for part in memory:
        total = part.weight_bytes + part.cache_bytes + part.compute_bytes
        amounts = (part.weight_bytes, part.cache_bytes, part.compute_bytes, total, free.get(part.device, 0))
        table.add_row(safe_cell(part.device), str(part.n_layer), *map(size_text, amounts))
    click.echo()
    print_table(table)
