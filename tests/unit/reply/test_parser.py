# marks of models have fullwidth bars
"""Replies taken apart: templates of llama.cpp's collection write a call, and the parser reads it back."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.written_calls import TEMPLATES, WITH_CALLS, WITHOUT_CALLS, written

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.reply.delta import CallPart, Content, Delta, Reasoning, Reply, ToolCall
from pykvgraph.reply.format import Format, Thinking
from pykvgraph.reply.formats import CALLS, THINKING, format_of
from pykvgraph.reply.parser import ReplyParser

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Tells.", "parameters": CITY}}
    for name in ("get_weather", "get_time")
]
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("get_weather", {"city": 'Par"is\n<b>', "days": 3}),
    ("get_time", {"city": "Rome"}),
]


def parsed(parser: ReplyParser, *pieces: str) -> list[Delta]:
    return [delta for piece in pieces for delta in parser.feed(piece)] + parser.end()


def reply(format: Format, text: str, prompt: str = "", tools: Any = TOOLS, **options: Any) -> Reply:
    return Reply.of(parsed(ReplyParser(format, tools, prompt, **options), text))


def told(found: Reply) -> tuple[str, str, list[tuple[str, Any]]]:
    return found.content, found.reasoning, [(each.name, value_of(each.arguments)) for each in found.calls]


def value_of(arguments: str) -> Any:
    """The text itself, where they broke off."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@pytest.mark.parametrize("name", WITH_CALLS)
def test_thoughts_before_calls_as_templates_write_them(name: str) -> None:
    try:
        prompt, said = written(name, TOOLS, ASKED, thought="Think.")
    except InvalidArgumentError:  # some have room for one call
        prompt, said = written(name, TOOLS, ASKED[:1], thought="Think.")
    format = format_of(TEMPLATES[name])
    content, reasoning, calls = told(reply(format, said, prompt))
    assert calls == ASKED[: len(calls)]
    assert len(calls) == (2 if "get_time" in said else 1)
    thinking = format.thinking
    if "Think." in said and (thinking is None or thinking.open in said or prompt.endswith(thinking.open)):
        assert reasoning == "Think."
    if format.thinking is None or format.thinking.close not in said:
        assert "Think." in content + reasoning or "Think." not in said
    assert content in ("", "Think.\n[BEGIN FINAL RESPONSE]")


@pytest.mark.parametrize("name", sorted(WITHOUT_CALLS))
def test_templates_without_calls(name: str) -> None:
    assert "Rome" not in written(name, TOOLS, ASKED).said


def named(name: str, thinking: str = "") -> Format:
    calls = next(each for each in CALLS if each.name == name)
    return Format(next((each for each in THINKING if each.open == thinking), None), calls, calls.headers)


HERMES = named("hermes", "<think>")
CALL = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Rome"}}\n</tool_call>'
ROME = ("get_time", {"city": "Rome"})


