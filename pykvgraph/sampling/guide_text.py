"""What a guide follows, as llguidance reads it: JSON schemas, and Lark grammars with schemas in them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.sampling.plain_schema import plain
from pykvgraph.sampling.schema_limits import check_schema
from pykvgraph.sampling.subschemas import all_schemas, with_subschemas

HEADER = "%llguidance"  # what a grammar in Lark begins with, as in llama.cpp
# between the parts of JSON, without which a model may say nothing else; llama.cpp's grammars have the same
_SPACE = r"( |\n{1,2}[ \t]{0,20})"
# A day that there is, of a year from 0001 on; llguidance's own takes February 29 of each year.
_YEAR = r"([1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"
_LEAP_YEAR = r"(\d{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY_OF_YEAR = (
    r"((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
)
DATE = f"({_YEAR}-{_DAY_OF_YEAR}|{_LEAP_YEAR}-02-29)"
# in a regular expression of Lark, where letters and digits are those of all scripts
_SIGNS = re.compile(r"\\.|[/\n\r]", re.DOTALL)
_IN_LARK = {"/": r"\/", "\n": r"\n", "\r": r"\r", r"\d": "[0-9]", r"\D": "[^0-9]"}
_IN_LARK |= {"\\\n": r"\n", "\\\r": r"\r"}
_IN_LARK |= {r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
_SAYS_WHAT_ELSE = ("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames")
_COMPOSES = ("anyOf", "oneOf", "$ref", "if", "dependentSchemas", "not")


def is_lark(grammar: str) -> bool:
    """Whether a grammar is one of llguidance's."""
    return grammar.startswith(HEADER)


def guide_of_schema(schema: str) -> str:
    """JSON that follows a schema (its JSON text), as a grammar's process reads it; {}: any object.

    Raises InvalidArgumentError for a schema over the limits.
    """
    return json_of(or_object(json.loads(schema)))


def or_object(schema: Any) -> Any:
    """The schema; of any object in place of one that says nothing, as of `response_format`."""
    return {"type": "object"} if schema == {} else schema


def json_of(schema: Any) -> str:
    """The schema as JSON, as llguidance is to read it. Raises InvalidArgumentError for one over the limits.

    OpenAPI's `nullable` becomes a type. An object whose schema says nothing of other properties has none,
    unless schemas are put together there.
    """
    check_schema(schema, len(json.dumps(schema)))
    if not isinstance(schema, (dict, bool)):
        raise InvalidArgumentError(f"a JSON schema must be an object, got {shown(schema)}")
    schema = plain(schema)
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    schema = _rewritten(schema, closes=not any(map(_is_composed, all_schemas(schema))))
    given = schema.get("x-guidance")
    own = {**(given if isinstance(given, dict) else {}), "whitespace_pattern": _SPACE}
    return json.dumps({**schema, "x-guidance": own})


def lark(start: str, *rules: str) -> str:
    """A grammar in Lark. start: what the text is; rules: others, each on a line."""
    return "\n".join([f"{HEADER} {{}}", f"start: {start}", *rules, ""])


def literal(text: str) -> str:
    """A text in Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def special(token: int) -> str:
    """A token in Lark, by its id."""
    return f"<[{token}]>"


def _is_composed(schema: Mapping[str, Any]) -> bool:
    """Whether another schema says what else an object has."""
    together = schema.get("allOf")
    if isinstance(together, list) and (len(together) > 1 or "properties" in schema):
        return True
    return "properties" in schema and any(key in schema for key in _COMPOSES)


def _lists_all(schema: Mapping[str, Any]) -> bool:
    """Whether each property that must be is listed."""
    names, required = schema.get("properties"), schema.get("required")
    return isinstance(names, dict) and (
        not isinstance(required, list) or all(name in names for name in required if isinstance(name, str))
    )


def _rewritten(schema: Any, closes: bool) -> Any:
    if not isinstance(schema, dict):
        return schema
    found = with_subschemas(schema, lambda each: _rewritten(each, closes))
    if closes and _lists_all(schema) and not any(key in schema for key in _SAYS_WHAT_ELSE):
        found["additionalProperties"] = False
    if found.get("format") == "date" and found.get("type") == "string" and "pattern" not in found:
        del found["format"]
        found["pattern"] = f"^{DATE}$"
    if found.pop("nullable", False) is True:
        around: dict[str, Any] = {key: found.pop(key) for key in ("$defs", "definitions") if key in found}
        found = {**around, "anyOf": [found, {"type": "null"}]}
    return found


def regex(pattern: str) -> str:
    """A regular expression as JavaScript reads it, in Lark."""
    return f"/{_SIGNS.sub(lambda sign: _IN_LARK.get(sign[0], sign[0]), pattern)}/"


def lark_of_schema(schema: Any) -> str:
    """A grammar of JSON that follows a schema. Raises InvalidArgumentError for a schema over the limits."""
    return lark(f"%json {json_of(or_object(schema))}")
