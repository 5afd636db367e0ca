# marks of models have fullwidth bars
"""Grammars that force a call of a tool, as the model's own format writes it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.reply.format import Calls, Format
from pykvgraph.reply.parser import tools_of
from pykvgraph.reply.readers import json_calls
from pykvgraph.sampling.grammar_text import grammar_of_schema


@dataclass(frozen=True)
class Written:
    """A call: %n is its name, %a its arguments as JSON; or %p its parameters, each with %k and %v."""

    call: str
    parameter: str = ""


_JSON = '{"name": "%n", "arguments": %a}'
_TAG = "<parameter=%k>\n%v\n</parameter>\n"
WRITTEN = {
    "hermes": Written(f"<tool_call>\n{_JSON}\n</tool_call>"),
    "nemotron": Written(f"<TOOLCALL>[{_JSON}]</TOOLCALL>"),
    "tool_calls": Written(f"<tool_calls>[{_JSON}]</tool_calls>"),
    "granite": Written(f"<|tool_call|>[{_JSON}]"),
    "firefunction": Written(f" functools[{_JSON}]"),
    "mistral-list": Written(f"[TOOL_CALLS][{_JSON}]"),
    "mistral": Written("[TOOL_CALLS]%n[ARGS]%a"),
    "llama-3": Written('{"name": "%n", "parameters": %a}'),
    "functionary-v3.1": Written("<function=%n>%a</function>"),
    "gpt-oss": Written("<|channel|>commentary to=functions.%n <|constrain|>json<|message|>%a"),
    "kimi-k2": Written(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.%n:0<|tool_call_argument_begin|>%a"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "command-r7b": Written(
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "%n", "parameters": %a}\n]<|END_ACTION|>'
    ),
    "qwen3-coder": Written("<tool_call>\n<function=%n>\n%p</function>\n</tool_call>", _TAG),
    "seed": Written(
        "<seed:tool_call>\n<function=%n>\n%p</function>\n</seed:tool_call>",
        "<parameter=%k>%v</parameter>\n",
    ),
    "glm": Written("<tool_call>%n\n%p</tool_call>", "<arg_key>%k</arg_key>\n<arg_value>%v</arg_value>\n"),
    "minimax-m2": Written(
        '<minimax:tool_call>\n<invoke name="%n">\n%p</invoke>\n</minimax:tool_call>',
        '<parameter name="%k">%v</parameter>\n',
    ),
}
_ANYTHING = {"type": ["object", "array", "string", "number", "boolean", "null"]}
_MOST_READ = 1 << 20  # characters of all schemas
_PLAIN = Calls("json", (), (), "", json_calls(known=True), first=("{",))


class ForcedCall(NamedTuple):
    """grammar: GBNF. format: in which the reply is to be parsed."""

    grammar: str
    format: Format


def forced_call(
    format: Format,
    tools: Sequence[Mapping[str, Any]],
    name: str | None = None,
    prompt: str = "",
    schema: Mapping[str, Any] | None = None,
) -> ForcedCall:
    """What makes a model call one of the tools, after its thoughts if it has any.

    tools: as OpenAI's interface has them. name: of the tool; None: any. prompt: what the reply goes on from.
    schema: the model may say JSON that follows it instead. Where the format has no grammar here, the call is
    a plain JSON object. Raises InvalidArgumentError for an unknown name, no tools, and a schema that can't be
    made a grammar.
    """
    schemas = {key: schema for key, schema in tools_of(tools).items() if name in (None, key)}
    if not schemas:
        raise InvalidArgumentError(f"no tool has the name {name!r}" if name else "there are no tools to call")
    if format.name not in WRITTEN:
        format = Format(format.thinking, _PLAIN)
    written = WRITTEN.get(format.name, Written(_JSON))
    rules = _Rules()
    ways = [_call(rules, f"t{i}", written, key, each) for i, (key, each) in enumerate(schemas.items())]
    if schema is not None:
        ways.append(rules.of_schema("json", schema))
    return ForcedCall(rules.text(f"{_thoughts(rules, format, prompt)}({' | '.join(ways)})"), format)


def forced_json(format: Format, schema: Mapping[str, Any], prompt: str = "") -> str:
    """The grammar of JSON that follows a schema, after the model's thoughts if it has any.

    prompt: what the reply goes on from. Raises InvalidArgumentError for a schema that can't be a grammar.
    """
    rules = _Rules()
    return rules.text(f"{_thoughts(rules, format, prompt)}{rules.of_schema('json', schema)}")


class _Rules:
    """The rules of a grammar, each under a name of its own."""

    def __init__(self) -> None:
        self._rules: dict[str, str] = {}
        self._n_read = 0  # characters of schemas

    def text(self, root: str) -> str:
        """The grammar."""
        return "".join(f"{name} ::= {rule}\n" for name, rule in {"root": root, **self._rules}.items())

    def of_schema(self, prefix: str, schema: Mapping[str, Any]) -> str:
        """The name of a rule for JSON that follows the schema."""
        text = json.dumps(schema)
        self._n_read += len(text)
        if self._n_read > _MOST_READ:
            raise InvalidArgumentError(
                f"the schemas of the tools have over {_MOST_READ} characters together: offer fewer tools, or "
                "write less in their schemas"
            )
        for line in grammar_of_schema(text).splitlines():
            name, _, rule = line.partition("::=")
            if rule:
                self._rules[f"{prefix}-{name.strip()}"] = _renamed(rule.strip(), prefix)
        return f"{prefix}-root"

    def until(self, prefix: str, mark: str) -> str:
        """The name of a rule for any text up to a mark, which belongs to it (Knuth, Morris and Pratt)."""
        name = f"{prefix}-{len(self._rules)}-u"
        letters = sorted(set(mark))
        for state in range(len(mark)):
            ways = []
            for letter in letters:
                seen = mark[:state] + letter
                n = next(n for n in range(len(seen), -1, -1) if mark.startswith(seen[len(seen) - n :]))
                ways.append(_literal(letter) + (f" {name}{n}" if n < len(mark) else ""))
            ways.append(f"[^{''.join(map(_in_class, letters))}] {name}0")
            self._rules[f"{name}{state}"] = " | ".join(ways)
        return f"{name}0"


def _call(rules: _Rules, prefix: str, written: Written, name: str, schema: Mapping[str, Any]) -> str:
    values = {"%n": _literal(name)}
    if "%a" in written.call:
        values["%a"] = rules.of_schema(prefix, schema or {"type": "object"})
    else:
        values["%p"] = _parameters(rules, prefix, written.parameter, schema)
    return _filled(written.call, values)


def _parameters(rules: _Rules, prefix: str, written: str, schema: Mapping[str, Any]) -> str:
    """In the schema's order; those that aren't required may be left out."""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = _part(schema, "required", list)
    found = []
    for i, (key, each) in enumerate(_part(schema, "properties", dict).items()):
        each = _ANYTHING if each is True else each
        of_key = _filled(written.partition("%v")[0], {"%k": _literal(key)})
        one = f"{of_key} {_value(rules, f'{prefix}p{i}', written.partition('%v')[2], each, definitions)}"
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


def _value(
    rules: _Rules, prefix: str, rest: str, schema: Mapping[str, Any], definitions: Mapping[str, Any]
) -> str:
    """A value and what closes it; texts stand there as they are."""
    schema = _part({"parameter": schema}, "parameter", dict) or _ANYTHING
    texts = [schema["const"]] if "const" in schema else _part(schema, "enum", list)
    if texts and all(isinstance(text, str) for text in texts):
        return f"({' | '.join(map(_literal, texts))}) {_literal(rest)}"
    if schema.get("type") == "string":
        mark = rest.strip()
        after = rest.partition(mark)[2]
        return f"{rules.until(prefix, mark)} {_literal(after)}"
    return f"{rules.of_schema(prefix, {**definitions, **schema})} {_literal(rest)}"


def _thoughts(rules: _Rules, format: Format, prompt: str) -> str:
    thinking = format.thinking
    if thinking is None or prompt.rstrip().endswith(thinking.close.rstrip()):
        return ""
    thought = f"{rules.until('thought', thinking.close)} [ \\n]*"
    if thinking.is_open(prompt):
        return f"{thought} "
    return f"({_literal(thinking.open)} {thought})? "


def _filled(written: str, values: Mapping[str, str]) -> str:
    parts = re.split("(%[a-z])", written)
    return " ".join(values[part] if part in values else _literal(part) for part in parts if part)


def _literal(text: str) -> str:
    for raw, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r")):
        text = text.replace(raw, escaped)
    return f'"{text}"'


def _in_class(letter: str) -> str:
    if letter == "\n":
        return "\\n"
    return f"\\{letter}" if letter in "\\]-[" else letter


_WORDS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|(?P<name>[A-Za-z][A-Za-z0-9-]*)')


def _renamed(rule: str, prefix: str) -> str:
    """The rule with a prefix before each name, but not in literals and classes."""

    def change(match: re.Match[str]) -> str:
        return f"{prefix}-{match[0]}" if match["name"] else match[0]

    return _WORDS.sub(change, rule)