@pytest.mark.parametrize(
    ("name", "text", "content", "reasoning", "calls"),
    [
        ("hermes", f"I look.\n\n{CALL}\n{CALL}", "I look.", "", [ROME, ROME]),
        ("hermes", f"{CALL} Then this.", "Then this.", "", [ROME]),
        ("hermes", " no marks\n", " no marks\n", "", []),
        ("hermes", "a < b, <tool> <tool_cal", "a < b, <tool> <tool_cal", "", []),
        ("hermes", "<think>\nHm.\n</think>\n\nYes. ", "Yes. ", "Hm.", []),
        ("hermes", "<think>Hm", "", "Hm", []),
        # not read, so not lost
        ("hermes", "x <tool_call>{oops}</tool_call> y", "x <tool_call>{oops}</tool_call> y", "", []),
        ("hermes", f"<tool_call>oops</tool_call>{CALL}", "<tool_call>oops</tool_call>", "", [ROME]),
        ("hermes", '<tool_call>{"name": "a"', '<tool_call>{"name": "a"', "", []),
        ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', None, "", []),
        ("hermes", '<tool_call>{"arguments": {"x": NaN}, "name": "a"}</tool_call>', None, "", []),
        ("hermes", '<tool_call>{"arguments": {"x": 1e999}, "name": "a"}</tool_call>', None, "", []),
        ("hermes", "<tool_call>" + '{"name":' * 5000 + "</tool_call>", None, "", []),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", None, "", []),
        # the mark stands in a text of the arguments
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": {"x": "</tool_call>"}}</tool_call>',
            "",
            "",
            [("a", {"x": "</tool_call>"})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>',
            "",
            "",
            [("a", {"x": 1})],
        ),
        ("hermes", '<tool_call>{"name": "a"}</tool_call>', "", "", [("a", {})]),
        ("hermes", '<tool_call>{"name": "a", "args": {"x": 1}}</tool_call>', None, "", []),
        # Qwen3-coder forgets the mark around
        (
            "qwen3-coder",
            "Look.\n<function=get_time>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>",
            "Look.",
            "",
            [ROME],
        ),
        (
            "qwen3-coder",
            "<tool_call><function=get_weather><parameter=city>3</parameter><parameter=days>3</parameter>"
            "<parameter=more>[1, true]</parameter><parameter=odd>True</parameter></function></tool_call>",
            "",
            "",
            [("get_weather", {"city": "3", "days": 3, "more": [1, True], "odd": True})],
        ),
        ("qwen3-coder", "<function=a>x</function>", None, "", []),
        ("mistral", 'So[TOOL_CALLS]get_time{"city": "Rome"}', "So", "", [ROME]),
        ("mistral", "[TOOL_CALLS] none", "[TOOL_CALLS] none", "", []),
        ("llama-3", '{"name": "get_time", "parameters": {"city": "Rome"}}', "", "", [ROME]),
        ("llama-3", '\n {"name": "get_time", "parameters": {"city": "Rome"}}', "", "", [ROME]),
        ("llama-3", '<|python_tag|>{"name": "get_time", "parameters": {"city": "Rome"}}', "", "", [ROME]),
        ("llama-3", 'As {"name": "get_time", "parameters": {"city": "Rome"}}', None, "", []),
        ("llama-3", '{"name": "unknown", "parameters": {}}', None, "", []),
        ("llama-3", '{"answer": 42}', None, "", []),
        (
            "llama-3",
            '{"name": "get_time", "parameters": {"city": "Rome"}}; {"name": "get_time", "parameters": {}}',
            "",
            "",
            [ROME, ("get_time", {})],
        ),
        (
            "command-r-plus",
            'Action:\n```json\n[{"tool_name": "get_time", "parameters": {"city": "Rome"}}]```',
            "",
            "",
            [ROME],
        ),
        ("granite", '<|tool_call|>[{"name": "get_time", "arguments": {"city": "Rome"}}]', "", "", [ROME]),
        (
            "function-gemma",
            "<start_function_call>call:get_time{city:<escape>Rome<escape>}<end_function_call>",
            "",
            "",
            [ROME],
        ),
        (
            "gemma",
            '<|tool_call>call:a{x:{y:[1,{z:<|"|>k: 1, {<|"|>}]}}<tool_call|>',
            "",
            "",
            [("a", {"x": {"y": [1, {"z": "k: 1, {"}]}})],
        ),
        ("lfm2", "<|tool_call_start|>[get_time(city='Rome')]<|tool_call_end|>", "", "", [ROME]),
        ("lfm2", "<|tool_call_start|>[get_time(city=__import__('os'))]<|tool_call_end|>", None, "", []),
        ("lfm2", "<|tool_call_start|>[get_time(city='Rome', city='Oslo')]<|tool_call_end|>", None, "", []),
        # gpt-oss: the header says whose the text is
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            "Yes.",
            "Hm.",
            [],
        ),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
            'to=functions.get_time <|constrain|>json<|message|>{"city": "Rome"}<|call|>',
            "",
            "Hm.",
            [ROME],
        ),
        (
            "gpt-oss",
            'to=functions.get_time<|channel|>analysis code<|message|>\n{"city": "Rome"}',
            "",
            "",
            [ROME],
        ),
        ("gpt-oss", "<|channel|>commentary<|message|>I look.<|end|>", "I look.", "", []),
        ("gpt-oss", "No marks to=functions.x", "No marks to=functions.x", "", []),
        ("gpt-oss", "<|channel|>comm", "<|channel|>comm", "", []),
        # no mark ends the name, and the arguments have objects: it is the same however it is cut
        (
            "deepseek",
            '<\uff5ctool▁call▁begin\uff5c>get_time{"city":{"a":1}}<\uff5ctool▁call▁end\uff5c>',
            "",
            "",
            [("get_time", {"city": {"a": 1}})],
        ),
        ("functionary-v3.2", 'all\nHm.>>>get_time\n{"city": "Rome"}', "Hm.", "", [ROME]),
        ("functionary-v3.2", "all", "all", "", []),
    ],
)
def test_what_models_say(
    name: str, text: str, content: str | None, reasoning: str, calls: list[tuple[str, Any]]
) -> None:
    """content None: the text as it is."""
    format = named(name, "<think>")
    expected = (text if content is None else content, reasoning, calls)
    assert told(reply(format, text)) == expected


