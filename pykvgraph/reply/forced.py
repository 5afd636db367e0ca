# marks of models have fullwidth bars
"""Grammars that force a call of a tool, as the model's own format writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.reply.format import Calls, Format
from pykvgraph.reply.parser import tools_of
from pykvgraph.reply.raw_texts import raw_text
from pykvgraph.reply.readers import json_calls
from pykvgraph.sampling.guide_text import json_of, lark, literal, or_object
from pykvgraph.sampling.schema_limits import check_schema


@dataclass(frozen=True)
class Written:
    """A call: %n is its name, %a its arguments as JSON; or %p its parameters, each with %k and %v.

    end: marks behind it. The call is whole without them.
    """

    call: str
    parameter: str = ""
    end: str = ""


_JSON = '{"name": "%n", "arguments": %a}'
_TAG = "<parameter=%k>\n%v\n</parameter>\n"
WRITTEN = {
    "hermes": Written(f"<tool_call>\n{_JSON}\n", end="</tool_call>"),
    "nemotron": Written(f"<TOOLCALL>[{_JSON}]", end="</TOOLCALL>"),
    "tool_calls": Written(f"<tool_calls>[{_JSON}]", end="</tool_calls>"),
    "granite": Written(f"<|tool_call|>[{_JSON}]"),
    "firefunction": Written(f" functools[{_JSON}]"),
    "mistral-list": Written(f"[TOOL_CALLS][{_JSON}]"),
    "mistral": Written("[TOOL_CALLS]%n[ARGS]%a"),
    "llama-3": Written('{"name": "%n", "parameters": %a}'),
    "functionary-v3.1": Written("<function=%n>%a", end="</function>"),
    "gpt-oss": Written("<|channel|>commentary to=functions.%n <|constrain|>json<|message|>%a"),
    "kimi-k2": Written(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.%n:0<|tool_call_argument_begin|>%a",
        end="<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "command-r7b": Written(
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "%n", "parameters": %a}\n]',
        end="<|END_ACTION|>",
    ),
    "qwen3-coder": Written("<tool_call>\n<function=%n>\n%p</function>\n", _TAG, "</tool_call>"),
    "seed": Written(
        "<seed:tool_call>\n<function=%n>\n%p</function>\n",
        "<parameter=%k>%v</parameter>\n",
        "</seed:tool_call>",
    ),
    "glm": Written("<tool_call>%n\n%p</tool_call>", "<arg_key>%k</arg_key>\n<arg_value>%v</arg_value>\n"),
    "minimax-m2": Written(
        '<minimax:tool_call>\n<invoke name="%n">\n%p</invoke>\n',
        '<parameter name="%k">%v</parameter>\n',
        "</minimax:tool_call>",
    ),
}
# how arguments may begin and end; a token may have what stands beside them, too
_BEGINS, _ENDS = ('{"', "{}", "{ ", "{\n"), ('"}', "}}", "]}", "1}", "e}", "{}")
_NAME = re.compile(r"[\w.-]+")
_MANY = 16  # characters of a name, more than its first token has
_MOST_NAMES = 256  # each takes time
_MOST_READ = 1 << 20  # characters of all schemas
_NONE = {"type": "object", "properties": {}}  # of a tool without parameters
_SPACE = "/[ \\n]{1,8}/"  # behind thoughts
_PLAIN = Calls("json", (), (), "", json_calls(known=True), first=("{",))


Spell = Callable[[str], str]  # a text in Lark; sampling.spelling.spelled
# the beginning of a text that ends where a token does, whichever text follows; sampling.token_ends.settled
Settled = Callable[[str, Sequence[str]], str]


class ForcedCall(NamedTuple):
    """grammar: in Lark, for a guide. format: in which the reply is to be parsed.

    begun: how every reply begins; the grammar is of what follows. called: the tool, where `begun` names it
    and nothing in the name could be taken for a mark.
    """

    grammar: str
    format: Format
    begun: str = ""
    called: str = ""


def forced_call(
    format: Format,
    tools: Sequence[Mapping[str, Any]],
    name: str | None = None,
    prompt: str = "",
    schema: Mapping[str, Any] | None = None,
    *,
    spell: Spell,
    settled: Settled | None = None,
) -> ForcedCall:
    """What makes a model call one of the tools, after its thoughts if it has any.

    tools: as OpenAI's interface has them. name: of the tool; None: any. prompt: what the reply goes on from.
    schema: the model may say JSON that follows it instead. settled: None: the grammar is of the whole call;
    else it lacks the beginning that is the same in every reply, and the marks at the end. Where the format
    has no grammar here, the call is a plain JSON object. Raises InvalidArgumentError for an unknown name, no
    tools, and a schema over the limits.
    """
    schemas = {key: schema for key, schema in tools_of(tools).items() if name in (None, key)}
    if not schemas:
        raise InvalidArgumentError(f"no tool has the name {name!r}" if name else "there are no tools to call")
    if format.name not in WRITTEN:
        format = Format(format.thinking, _PLAIN)
    written = WRITTEN.get(format.name, Written(_JSON))
    rules = _Rules(spell)
    thoughts = _thoughts(rules, format, prompt)
    begun, end = "", written.end
    if settled is not None:
        begun = "" if thoughts or schema is not None else _begun(written, list(schemas), settled)
        end = _needed_end(written, settled)
    ways = [_call(rules, written, key, each, len(begun), end) for key, each in schemas.items()]
    if schema is not None:
        ways.append(rules.of_schema(or_object(schema)))
    only = next(iter(schemas)) if begun and len(schemas) == 1 else ""
    called = only if _NAME.fullmatch(only) else ""
    return ForcedCall(rules.text(f"{thoughts}({' | '.join(ways)})"), format, begun, called)


def forced_json(format: Format, schema: Mapping[str, Any], prompt: str = "", *, spell: Spell) -> str:
    """The grammar, in Lark, of JSON that follows a schema, after the model's thoughts if it has any.

    prompt: what the reply goes on from. Raises InvalidArgumentError for a schema over the limits.
    """
    rules = _Rules(spell)
    return rules.text(f"{_thoughts(rules, format, prompt)}{rules.of_schema(or_object(schema))}")


class _Rules:
    """The rules of a grammar, each under a name of its own."""

    def __init__(self, spell: Spell) -> None:
        self.spell = spell
        self._rules: list[str] = []
        self._n_read = 0  # characters of schemas

    def text(self, start: str) -> str:
        """The grammar."""
        return lark(start, *self._rules)

    def of_schema(self, schema: Any) -> str:
        """The name of a rule for JSON that follows the schema."""
        text = json_of(schema)
        self.count(len(text))
        return self._add(f": %json {text}")

    def count(self, n: int) -> None:
        """So many characters of a schema are read. Raises InvalidArgumentError where they are too many."""
        self._n_read += n
        if self._n_read > _MOST_READ:
            raise InvalidArgumentError(
                f"the schemas of the tools have over {_MOST_READ} characters together: offer fewer tools, or "
                "write less in their schemas"
            )

    def until(self, mark: str, text: str = "/(?s:.*)/") -> str:
        """The name of a rule for a text up to the first mark, which belongs to it. text: what it may be."""
        end = self.spell(mark)
        if end == literal(mark):
            return self._add(f"[suffix={end}]: {text}")
        name = f"T{len(self._rules)}"  # a control token is no part of a text
        self._rules.append(f"{name}: {text}")
        return self._add(f": {name} {self.spell(mark.strip())}")

    def _add(self, rest: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(name + rest)
        return name


def _begun(written: Written, names: Sequence[str], settled: Settled) -> str:
    """How a call of any of these tools begins: up to the arguments of the only one, or up to the name."""
    front, part, rest = _parts(written)
    if len(names) > _MOST_NAMES:
        return ""
    if len(names) > 1:
        return settled(front.partition("%n")[0], [name[:_MANY] for name in names])
    follows = _BEGINS if part == "%a" else (written.parameter.partition("%k")[0], rest)
    return settled(front.replace("%n", names[0]), follows)


def _needed_end(written: Written, settled: Settled) -> str:
    """The marks behind a call, where a model's token may have them together with what stands before.

    Without such a token, the text may end in front of them: the model chooses nothing there any more.
    """
    if not written.end:
        return ""
    _, part, rest = _parts(written)
    ends = _ENDS if part == "%a" else (written.parameter.partition("%v")[2],)
    texts = [each + rest for each in ends]
    return "" if all(settled(text, [written.end]) == text for text in texts) else written.end


def _parts(written: Written) -> list[str]:
    """What stands before the arguments; %a or %p; and what stands behind them."""
    return re.split("(%[ap])", written.call)


def _call(
    rules: _Rules, written: Written, name: str, schema: Mapping[str, Any], n_begun: int, end: str
) -> str:
    """n_begun: characters that are there already. end: what stands behind the call."""
    front, part, rest = _parts(written)
    if part == "%a":
        given = rules.of_schema({"type": "object", **schema} if schema else _NONE)
    else:
        n = len(json.dumps(schema))
        check_schema(schema, n)
        rules.count(n)
        given = _parameters(rules, written.parameter, schema)
    texts = [rules.spell(text) if text else "" for text in (front.replace("%n", name)[n_begun:], rest + end)]
    return " ".join(filter(None, (texts[0], given, texts[1])))


def _parameters(rules: _Rules, written: str, schema: Mapping[str, Any]) -> str:
    """In the schema's order; those that aren't required may be left out."""
    required = _part(schema, "required", list)
    found = []
    for key, each in _part(schema, "properties", dict).items():
        begin, _, rest = written.partition("%v")
        each = {} if each is True else _part({"parameter": each}, "parameter", dict)
        one = f"{rules.spell(begin.replace('%k', key))} {_value(rules, rest, each, schema)}"
        found.append(one if key in required else f"({one})?")
    return " ".join(found)


def _part(schema: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    """What a schema has under a name; nothing, if it has none. Raises InvalidArgumentError."""
    part = schema.get(name)
    if part is not None and not isinstance(part, kind):
        raise InvalidArgumentError(
            f"the schema of a tool can't be made a grammar: {name} must be {kind.__name__}, got {shown(part)}"
        )
    return kind() if part is None else part


def _value(rules: _Rules, rest: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """A value and what closes it; texts stand there as they are. root: where references begin."""
    text = raw_text(schema, root)
    if text is not None and text.literals:
        return f"({' | '.join(map(rules.spell, text.literals))}) {rules.spell(rest)}"
    if text is not None and text.regex:
        return rules.until(rest, text.regex)
    if text is not None:
        mark = rest.strip()
        after = rest.partition(mark)[2]
        return f"{rules.until(mark)} {rules.spell(after)}"
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return f"{rules.of_schema({**definitions, **schema} if schema else {})} {rules.spell(rest)}"


def _thoughts(rules: _Rules, format: Format, prompt: str) -> str:
    thinking = format.thinking
    if thinking is None or prompt.rstrip().endswith(thinking.close.rstrip()):
        return ""
    thought = f"{rules.until(thinking.close)} ({_SPACE})?"
    if thinking.is_open(prompt):
        return f"{thought} "
    return f"({rules.spell(thinking.open)} {thought})? "
