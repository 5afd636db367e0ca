"""A JSON schema without keywords that llguidance doesn't know, where others say the same.

What tools write that make schemas of a program's types is among them: `propertyNames` of strings, a `not`
that nothing fulfils. Keywords of which nothing else says the same stay, and are refused by name.
"""

from __future__ import annotations

from typing import Any

from pykvgraph.sampling.subschemas import with_subschemas

_LENGTHS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_COMPOSES = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas", "not", "contains")


def plain(schema: Any) -> Any:
    """A schema that takes the same values."""
    if not isinstance(schema, dict):
        return schema
    found = with_subschemas(schema, plain)
    if found.get("not") == {} or found.get("not") is True:
        return False
    _drop_idle(found)
    for name in _LENGTHS:
        if isinstance(found.get(name), float) and found[name].is_integer():
            found[name] = int(found[name])
    _take_unevaluated(found, "unevaluatedProperties", "additionalProperties")
    _take_unevaluated(found, "unevaluatedItems", "items")
    if "propertyNames" in found:
        _take_names(found)
    return found


def _drop_idle(found: dict[str, Any]) -> None:
    """What says nothing, or nothing where it stands."""
    if found.get("uniqueItems") is False:
        del found["uniqueItems"]
    if "contains" not in found:
        found.pop("minContains", None)
        found.pop("maxContains", None)
    if "if" not in found:
        found.pop("then", None)
        found.pop("else", None)
    elif not any(name in found for name in ("then", "else", "unevaluatedItems", "unevaluatedProperties")):
        del found["if"]  # what it looks at counts as looked at, nothing else
    for name in ("dependentRequired", "dependentSchemas"):
        if found.get(name) == {}:
            del found[name]


def _take_unevaluated(found: dict[str, Any], name: str, others: str) -> None:
    """unevaluatedX says what additionalX does where no other schema is put together with this one."""
    if name not in found:
        return
    if isinstance(found.get(others), list):
        return  # the first items alone, in the drafts up to 2019-09
    if found[name] == {} or found[name] is True or others in found:
        del found[name]  # all is allowed, or all is looked at already
    elif not any(key in found for key in _COMPOSES):
        found[others] = found.pop(name)


def _take_names(found: dict[str, Any]) -> None:
    """Names of properties: of any string, of a list, or of a pattern where nothing else names any."""
    names = found["propertyNames"]
    if not isinstance(names, dict):
        if names is True:
            del found["propertyNames"]
        return
    rest = {key: value for key, value in names.items() if (key, value) != ("type", "string")}
    others, listed = found.get("additionalProperties", True), found.get("properties", {})
    if not rest:
        del found["propertyNames"]
    elif "patternProperties" in found or not isinstance(listed, dict):
        return
    elif rest.keys() == {"enum"} and isinstance(rest["enum"], list):
        allowed = [name for name in rest["enum"] if isinstance(name, str)]
        found["properties"] = {name: listed.get(name, others) for name in allowed}
        found["additionalProperties"] = False
        del found["propertyNames"]
    elif rest.keys() == {"pattern"} and not listed:
        found["patternProperties"] = {rest["pattern"]: others}
        found["additionalProperties"] = False
        del found["propertyNames"]
