"""What a schema says of a text that stands in a call as it is, without quotes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.sampling.guide_text import DATE, literal, regex

_MOST_FOLLOWED = 100  # references
_UNQUOTED = '/[^"](?s:.*)|/'  # in Lark: a text in quotes would be measured with its quotes
_SILENT = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"}
_CHOICES = ("anyOf", "oneOf", "allOf")
_OF_TEXTS = {"type", "enum", "const", "pattern", "format", "minLength", "maxLength", "nullable"} | _SILENT
# as RFC 3339, 4122 and 2673 write them
_FORMATS = {
    "date": DATE,
    "time": r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": r"((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)",
}
_FORMATS["email"] = r'[^@\s"<>]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}'
_FORMATS["uri"] = r'[a-z][a-z0-9+.-]*:[^\s"<>]+'
_FORMATS["date-time"] = f"{_FORMATS['date']}T{_FORMATS['time']}"


class RawText(NamedTuple):
    """literals: it is one of these. regex: it is like this, in Lark. Neither: any text."""

    literals: tuple[str, ...] = ()
    regex: str = ""


def raw_text(schema: Any, definitions: Mapping[str, Any]) -> RawText | None:
    """None: not all that follows the schema is text.

    definitions: the schema that references begin in. Raises InvalidArgumentError for
    what a text between marks can't obey.
    """
    if not is_text(schema, definitions):
        return None
    literals: list[str] = []
    patterns: list[str] = []
    for each in _alternatives(schema, definitions, [_MOST_FOLLOWED]):
        if unknown := each.keys() - _OF_TEXTS:
            raise InvalidArgumentError(f"the schema of a text can't be obeyed: {sorted(unknown)[0]}")
        if (given := _given(each)) is not None:
            literals += given
        else:
            patterns.append(_regex(each))
    if literals and not patterns:
        return RawText(literals=tuple(literals))
    if "" in patterns:
        return RawText()
    return RawText(regex=" | ".join([*map(literal, literals), *patterns]))


def is_text(schema: Any, definitions: Mapping[str, Any]) -> bool:
    """Whether nothing but texts follows the schema."""
    return all(
        all(isinstance(text, str) for text in given) and bool(given)
        if (given := _given(each)) is not None
        else each.get("type") in ("string", ["string"]) and not each.get("nullable")
        for each in _alternatives(schema, definitions, [_MOST_FOLLOWED])
    )


def _given(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists."""
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    return given if isinstance(given, list) else None


def _alternatives(
    schema: Any, definitions: Mapping[str, Any], left: list[int]
) -> Iterator[Mapping[str, Any]]:
    """Schemas of which one is followed, without choices and references; {} for one that isn't understood."""
    left[0] -= 1
    if not isinstance(schema, dict) or left[0] < 0:
        yield {}
        return
    rest = {
        key: value for key, value in schema.items() if key not in ("$ref", "$defs", "definitions", *_CHOICES)
    }
    inner = [schema[key] for key in _CHOICES if isinstance(schema.get(key), list)]
    if "$ref" in schema:
        inner.append([_resolved(schema["$ref"], definitions)])
    if not inner:
        yield rest
    elif len(inner) > 1 or (isinstance(schema.get("allOf"), list) and len(schema["allOf"]) != 1):
        yield {}
    else:
        for choice in inner[0]:
            for each in _alternatives(choice, definitions, left):
                differs = any(key in each and each[key] != rest[key] for key in rest.keys() - _SILENT)
                yield {} if differs else {**rest, **each}


def _resolved(reference: Any, definitions: Mapping[str, Any]) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = definitions
    for part in reference[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _regex(schema: Mapping[str, Any]) -> str:
    """In Lark; "" for any text. Raises InvalidArgumentError."""
    parts = []
    if isinstance(pattern := schema.get("pattern"), str):
        front = "" if pattern.startswith("^") else "(?s:.*)"
        back = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        parts.append(
            regex(f"{front}({pattern.removeprefix('^').removesuffix('$' if not back else '')}){back}")
        )
    if (form := schema.get("format")) is not None:
        if not isinstance(form, str) or form not in _FORMATS:
            raise InvalidArgumentError(f"the schema of a text can't be obeyed: format {shown(form)}")
        parts.append(regex(_FORMATS[form]))
    least, most = _length(schema, "minLength"), _length(schema, "maxLength")
    if least or most is not None:
        parts.append(f"/(?s:.{{{least or 0},{'' if most is None else most}}})/")
    if parts and not isinstance(pattern, str):
        parts.append(_UNQUOTED)
    return " & ".join(parts)


def _length(schema: Mapping[str, Any], name: str) -> int | None:
    value = schema.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1 or value < 0:
        raise InvalidArgumentError(f"{name} must be a number of characters, got {shown(value)}")
    return int(value)
