"""What a schema says of a text that stands in a call as it is, without quotes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.reply.alternatives import SILENT, alternatives
from pykvgraph.sampling.guide_text import DATE, literal, regex

_UNQUOTED = '/[^"](?s:.*)|/'  # in Lark: a text in quotes would be measured with its quotes
_OF_TEXTS = {"type", "enum", "const", "pattern", "format", "minLength", "maxLength", "nullable"} | SILENT
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
    for each in alternatives(schema, definitions):
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
        for each in alternatives(schema, definitions)
    )


def _given(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists."""
    given = [schema["const"]] if "const" in schema else schema.get("enum")
    return given if isinstance(given, list) else None


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
