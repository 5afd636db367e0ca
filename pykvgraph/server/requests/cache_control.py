"""What bodies say of the cache: which beginnings of a prompt stay there, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from pykvgraph.checks import shown
from pykvgraph.openai.errors import invalid
from pykvgraph.server.requests.fields import Fields

TTLS = {"5m": 300.0, "1h": 3600.0}  # seconds; longer ones stand in front
_MOST = 4  # breakpoints of a body
_RETENTIONS = {"in_memory": 0.0, "in-memory": 0.0, "24h": 86400.0}
_LIFETIMES = {"30m": 1800.0, "12h": 43200.0}
# a body without a message is no conversation, and many templates refuse it
_NO_WORDS = [{"role": "user", "content": ""}]


class Breakpoint(NamedTuple):
    """A `cache_control` in a body of /v1/messages. body: what it says up to there. ttl: a key of TTLS."""

    body: Fields
    ttl: str


def breakpoints_of(fields: Fields) -> list[Breakpoint]:
    """In the order of the prompt. The instructions and the tools are one head: templates mix them.

    Raises WireError.
    """
    found = list(_all_of(fields))
    if len(found) > _MOST:
        raise invalid(f"cache_control: {len(found)} blocks have one, and {_MOST} may: leave some out")
    ttls = [each.ttl for each in found]
    if ttls != sorted(ttls, key=lambda ttl: -TTLS[ttl]):
        raise invalid("cache_control: a block with ttl 1h must not come behind one with 5m")
    return found


def retention_of(fields: Fields) -> float:
    """For how many seconds the prompt stays, as a body of OpenAI's interface says; 0: nobody says.

    Raises WireError.
    """
    options = Fields(fields.object("prompt_cache_options"))
    if options.get("mode", "implicit") != "implicit" or options.get("prewarm"):
        raise invalid(
            "prompt_cache_options: this server caches every prompt by itself; send no `mode` and no `prewarm`"
        )
    return max(
        _seconds(fields, "prompt_cache_retention", _RETENTIONS, "in_memory"),
        _seconds(options, "ttl", _LIFETIMES, "", "prompt_cache_options."),
    )


def _all_of(fields: Fields) -> Iterator[Breakpoint]:
    tools, system, messages = fields.array("tools"), fields.get("system"), fields.array("messages")
    for n, tool in enumerate(tools, 1):
        if ttl := _ttl(tool):
            yield Breakpoint(_head(fields, tools[:n], system), ttl)
    for n, block in enumerate(system if isinstance(system, list) else (), 1):
        if ttl := _ttl(block):
            yield Breakpoint(_head(fields, tools, system[:n]), ttl)
    ends = False  # whether the last block has one
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, dict) else None
        for n, block in enumerate(content if isinstance(content, list) else (), 1):
            ttl = _ttl(block)
            ends = bool(ttl)
            if ttl and content is not None:
                cut = [*messages[:i], {**message, "content": content[:n]}]
                yield Breakpoint(fields.replaced(messages=cut), ttl)
    if (ttl := _own_ttl(fields.get("cache_control"))) and not ends:
        yield Breakpoint(fields, ttl)


def _head(fields: Fields, tools: list[Any], system: Any) -> Fields:
    """A body without a conversation. A choice may name a tool that is cut off: only its thoughts stay."""
    choice = fields.object("tool_choice").get("type")
    silent = {"type": "disabled"} if choice in ("any", "tool") else None
    thinking = fields.get("thinking", silent)
    return fields.replaced(
        tools=tools, system=system, messages=_NO_WORDS, tool_choice=None, thinking=thinking
    )


def _ttl(block: Any) -> str:
    """Of a block, or of one inside of it, such as the text of a tool's result; "": there is none."""
    if not isinstance(block, dict):
        return ""
    inner = block.get("content")
    blocks = [block, *(inner if isinstance(inner, list) else ())]
    ttls = [_own_ttl(each.get("cache_control")) for each in blocks if isinstance(each, dict)]
    return next(filter(None, ttls), "")


def _own_ttl(given: Any) -> str:
    if given is None:
        return ""
    if not isinstance(given, dict) or given.get("type") != "ephemeral":
        raise invalid(f'cache_control must be {{"type": "ephemeral"}}, got {shown(given)}')
    ttl = given.get("ttl") or "5m"
    if not isinstance(ttl, str) or ttl not in TTLS:
        raise invalid(f"cache_control: ttl must be one of {', '.join(TTLS)}, got {shown(ttl)}")
    return ttl


def _seconds(fields: Fields, name: str, known: dict[str, float], default: str, where: str = "") -> float:
    value = fields.text(name, default)
    if value not in known and value != default:
        raise invalid(f"{where}{name} must be one of {', '.join(known)}, got {shown(value)}")
    return known.get(value, 0.0)