def test_the_prompt_may_have_opened_the_reasoning() -> None:
    assert told(reply(HERMES, f"Hm.\n</think>\n\n{CALL}", "<think>\n")) == ("", "Hm.", [ROME])
    assert told(reply(HERMES, "\n\nYes.", "<think>\n</think>")) == ("\n\nYes.", "", [])
    assert told(reply(HERMES, "Hm.</think>Yes.", "<think>", reasoning=False)) == ("Hm.</think>Yes.", "", [])


def test_without_tools_nothing_is_a_call() -> None:
    assert told(reply(HERMES, f"<think>Hm.</think>{CALL}", tools=())) == (CALL, "Hm.", [])
    cohere = named("command-r7b", "<|START_THINKING|>")
    assert told(reply(cohere, "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", tools=())) == ("Yes.", "", [])


def test_ids_are_the_models_or_new_ones() -> None:
    def text(id: str) -> str:
        return f"[TOOL_CALLS]get_time[CALL_ID]{id}[ARGS]{{}}[TOOL_CALLS]get_time[ARGS]{{}}"

    numbers = itertools.count()
    parser = ReplyParser(named("mistral"), TOOLS, new_id=lambda: f"own{next(numbers)}")
    assert [each.id for each in Reply.of(parsed(parser, text("abcdefgh1"))).calls] == ["abcdefgh1", "own0"]
    new = [each.id for each in reply(named("mistral"), text("abcdefgh1")).calls][1]
    assert len(new) == 9 and new.isalnum()


def test_text_comes_as_early_as_it_is_certain() -> None:
    parser = ReplyParser(HERMES, TOOLS)
    assert parser.feed("<thi") == []
    assert parser.feed("nk>Hm, ") == [Reasoning("Hm,")]
    assert parser.feed("so</think>\n") == [Reasoning(" so")]
    assert parser.feed("Yes <") == [Content("Yes")]
    assert parser.feed("b> <tool_call>") == [Content(" <b>")]
    assert parser.feed('{"name": "a", "arguments"') == []
    call, first = parser.feed(': {"b": "c')
    assert isinstance(call, ToolCall) and (call.name, call.arguments) == ("a", "")
    assert first == CallPart(call.id, '{"b": "c')
    assert parser.feed("</tool_call>") == [CallPart(call.id, "</tool_call>")]  # within a text it is none
    assert parser.feed('", "d": 1') == [CallPart(call.id, '", "d": 1')]
    assert parser.feed("}} \n</tool_call>!") == [CallPart(call.id, "}"), Content("!")]
    assert parser.end() == []


