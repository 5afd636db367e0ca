"""`pykvgraph cache`: the files of prefixes that servers and engines keep in a directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pykvgraph.checks import size_text
from pykvgraph.cli.show import new_table, print_json, print_table, printable
from pykvgraph.cli.verb import Verb, examples, json_option, option
from pykvgraph.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pykvgraph.tiers.survey import SurveyedFile

_SHOWN = 20  # of a directory's files
_SPANS = ((86_400, "d"), (3_600, "h"), (60, "min"), (0, "s"))


@click.command(
    cls=Verb,
    epilog=examples(
        "pykvgraph cache ls --cache-dir prefixes",
        "pykvgraph cache verify",
        "pykvgraph cache prune --cache-disk 1024",
    ),
)
@click.argument("what", type=click.Choice(["ls", "verify", "prune"]), default="ls")
@option(
    "--cache-dir",
    type=click.Path(file_okay=False),
    metavar="FOLDER",
    show_default="pykvgraph/prefixes in the cache directory",
    help="The directory, as serve's.",
)
@option(
    "--cache-disk",
    type=click.IntRange(min=0),
    metavar="MiB",
    show_default="as much as there is",
    help="With prune: what was used longest ago goes until so much is left.",
)
@json_option
def cache(what: str, cache_dir: str | None, cache_disk: int | None, as_json: bool) -> None:
    """Show, check or make smaller a directory of prefixes.

    ls shows what was used last. verify reads every file, and names those that are damaged; the exit code is 1
    if there are any. prune removes these, and what a server that was killed left behind. Servers may run
    meanwhile: what has gone is decoded.
    """
    from pykvgraph import env
    from pykvgraph.tiers.survey import survey

    folder = Path(cache_dir) if cache_dir else env.cache_folder() / "prefixes"
    if not folder.is_dir():
        raise InvalidArgumentError(f"{folder}: no directory; --cache-dir names one that serve wrote to")
    before = list(survey(folder, verify=what != "ls"))
    left = _prune(folder, before, cache_disk) if what == "prune" else before
    if as_json:
        print_json(_described(folder, before, left))
    else:
        _show(folder, what, before, left)
    if what == "verify" and any(each.fault for each in before):
        raise click.exceptions.Exit(1)


def _prune(folder: Path, files: list[SurveyedFile], mib: int | None) -> list[SurveyedFile]:
    """Removes what is damaged, and what there is too much of; the rest."""
    from pykvgraph.tiers.disk import LOCK, DiskTier
    from pykvgraph.tiers.options import NO_LIMIT
    from pykvgraph.tiers.survey import survey

    if not files and not (folder / LOCK).exists():
        return []  # somebody else's directory: not even a lock is made there
    disk = DiskTier(folder, NO_LIMIT)
    for each in files:
        if each.fault:
            disk.remove(each.key)
    if mib is not None:
        DiskTier(folder, mib << 20)
    return list(survey(folder))


def _described(folder: Path, before: list[SurveyedFile], left: list[SurveyedFile]) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "n_bytes": _n_bytes(left),
        "n_removed": len(before) - len(left),
        "files": [{**each._asdict(), "used": each.used / 1e9} for each in left],
    }


def _show(folder: Path, what: str, before: list[SurveyedFile], left: list[SurveyedFile]) -> None:
    n_tokens = sum(each.n_tokens for each in left)
    click.echo(f"{printable(str(folder))}: {len(left)} files, {size_text(_n_bytes(left))}, {n_tokens} tokens")
    if what == "prune":
        click.echo(
            f"removed: {len(before) - len(left)} files, {size_text(_n_bytes(before) - _n_bytes(left))}"
        )
    shown = left[:_SHOWN] if what == "ls" else [each for each in left if each.fault]
    if what == "verify":
        click.echo(f"damaged: {len(shown)} files")
    if not shown:
        return
    table = new_table("used", "tokens", "size", "fault", "file")
    for each in shown:
        age, size = _age_text(time.time() - each.used / 1e9), size_text(each.n_bytes)
        table.add_row(age, str(each.n_tokens), size, each.fault or "", _short(each.name))
    print_table(table)
    if what == "ls" and len(left) > _SHOWN:
        click.echo(f"and {len(left) - _SHOWN} more; --json has them all")


def _n_bytes(files: list[SurveyedFile]) -> int:
    return sum(each.n_bytes for each in files)


def _short(name: str) -> str:
    return f"{name[:16]}…{name[64:]}"


def _age_text(seconds: float) -> str:
    """For people: `3 h ago`."""
    for length, unit in _SPANS:
        if seconds >= length:
            return f"{int(seconds // max(length, 1))} {unit} ago"
    return "now"
