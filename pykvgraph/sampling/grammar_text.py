"""The text of a grammar, in GBNF, as libllama may see it: neither too deep for it, nor too long."""

from __future__ import annotations

import json
import re

from pykvgraph._native import libllama
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.params.params import SamplingParams
from pykvgraph.sampling.schema_limits import check_schema

_DEEPEST = 200  # groups within groups of a grammar: libllama calls itself for each
_MOST_RULES = 4000  # and for each rule that begins with another one
# a grammar's literals, classes, tokens and comments, in which signs mean themselves; or what begins as one
_QUOTED = re.compile(r'"(?:\\.|[^"])*(?:"|\Z)|\[(?:\\.|[^]])*(?:\]|\Z)|<[^>]*|#[^\r\n]*', re.DOTALL)
_LONGEST_OF_SCHEMA = 1 << 22  # characters of a grammar: libllama takes a second to read these
_NESTED = re.compile(r"\(([^()]+?)((?: \(\1)*)((?:\)\?)+)")  # (X (X (X)?)?)?
_REPEATS = re.compile(r"\{\s*([0-9]+)\s*,\s*([0-9]+)\s*\}")


def grammar_text(chosen: SamplingParams) -> str:
    """The grammar, in GBNF; its own, or that of the schema. Raises InvalidArgumentError."""
    text = chosen.grammar
    if text is None:
        assert isinstance(chosen.json_schema, str)
        text = grammar_of_schema(chosen.json_schema)
    _refuse_deep(text)
    _refuse_reversed(text)
    return text


def grammar_of_schema(schema: str) -> str:
    """The grammar of JSON that follows a schema (its JSON text); {} stands for any object."""
    translate = libllama.package("llama_grammar").json_schema_to_gbnf
    value = json.loads(schema)
    check_schema(value, len(schema))
    try:
        grammar: str = translate(json.dumps(value))
    except Exception as error:  # a translator of others: whatever it meets there is the schema's fault
        raise InvalidArgumentError(f"json_schema can't be made a grammar: {error!r}") from error
    grammar = _NESTED.sub(_up_to, grammar)
    if len(grammar) > _LONGEST_OF_SCHEMA:
        raise InvalidArgumentError(
            f"json_schema becomes a grammar of {len(grammar)} characters, over {_LONGEST_OF_SCHEMA}: "
            "make it smaller, or repeat less in it (minItems, minLength, the {n} of patterns)"
        )
    return grammar


def _up_to(nested: re.Match[str]) -> str:
    """(X){0,n} for n groups within each other, which are too deep for a string of some hundred characters.

    Further groups may end where these end.
    """
    item, inner, ends = nested.groups()
    n = 1 + len(inner) // (len(item) + 2)
    return f"({item}){{0,{n}}}{ends[2 * n :]}" if len(ends) >= 2 * n else nested.group()


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
                "no text is like that (a schema with minLength above maxLength becomes such a grammar)"
            )
