"""Lists and objects written as marks within marks: <key>...</key>, and <item>...</item> in a list."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pykvgraph.reply.alternatives import alternatives
from pykvgraph.reply.values import may_be, typed

_DEEPEST = 64
_OF_A_LIST = "item"


@dataclass
class _Element:
    key: str
    begin: int
    text: str = ""
    inner: list[_Element] = field(default_factory=list)


def nested_value(text: str, mark: str, schema: Any, definitions: Mapping[str, Any]) -> Any:
    """The value of a text whose marks all begin with `mark`; typed as the schema allows."""
    whole = _parsed(text, mark)
    return typed(text, schema, definitions) if whole is None else _value(whole, schema, definitions)


def _parsed(text: str, mark: str) -> _Element | None:
    """None: the marks don't fit together."""
    stack = [_Element("", 0, text)]
    for match in re.finditer(rf"{re.escape(mark)}<(/?)([^<>/\s]+)>", text):
        closes, key = match.groups()
        if not closes:
            stack.append(_Element(key, match.end()))
            if len(stack) > _DEEPEST:
                return None
        elif len(stack) > 1 and stack[-1].key == key:
            inner = stack.pop()
            inner.text = text[inner.begin : match.start()]
            stack[-1].inner.append(inner)
        else:
            return None
    return stack[0] if len(stack) == 1 else None


def _value(element: _Element, schema: Any, definitions: Mapping[str, Any]) -> Any:
    inner = element.inner
    if not inner and not element.text.strip():
        for kind, empty in (("array", []), ("object", {})):
            if may_be(kind, schema, definitions):
                return empty
    if not inner:
        return typed(element.text, schema, definitions)
    if all(each.key == _OF_A_LIST for each in inner):
        of_each = _part(schema, "items", definitions)
        return [_value(each, of_each, definitions) for each in inner]
    members = _part(schema, "properties", definitions)
    members = members if isinstance(members, dict) else {}
    return {each.key: _value(each, members.get(each.key), definitions) for each in inner}


def _part(schema: Any, name: str, definitions: Mapping[str, Any]) -> Any:
    return next((each[name] for each in alternatives(schema, definitions) if name in each), None)