def test_values_between_marks_come_as_early_as_they_are_certain() -> None:
    """Of a text, all but what may be its end; of a number, nothing before its end."""
    parser = ReplyParser(named("qwen3-coder"), TOOLS)
    assert parser.feed("<function=get_weather>\n<parameter=city") == []
    call, first = parser.feed(">\nPar")
    assert isinstance(call, ToolCall) and call.name == "get_weather"
    assert first == CallPart(call.id, '{"city": "Par')
    assert parser.feed('is"\n') == [CallPart(call.id, 'is\\"')]
    assert parser.feed("</para") == []
    assert parser.feed("meter>\n") == []
    assert parser.feed("x\n") == [CallPart(call.id, "\\n</parameter>\\nx")]
    assert parser.feed("</parameter>\n<parameter=") == [CallPart(call.id, '"')]
    assert parser.feed("days>\n1") == [CallPart(call.id, ', "days": ')]
    assert parser.feed("2\n</parameter>\n</function>") == [CallPart(call.id, "12}")]
    assert parser.end() == []


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "y</tool', '{"x": "y</tool'),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": [1</tool_call>', '{"x": [1'),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', '{"x": NaN}'),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": "1\n2"}}</tool_call>', '{"x": "1\\n2"}'),
        ("mistral", "[TOOL_CALLS]a[ARGS]{", "{"),
        ("qwen3-coder", "<function=get_time><parameter=city>Rome</para", '{"city": "Rome</para'),
        ("qwen3-coder", "<function=get_weather><parameter=days>1", '{"days": 1'),
        ("qwen3-coder", "<function=a><parameter=x>1</function>", '{"x": 1</function>'),
    ],
)
def test_arguments_that_break_off_stay_as_they_are(name: str, text: str, arguments: str) -> None:
    """As of hosted services: what was handed out can't be taken back."""
    found = reply(named(name), text)
    assert (found.content, [each.arguments for each in found.calls]) == ("", [arguments])


@pytest.mark.parametrize(
    "behind", [" Then this.", "\n</tool_call>", "</tool_call>\nThen this.", '{"name": "b"'], ids=str
)
def test_what_stands_behind_a_call_is_not_lost(behind: str) -> None:
    text = '<tool_call>{"name": "a", "arguments": {"x": 1}}'
    found = reply(HERMES, text + behind)
    assert [each.arguments for each in found.calls] == ['{"x": 1}']
    assert found.content == behind.replace("</tool_call>", "").strip()


def test_no_two_calls_have_the_same_id() -> None:
    """A model may say one twice."""
    said = "[TOOL_CALLS]get_time[CALL_ID]abcdefgh1[ARGS]{}" * 2
    first, second = reply(named("mistral"), said).calls
    assert first.id == "abcdefgh1" != second.id and second.arguments == "{}"


WORDS = st.sampled_from(
    ["alpha", " beta", "gamma\n", "\n", " ", '{"name": "get_time", "arguments": {"city": "x"}}']
)
BODIES = st.sampled_from(
    [
        "get_time>\n<parameter=city>\nRome\n</parameter>\n",
        'get_time[ARGS]{"city": "Rome"}',
        "functions.get_time:0<|tool_call_argument_begin|>{}",
        "get_time<arg_key>city</arg_key><arg_value>x</arg_value>",
        "[get_time(city='x')]",
        "call:get_time{city:1}",
        "<",
        "<|",
    ]
)


