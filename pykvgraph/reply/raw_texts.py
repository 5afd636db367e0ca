"""What a schema says of a text that stands in a call as it is, without quotes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pykvgraph.sampling.guide_text import regex

_MOST_FOLLOWED = 100  # references
_UNQUOTED = '/[^"](?s:.*)|/'  # in Lark: a model that quotes a short text would find its quotes counted
# as RFC 3339, 4122 and 2673 write them
_FORMATS = {
    "date": r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    "time": r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": r"((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)",
}
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"


class RawText(NamedTuple):
    """literals: it is one of these. regex: it is like this, in Lark. Neither: any text."""

    literals: tuple[str, ...] = ()
    regex: str = ""


def raw_text(schema: Any, definitions: Mapping[str, Any]) -> RawText | None:
    """None: not all that follows the schema is text.

    definitions: what references lead to, under "$defs" and "definitions". Raises InvalidArgumentError for a
    pattern that can't be followed.
    """
    literals: list[str] = []
    patterns: list[str] = []
    for each in _ways(schema, definitions, [_MOST_FOLLOWED]):
        given = [each["const"]] if "const" in each else each.get("enum")
        if isinstance(given, list) and given and all(isinstance(text, str) for text in given):
            literals += given
        elif given is None and each.get("type") in ("string", ["string"]):
            patterns.append(_regex(each))
        else:
            return None
    if literals and not patterns:
        return RawText(literals=tuple(literals))
    if not patterns or "" in patterns:
        return RawText() if patterns else None
    return RawText(regex=" | ".join([*(regex(re.escape(text)) for text in literals), *patterns]))


def _ways(schema: Any, definitions: Mapping[str, Any], left: list[int]) -> Iterator[Mapping[str, Any]]:
    """Schemas of which one is followed; {} for one that isn't understood."""
    left[0] -= 1
    if not isinstance(schema, dict) or left[0] < 0:
        yield {}
        return
    given = next(
        (schema[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list)), None
    )
    if "$ref" in schema:
        yield from _ways(_found(schema["$ref"], definitions), definitions, left)
    elif given is not None and ("allOf" not in schema or len(given) == 1):
        for each in given:
            yield from _ways(each, definitions, left)
    else:
        yield schema if given is None else {}


def _found(reference: Any, definitions: Mapping[str, Any]) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = definitions
    for part in reference[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _regex(schema: Mapping[str, Any]) -> str:
    """In Lark; "" for any text."""
    parts = []
    if isinstance(pattern := schema.get("pattern"), str):
        front = "" if pattern.startswith("^") else "(?s:.*)"
        back = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        parts.append(
            regex(f"{front}({pattern.removeprefix('^').removesuffix('$' if not back else '')}){back}")
        )
    if schema.get("format") in _FORMATS:
        parts.append(regex(_FORMATS[schema["format"]]))
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        parts.append(f"/(?s:.{{{least},{most}}})/")
    if parts and not isinstance(pattern, str):
        parts.append(_UNQUOTED)
    return " & ".join(parts)
