"""A model that isn't here yet: the path to which `-hf` or `-mu` is downloaded."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn


def downloaded(source: str, from_hub: bool, *, offline: bool = False) -> str:
    """The path. Progress goes to stderr when that is a terminal.

    offline: of an address, what is in the cache; huggingface_hub has a variable for that.
    """
    if from_hub:
        from pykvgraph.download.hub import download_model

        return download_model(source)  # with bars of huggingface_hub's own
    from pykvgraph.download import web_file

    if offline:
        return web_file.cached(source)
    if not sys.stderr.isatty():
        return web_file.download(source)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def show(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=None)
            bars.update(tasks[name], completed=done, total=total)

        return web_file.download(source, show)