@given(st.data(), st.sampled_from(CALLS), st.sampled_from(THINKING))
def test_however_it_is_cut_it_is_the_same(data: st.DataObject, calls: Any, thinking: Any) -> None:
    """And of words that stand in no header, none is lost."""
    format = Format(thinking, calls, calls.headers)
    fragments = data.draw(st.lists(WORDS | BODIES | st.sampled_from(format.texts()), max_size=12))
    text = "".join(fragments)
    prompt = data.draw(st.sampled_from(["", thinking.open]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    whole = reply(format, text, prompt)
    deltas = parsed(ReplyParser(format, TOOLS, prompt), *pieces)
    assert told(Reply.of(deltas)) == told(whole)
    letters = parsed(ReplyParser(format, TOOLS, prompt), *text)
    assert told(Reply.of(letters)) == told(whole)
    assert Content("") not in deltas and Reasoning("") not in deltas
    if calls.headers is None:
        all_of_it = (
            whole.content + whole.reasoning + "".join(f"{each.name}{each.arguments}" for each in whole.calls)
        )
        for word in ("alpha", "beta", "gamma"):
            assert all_of_it.count(word) == text.count(word)


@pytest.mark.parametrize(
    "schema",
    [5, [1], {"type": [{}, 5]}, {"enum": 5}, {"anyOf": 5, "oneOf": [5, {"enum": {}}]}, {"type": {}}],
)
def test_values_under_schemas_that_are_none(schema: Any) -> None:
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]
    format = Format(None, next(each for each in CALLS if each.name == "qwen3-coder"))
    found = reply(format, "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", tools=tools)
    assert told(found)[2] == [("f", {"a": 1})]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<think>a</think>b", ("a", "b")),
        (" <think>\na</think>", ("\na", "")),
        ("<think></think>b", ("", "b")),
        ("<think>a", ("", "<think>a")),
        ("so <think>a</think>b", ("", "so <think>a</think>b")),
        ("a</think>b", ("", "a</think>b")),
        ("", ("", "")),
    ],
)
def test_thoughts_that_a_text_begins_with(text: str, wanted: tuple[str, str]) -> None:
    assert Thinking("<think>\n", "</think>").parted(text) == wanted


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/zip"},
        {"allOf": [{"$ref": "#/$defs/zip"}]},
        {"const": "12345"},
        {"anyOf": [{"const": "12345"}, {"const": "2"}]},
        {"anyOf": [{"oneOf": [{"type": "string"}]}]},
    ],
)
def test_digits_are_a_text_where_the_schema_has_texts_alone(schema: Any) -> None:
    parameters = {"properties": {"x": schema}, "$defs": {"zip": {"type": "string", "pattern": "^\\d{5}$"}}}
    tools = [{"type": "function", "function": {"name": "a", "parameters": parameters}}]
    format = Format(None, next(each for each in CALLS if each.name == "qwen3-coder"))
    parser = ReplyParser(format, tools)
    said = "<tool_call>\n<function=a>\n<parameter=x>\n12345\n</parameter>\n</function>\n</tool_call>"
    (call,) = Reply.of([*parser.feed(said), *parser.end()]).calls
    assert json.loads(call.arguments) == {"x": "12345"}


@pytest.mark.parametrize(
    ("schema", "text", "wanted"),
    [
        # behind references and choices, too
        ({"$ref": "#/$defs/name"}, "12", "12"),
        ({"$ref": "#/$defs/name"}, "null", None),
        ({"allOf": [{"$ref": "#/$defs/name"}, {"title": "Name"}]}, "12", "12"),
        ({"$ref": "#/$defs/count"}, "12", 12),
        ({"anyOf": [{"$ref": "#/$defs/count"}, {"type": "string"}]}, "12", 12),
        ({"anyOf": [{"$ref": "#/$defs/count"}, {"type": "string"}]}, "1.5", "1.5"),
        ({"anyOf": [{"$ref": "#/$defs/count"}, {"type": "string"}]}, '"12"', "12"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "string", "nullable": True}, "true", "true"),
        ({"anyOf": [{"$ref": "#/nowhere"}, {"type": "string"}]}, "12", 12),
        # as Python writes them, and a text that only looks so
        ({"type": "array"}, "['a', \"b'c\", None, True]", ["a", "b'c", None, True]),
        ({"type": "object"}, "{'a': {'b': (1, 2.5)}}", {"a": {"b": [1, 2.5]}}),
        ({}, "['a']", ["a"]),
        ({"type": "string"}, "['a']", "['a']"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "['a']", "['a']"),
        ({"type": "array"}, "[open('x')]", "[open('x')]"),
        ({"type": "array"}, "[" * 1000, "[" * 1000),
        ({"type": "object"}, "{['a']: 1}", "{['a']: 1}"),
        ({"type": "boolean"}, "True", True),
        ({}, "None", None),
        ({}, '"12"', "12"),
        ({}, "12", 12),
    ],
)
def test_a_value_has_the_type_that_the_schema_allows(schema: Any, text: str, wanted: Any) -> None:
    definitions = {
        "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": "integer"},
    }
    tools = [{"function": {"name": "a", "parameters": {"properties": {"x": schema}, "$defs": definitions}}}]
    for name, said in (
        ("qwen3-coder", f"<function=a>\n<parameter=x>\n{text}\n</parameter>\n</function>"),
        ("glm", f"<tool_call>a\n<arg_key>x</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"),
    ):
        assert told(reply(named(name), said, tools=tools))[2] == [("a", {"x": wanted})]
