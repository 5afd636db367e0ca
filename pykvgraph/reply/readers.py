"""Readers of calls: what stands between a call's marks, as names and arguments.

A model may say anything: each pattern takes time that grows with the text, not with its square. So two parts
that can match the same characters never follow one another.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pykvgraph.reply.raw_texts import is_text

Tools = Mapping[str, Mapping[str, Any]]  # the JSON schema of each tool's arguments, by its name


class Call(NamedTuple):
    """id: the model's own; "" when it gave none."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


# None: this is no call
Reader = Callable[[str, Tools], "list[Call] | None"]

_SPACE = re.compile(r"[\s,;]*")
_FENCE = re.compile(r"[\s`]*")


def json_calls(*, prefix: str = r"(?:```(?:json)?)?\s*", known: bool = False) -> Reader:
    """JSON objects, or lists of them, with a name and arguments. known: the name must be that of a tool."""
    start = re.compile(prefix)

    def read(text: str, tools: Tools) -> list[Call] | None:
        text = text.strip()
        begin = start.match(text)
        found = None if begin is None else _objects(text[begin.end() :])
        calls = [_call_of(each) for each in found or ()]
        if not calls or any(call is None or (known and call.name not in tools) for call in calls):
            return None
        return [call for call in calls if call is not None]

    return read


def json_pairs(text: str, tools: Tools) -> list[Call] | None:
    """A list of JSON objects {name: arguments}."""
    calls = []
    for each in _objects(text) or ():
        for name, arguments in each.items():
            if not isinstance(arguments, dict):
                return None
            calls.append(Call(name, arguments))
    return calls or None


def named_json(pattern: str) -> Reader:
    """A name, and perhaps an id, by the pattern's groups; the arguments as JSON behind what it matches."""
    head = re.compile(pattern, re.DOTALL)

    def read(text: str, tools: Tools) -> list[Call] | None:
        text = text.strip()
        begin = head.match(text)
        if begin is None:
            return None
        rest = text[begin.end() :].strip()
        arguments, end = _decoded(rest, 0) if rest else ({}, 0)
        if not isinstance(arguments, dict) or _FENCE.fullmatch(rest, end) is None:
            return None
        groups = begin.groupdict()
        return [Call(groups["name"].strip(), arguments, groups.get("id") or "")]

    return read


def tagged(head: str, parameter: str) -> Reader:
    """A name by the first pattern, then parameters by the second one's groups key, value and string.

    A value is text where the tool's schema, or the group `string`, says so; else JSON if it is any.
    """
    begins, each = re.compile(rf"{head}\s*", re.DOTALL), re.compile(rf"{parameter}\s*", re.DOTALL)

    def read(text: str, tools: Tools) -> list[Call] | None:
        text = text.strip()
        found = begins.match(text)
        if found is None:
            return None
        name, at = found["name"].strip(), found.end()
        arguments = {}
        while (one := each.match(text, at)) is not None:
            is_text = one.groupdict().get("string") in ("true", "string")
            value = _uncovered(one["value"])
            key = one["key"].strip()
            arguments[key] = value if is_text else _typed(value, tools.get(name), key)
            at = one.end()
        return [Call(name, arguments)] if at == len(text) else None

    return read


def python_calls(text: str, tools: Tools) -> list[Call] | None:
    """Calls as Python writes them, with constants as keyword arguments: [name(key='value'), ...]."""
    for source in (text.strip(), text.strip().replace("\n", "\\n")):  # lines between quotes
        try:
            tree = ast.parse(source, mode="eval").body
            calls = tree.elts if isinstance(tree, ast.List) else [tree]
            return [_python_call(call) for call in calls] or None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return None


def _python_call(call: ast.expr) -> Call:
    if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
        raise ValueError("no call with keyword arguments")
    arguments = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
    return Call(ast.unparse(call.func), arguments)


def bare_keys(quote: str) -> Reader:
    """call:name{key:value, ...}: JSON whose keys have no quotes, and texts stand between two `quote`."""
    head = re.compile(r"call:(?P<name>[^{\s]+)\s*")
    key = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:")

    def read(text: str, tools: Tools) -> list[Call] | None:
        text = text.strip()
        begin = head.match(text)
        if begin is None:
            return None
        parts = text[begin.end() :].split(quote)
        parts[::2] = [key.sub(r'\1"\2":', part) for part in parts[::2]]
        parts[1::2] = [json.dumps(part) for part in parts[1::2]]
        objects = _objects("".join(parts))
        if not objects or len(objects) > 1:
            return None
        return [Call(begin["name"], objects[0])]

    return read


def first_of(*readers: Reader) -> Reader:
    """The first reader that finds a call."""

    def read(text: str, tools: Tools) -> list[Call] | None:
        return next((found for reader in readers if (found := reader(text, tools)) is not None), None)

    return read


def json_text(value: Any) -> str:
    """As JSON. Raises ValueError for what has none."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _objects(text: str) -> list[dict[str, Any]] | None:
    """All that stands in the text, objects and lists of objects one after the other; None: something else."""
    found: list[Any] = []
    at = _after_space(text, 0)
    while at < len(text):
        if _FENCE.fullmatch(text, at):
            break
        value, at = _decoded(text, at)
        found += value if isinstance(value, list) else [value]
        at = _after_space(text, at)
    return found if all(isinstance(each, dict) for each in found) else None


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None  # it may be empty
    return match.end()


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """A JSON value, and where it ends; None and the end of the text when there is none."""
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, len(text)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)


def _call_of(value: Mapping[str, Any]) -> Call | None:
    name = _first_of(value, "name", "tool_name")
    arguments = _first_of(value, "arguments", "parameters")
    if isinstance(arguments, str):
        arguments, _ = _decoded(arguments, 0)
    if not isinstance(name, str) or not isinstance({} if arguments is None else arguments, dict):
        return None
    id = value.get("id")
    return Call(name, arguments or {}, id if isinstance(id, str) else "")


def _first_of(value: Mapping[str, Any], *keys: str) -> Any:
    return next((value[key] for key in keys if key in value), None)


def _uncovered(value: str) -> str:
    """Without CDATA around it."""
    return value[9:-3] if value.startswith("<![CDATA[") and value.endswith("]]>") else value


_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def _typed(text: str, schema: Mapping[str, Any] | None, key: str) -> Any:
    """The text as a value of the types that the schema allows."""
    if is_text(_property(schema, key), schema or {}):
        return text
    allowed = set(_types_of(schema, key))
    value, end = _decoded(text.strip(), 0)
    if end != len(text.strip()) or (value is None and text.strip() != "null"):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)
    kind = _TYPES.get(type(value), "null")
    kinds = {kind, "number"} if kind == "integer" else {kind}
    return text if "string" in allowed and not kinds & allowed else value


def _property(schema: Mapping[str, Any] | None, key: str) -> Any:
    properties = (schema or {}).get("properties")
    return properties.get(key) if isinstance(properties, dict) else None


def _types_of(schema: Mapping[str, Any] | None, key: str) -> Iterator[str]:
    """The schema is a client's, and may be anything."""
    for each in _alternatives(_property(schema, key)):
        types = each.get("type")
        yield from (kind for kind in [types, *_list(types)] if isinstance(kind, str))
        if types is None:
            yield from (_TYPES.get(type(value), "null") for value in _list(each.get("enum")))


def _alternatives(schema: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for key in ("anyOf", "oneOf"):
            yield from (each for each in _list(schema.get(key)) if isinstance(each, dict))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
