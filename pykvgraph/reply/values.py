"""Values of a call's arguments: out of the text that a model wrote, and as JSON."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pykvgraph.reply.alternatives import alternatives
from pykvgraph.reply.raw_texts import is_text

Tools = Mapping[str, Mapping[str, Any]]  # the JSON schema of each tool's arguments, by its name

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
_AS_PYTHON = {"True": True, "False": False, "None": None}
_NAMES = {**_AS_PYTHON, "true": True, "false": False, "null": None}


def property_of(schema: Mapping[str, Any] | None, key: str) -> Any:
    """The schema of one argument; None: the tool has none."""
    properties = (schema or {}).get("properties")
    return properties.get(key) if isinstance(properties, dict) else None


def typed(text: str, schema: Any, definitions: Mapping[str, Any]) -> Any:
    """The text as a value of the types that the schema allows: written as JSON does it, or as Python.

    definitions: the schema that references begin in.
    """
    if is_text(schema, definitions):
        return text
    allowed = _types_of(schema, definitions)
    try:
        value = _value(text.strip())
        json_text(value)
    except (ValueError, RecursionError, TypeError):
        return text
    kind = _TYPES.get(type(value), "null")
    kinds = {kind, "number"} if kind == "integer" else {kind}
    return text if allowed and "string" in allowed and not kinds & allowed else value


def may_be(kind: str, schema: Any, definitions: Mapping[str, Any]) -> bool:
    """Whether the schema names this type."""
    return kind in (_types_of(schema, definitions) or ())


def json_text(value: Any) -> str:
    """As JSON that UTF-8 can have. Raises ValueError for what has none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character
        return json.dumps(value, allow_nan=False)
    return text


def decoded(text: str, at: int) -> tuple[Any, int]:
    """A JSON value, and where it ends; None and the end of the text when there is none."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, len(text)


def python_value(node: ast.expr) -> Any:
    """A constant, as Python or JSON writes it. Raises ValueError for anything else."""
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, (ast.List, ast.Tuple)):
        return [python_value(each) for each in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {
            python_value(key): python_value(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    return ast.literal_eval(node)


def _value(text: str) -> Any:
    """Raises ValueError."""
    if text in _AS_PYTHON:
        return _AS_PYTHON[text]
    try:
        return _DECODER.decode(text)
    except ValueError:
        if text[:1] not in ("[", "{", "("):
            raise
    try:
        return python_value(ast.parse(text, mode="eval").body)
    except (SyntaxError, MemoryError) as error:
        raise ValueError("this is neither JSON nor Python") from error


def _types_of(schema: Any, definitions: Mapping[str, Any]) -> set[str] | None:
    """None: any."""
    found: set[str] = set()
    for each in alternatives(schema, definitions):
        types = set(_of_one(each))
        if not types:
            return None
        found |= types
    return found


def _of_one(schema: Mapping[str, Any]) -> Iterator[str]:
    types = schema.get("type")
    yield from (kind for kind in [types, *_list(types)] if isinstance(kind, str))
    given = [schema["const"]] if "const" in schema else _list(schema.get("enum"))
    if types is None:
        yield from (_TYPES.get(type(value), "null") for value in given)
    if schema.get("nullable") is True:
        yield "null"


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)
