"""`pykvgraph info`: what runs here, and on what."""

from __future__ import annotations

import dataclasses
from importlib import metadata

import click

from pykvgraph.cli.show import new_table, print_json, print_table, safe_cell, size_text
from pykvgraph.cli.verb import Verb, examples, json_option


@click.command(cls=Verb, epilog=examples("pykvgraph info", "pykvgraph info --json"))
@json_option
def info(as_json: bool) -> None:
    """Show versions, library paths and devices."""
    import pykvgraph

    library = pykvgraph.library_info()
    devices = pykvgraph.devices()
    llama_cpp_version = metadata.version("llama-cpp-python")
    if as_json:
        print_json(
            {
                "pykvgraph": library.version,
                "ggml": {"running": library.ggml_version_running, "built": library.ggml_version_built},
                "llama_cpp_python": llama_cpp_version,
                "libraries": [str(path) for path in (library.path, *library.ggml_paths)],
                "devices": [dataclasses.asdict(device) for device in devices],
            }
        )
        return
    ggml_version = f"{library.ggml_version_running}, built against {library.ggml_version_built}"
    for name, version in (
        ("pykvgraph", library.version),
        ("ggml", ggml_version),
        ("llama-cpp-python", llama_cpp_version),
    ):
        click.echo(f"{name:<17} {version}")
    click.echo("\nlibraries")
    for path in (library.path, *library.ggml_paths):
        click.echo(f"  {path}")  # whole, so that it can be copied
    click.echo()
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
