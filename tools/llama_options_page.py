"""Writes the tables of docs/coming-from-llama-server.md: python tools/llama_options_page.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pykvgraph.cli.llama_options import LlamaOption, llama_options

PAGE = Path(__file__).parents[1] / "docs" / "coming-from-llama-server.md"
HEADINGS = {"Taken": "taken", "Taken, without an effect": "none", "Refused": "refused"}


def tables(options: Iterable[LlamaOption] = llama_options()) -> dict[str, str]:
    """The table under each heading. Options with one note share a row, where they have no effect."""
    found = {}
    for heading, effect in HEADINGS.items():
        of_note: dict[str, list[LlamaOption]] = {}
        for option in options:
            if option.effect == effect:
                of_note.setdefault(option.note, []).append(option)
        head = ["options", "variables", "what differs" if effect == "taken" else "why"]
        rows = [row for note, several in of_note.items() for row in _rows(several, note, effect)]
        lines = [head, ["---"] * len(head), *rows]
        found[heading] = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return found


def _rows(options: list[LlamaOption], note: str, effect: str) -> Iterator[list[str]]:
    for several in [[option] for option in options] if effect == "taken" else [options]:
        names = "; ".join(", ".join(f"`{name}`" for name in option.names) for option in several)
        variables = ", ".join(f"`{name}`" for option in several for name in option.variables)
        others = "".join(f"; {told}" for told in _idle_in_verbs(several)) if effect == "refused" else ""
        yield [names, variables, note.replace("|", "\\|") + others]


def _idle_in_verbs(options: list[LlamaOption]) -> Iterator[str]:
    """Which of these names another verb takes, without an effect."""
    refused = {name for option in options for name in option.names}
    for verb in ("generate", "chat"):
        idle = [option for option in llama_options(verb) if option.effect == "none"]
        if found := [f"`{name}`" for option in idle for name in option.names if name in refused]:
            yield f"in `{verb}` these have no effect: {', '.join(found)}"


def written(page: str) -> str:
    """The page with these tables; nothing else stands under their headings."""
    front, _, _ = page.partition(f"## {next(iter(HEADINGS))}\n")
    return front + "\n".join(f"## {heading}\n\n{table}" for heading, table in tables().items())


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
