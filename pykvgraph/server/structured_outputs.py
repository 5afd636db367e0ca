"""What vLLM's clients ask of an answer: `structured_outputs`, and the older `guided_json` and the like."""

from __future__ import annotations

import json
from typing import Any

from pykvgraph.openai.errors import invalid
from pykvgraph.sampling.guide_text import lark, literal, regex
from pykvgraph.server.requests.fields import Fields

FIELD = "structured_outputs"
_HARMLESS = ("whitespace_pattern", "disable_any_whitespace", "disable_fallback")  # JSON is as schemas.md says
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


def with_own_rules(fields: Fields) -> Fields:
    """The same body, with `json_schema` or `grammar` in place of these. Raises WireError."""
    asked = fields.object(FIELD) if FIELD in fields else {}
    given = {kind: asked.get(kind, fields.get(f"guided_{kind}")) for kind in _KINDS}
    given = {kind: value for kind, value in given.items() if value is not None and value is not False}
    if unknown := asked.keys() - {*_KINDS, *_HARMLESS}:
        raise invalid(f"{FIELD}: {sorted(unknown)[0]} is not supported; {', '.join(_KINDS)} are")
    if not given:
        return fields
    if len(given) > 1:
        raise invalid(f"{FIELD}: give one of {', '.join(_KINDS)}, got {', '.join(given)}")
    ((kind, value),) = given.items()
    return fields.replaced(**_own(kind, value))


def _own(kind: str, value: Any) -> dict[str, Any]:
    of = Fields({kind: value})
    if kind == "json":
        return {"json_schema": _schema(value)}
    if kind == "json_object":
        return {"json_schema": {}}
    if kind == "choice":
        texts = of.texts(kind)
        if not texts:
            raise invalid(f"{FIELD}: choice is empty")
        return {"grammar": lark(" | ".join(map(literal, texts)))}
    text = of.text(kind)
    return {"grammar": lark(regex(text)) if kind == "regex" else text}


def _schema(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise invalid(f"{FIELD}: json is no JSON: {error}") from None
