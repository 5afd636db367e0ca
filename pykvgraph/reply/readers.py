"""Readers of calls, format by format: what stands between a call's marks, as names and arguments.

A model may say anything: each pattern takes time that grows with the text, not with its square. So two parts
that can match the same characters never follow one another.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pykvgraph.reply.call_reader import Call, Read, Reader, WholeCalls
from pykvgraph.reply.json_reader import Head, JsonCalls
from pykvgraph.reply.tag_reader import TaggedCall, Tags
from pykvgraph.reply.values import Tools, decoded, python_value

_SPACE = re.compile(r"[\s,;]*")
_FENCE = re.compile(r"[\s`]*")
_OBJECT = (  # of a call, up to its arguments
    r'\{\s*(?:"(?:id"\s*:\s*"(?P<id>[^"\\]*)|tool_call_id"\s*:\s*"[^"\\]*)"\s*,\s*)?'
    r'"(?:tool_)?name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_OF_A_CALL = {"name", "tool_name", "arguments", "parameters", "id", "tool_call_id", "type"}
_BEHIND = r'\s*(?:,\s*"(?:tool_call_)?id"\s*:\s*"[^"\\]*"\s*)?\}[\s,;]*'
# texts, and one that breaks off, which has no end
_IN_JSON = re.compile(r'"(?:[^"\\]|\\.)*(?:(?P<end>")|\\?\Z)', re.DOTALL)
_IN_PYTHON = re.compile(
    r"""(?:'(?:[^'\\]|\\.)*(?:(?P<end>')|\\?\Z))|(?:"(?:[^"\\]|\\.)*(?:(?P<end2>")|\\?\Z))""", re.DOTALL
)
_CONSTANT = re.compile(r"(?<=[:,\[])\s*(True|False|None)(?=\s*[,\]}])")
_JSON_OF = {"True": "true", "False": "false", "None": "null"}


def json_calls(*, prefix: str = r"(?:```(?:json)?\s*)?", known: bool = False) -> Reader:
    """JSON objects, or lists of them, with a name and arguments. known: the name must be that of a tool."""
    head, read = _json_head(prefix), _json_objects(prefix, known)
    return lambda tools: JsonCalls([head], read, tools, known=known)


def named_json(pattern: str) -> Reader:
    """A name, and perhaps an id, by the pattern's groups; the arguments as JSON behind what it matches."""
    head, read = _named_head(pattern), _named(pattern)
    return lambda tools: JsonCalls([head], read, tools, reads_open=False)


def named_or_json_calls(pattern: str) -> Reader:
    """Both; a name alone is no call."""
    heads, read = [_named_head(pattern), _json_head("")], _json_objects("", False)
    return lambda tools: JsonCalls(heads, read, tools)


def tagged(tags: Tags) -> Reader:
    """Arguments between marks."""
    return functools.partial(TaggedCall, tags)


def json_pairs(tools: Tools) -> WholeCalls:
    """A list of JSON objects {name: arguments}."""
    return WholeCalls(_json_pairs, tools, functools.partial(_breaks_off, _IN_JSON))


def python_calls(tools: Tools) -> WholeCalls:
    """Calls as Python writes them, with constants as keyword arguments: [name(key='value'), ...]."""
    return WholeCalls(_python_calls, tools, functools.partial(_breaks_off, _IN_PYTHON))


def bare_keys(quote: str) -> Reader:
    """call:name{key:value, ...}: JSON whose keys have no quotes, and texts stand between two `quote`."""
    read = functools.partial(_bare_keys, quote)
    return lambda tools: WholeCalls(read, tools, lambda text: text.count(quote) % 2 == 1)


def _breaks_off(texts: re.Pattern[str], text: str) -> bool:
    """Whether the last of the texts between quotes has no end."""
    return any(not any(match.groups()) for match in texts.finditer(text))


def _json_head(prefix: str) -> Head:
    return Head(
        re.compile(rf"\s*{prefix}(?:\[\s*)?{_OBJECT}"), re.compile(_BEHIND + _OBJECT), re.compile(_BEHIND)
    )


def _named_head(pattern: str) -> Head:
    return Head(re.compile(rf"\s*{pattern}\s*(?=\{{)", re.DOTALL), None, re.compile(""))


def _json_objects(prefix: str, known: bool) -> Read:
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


def _json_pairs(text: str, tools: Tools) -> list[Call] | None:
    calls = []
    for each in _objects(text) or ():
        for name, arguments in each.items():
            if not isinstance(arguments, dict):
                return None
            calls.append(Call(name, arguments))
    return calls or None


def _named(pattern: str) -> Read:
    head = re.compile(pattern, re.DOTALL)

    def read(text: str, tools: Tools) -> list[Call] | None:
        text = text.strip()
        begin = head.match(text)
        if begin is None or text[begin.end() :].strip():  # with arguments, its head were known
            return None
        return [Call(begin["name"].strip(), {}, begin.groupdict().get("id") or "")]

    return read


def _python_calls(text: str, tools: Tools) -> list[Call] | None:
    text = text.strip()
    for source in (text, text.replace("\n", "\\n").replace("\r", "\\r")):  # lines between quotes
        try:
            tree = ast.parse(source, mode="eval").body
            calls = tree.elts if isinstance(tree, ast.List) else [tree]
            return [_python_call(call) for call in calls] or None
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            continue
    return None


def _python_call(call: ast.expr) -> Call:
    if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
        raise ValueError("no call with keyword arguments")
    arguments = {str(each.arg): python_value(each.value) for each in call.keywords}
    if len(arguments) < len(call.keywords):
        raise ValueError("an argument is given twice")
    return Call(ast.unparse(call.func), arguments)


_BARE_HEAD = re.compile(r"call:(?P<name>[^{\s]+)\s*")
_BARE_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:")


def _bare_keys(quote: str, text: str, tools: Tools) -> list[Call] | None:
    text = text.strip()
    begin = _BARE_HEAD.match(text)
    if begin is None:
        return None
    parts = text[begin.end() :].split(quote)
    parts[::2] = map(_quoted_keys, parts[::2])
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    objects = _objects("".join(parts))
    if not objects or len(objects) > 1:
        return None
    return [Call(begin["name"], objects[0])]


def _quoted_keys(text: str) -> str:
    """And constants as JSON has them; text: without texts."""
    return _CONSTANT.sub(lambda match: _JSON_OF[match[1]], _BARE_KEY.sub(r'\1"\2":', text))


def _objects(text: str) -> list[dict[str, Any]] | None:
    """All that stands in the text, objects and lists of objects one after the other; None: something else."""
    found: list[Any] = []
    at = _after_space(text, 0)
    while at < len(text):
        if _FENCE.fullmatch(text, at):
            break
        value, at = decoded(text, at)
        found += value if isinstance(value, list) else [value]
        at = _after_space(text, at)
    return found if all(isinstance(each, dict) for each in found) else None


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None  # it may be empty
    return match.end()


def _call_of(value: Mapping[str, Any]) -> Call | None:
    name = _first_of(value, ("name", "tool_name"))
    arguments = _first_of(value, ("arguments", "parameters"))
    if isinstance(arguments, str):
        arguments, _ = decoded(arguments, 0)
    if not isinstance(name, str) or not isinstance({} if arguments is None else arguments, dict):
        return None
    if not arguments and value.keys() - _OF_A_CALL:  # these may be the arguments, under another name
        return None
    id = value.get("id")
    return Call(name, arguments or {}, id if isinstance(id, str) else "")


def _first_of(value: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((value[key] for key in keys if key in value), None)
