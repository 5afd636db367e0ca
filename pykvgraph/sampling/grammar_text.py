"""The text of a grammar, in GBNF, as libllama may see it: neither too deep for it, nor too long."""

from __future__ import annotations

import re

from pykvgraph.errors import InvalidArgumentError

_DEEPEST = 200  # groups within groups of a grammar: libllama calls itself for each
_MOST_RULES = 4000  # and for each rule that begins with another one
# a grammar's literals, classes, tokens and comments, in which signs mean themselves; or what begins as one
_QUOTED = re.compile(r'"(?:\\.|[^"])*(?:"|\Z)|\[(?:\\.|[^]])*(?:\]|\Z)|<[^>]*|#[^\r\n]*', re.DOTALL)
_REPEATS = re.compile(r"\{\s*([0-9]+)\s*,\s*([0-9]+)\s*\}")


def refuse_dangerous(text: str) -> None:
    """Raises InvalidArgumentError for a grammar that libllama can't read without harm."""
    _refuse_deep(text)
    _refuse_reversed(text)


def _refuse_deep(text: str) -> None:
    """libllama reads groups and rules by recursion, and ends the process when the stack ends."""
    if text.count("::=") > _MOST_RULES:
        raise InvalidArgumentError(f"the grammar has over {_MOST_RULES} rules: make it smaller")
    depth = deepest = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
        depth = max(depth, 0)
    if deepest > _DEEPEST:
        raise InvalidArgumentError(f"the grammar has groups within groups, over {_DEEPEST} deep")


def _refuse_reversed(text: str) -> None:
    """libllama subtracts the numbers of "a"{5,2} without looking, and fills the memory."""
    for pair in _REPEATS.findall(_QUOTED.sub(" ", text)):
        least, most = (number.lstrip("0") for number in pair)
        if (len(most), most) < (len(least), least):
            raise InvalidArgumentError(
                f"the grammar repeats something at least {least[:20]} times and at most {most[:20] or 0}: "
                "no text is like that"
            )
