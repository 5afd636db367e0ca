"""The options of llama-server: of its --help, and of tests/data/llama-server-options.txt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).parents[1] / "data" / "llama-server-options.txt"

_OPTION = re.compile(r"(-[^\s,-][^\s,]*|--\w[^\s,]*)(?:,\s+(?=-)|(?= )|$)")
_VARIABLE = re.compile(r"\(env: (\w+)\)")


class Listed(NamedTuple):
    """names: all spellings. value: what stands behind; "": nothing. variable: of the environment, or ""."""

    names: tuple[str, ...]
    value: str
    variable: str

    def __str__(self) -> str:
        return " ".join(filter(None, (*self.names, self.value, self.variable and "$" + self.variable)))


def listed_by_help(text: str) -> list[Listed]:
    """What `llama-server --help` prints: names, a value behind them, and a text from column 40 on."""
    found: list[Listed] = []
    for line in text.splitlines():
        names, at = [], 0
        while match := _OPTION.match(line, at):
            names.append(match[1])
            at = match.end()
        if names:
            value = re.split(r"\s{2,}", line[at:].strip())[0] if line[at : at + 2] != "  " else ""
            found.append(Listed(tuple(names), value, ""))
        if found and (variable := _VARIABLE.search(line)):
            found[-1] = found[-1]._replace(variable=variable[1])
    return found


def listed_by_file() -> list[Listed]:
    """The lines of the file: names, <value> and $VARIABLE; # begins a comment."""
    found = []
    for line in LIST.read_text(encoding="utf-8").splitlines():
        words = line.split("#")[0].split()
        if words:
            names = tuple(word for word in words if word.startswith("-"))
            variable = next((word[1:] for word in words if word.startswith("$")), "")
            value = " ".join(word for word in words if word[0] not in "-$")
            found.append(Listed(names, value, variable))
    return found
