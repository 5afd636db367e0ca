"""Calls as templates write them are read back: whole, cut at every byte, and broken off there."""

from __future__ import annotations

import codecs
import copy
import functools
import itertools
import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from support import chance
from support.written_calls import TEMPLATES, WITH_CALLS, Asked, Written, written

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.reply.delta import Delta, Reply
from pykvgraph.reply.formats import format_of
from pykvgraph.reply.parser import ReplyParser

SIZE = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
WRITE = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "body": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "exact": {"type": "boolean"},
        "digits": {"type": "array", "items": {"type": "integer"}},
        "names": {"type": "array", "items": {"type": "string"}},
        "options": {"type": "object"},
        "other": {},
        "label": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "size": {"$ref": "#/$defs/size"},
        "kind": {"enum": ["1", "2"]},
    },
    "required": ["path"],
    "$defs": {"size": SIZE},
}
TOOLS = [
    {"type": "function", "function": {"name": "write_file", "description": "Writes.", "parameters": WRITE}},
    {
        "type": "function",
        "function": {
            "name": "stop",
            "description": "Stops.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
WORDS = ("lemon", "zebra", "quartz", "velvet", "77123")  # in the values, and in no template
CONTENT = "First lemon.\nThen:"
MARKS = "marks"  # stands for all marks of the template's own format


def call(**given: Any) -> tuple[str, dict[str, Any]]:
    return "write_file", given


CASES: dict[str, Asked] = {
    "quotes": [call(path="a \"lemon\" 'c' \\ \\n", body='So "b"\n\tzebra.\r\n\'\'\'x\'\'\' """y"""')],
    "marks of others": [call(path="<b>&amp;</b>", body="[INST] {lemon} <|im_start|> </s> ```json\n```")],
    MARKS: [call(path="lemon", body="zebra {} quartz", count=77123)],
    "texts like JSON": [call(path="12", body="true", label="77123", kind="1")],
    "more of them": [call(path="[1, 2]", body='{"lemon": null}', count=3)],
    "unicode": [call(path="é 日本 😀 lemon", body="a\u2028zebra\u00a0c ｜▁")],  # noqa: RUF001
    "numbers": [call(path="lemon", count=-7, share=2.5, exact=False, size=77123, other=5)],
    "large numbers": [call(path="p", count=2**60, share=1e-07)],
    "null": [call(path="lemon", label=None, size=None, exact=True, body="zebra")],
    "nested": [
        call(
            path="p",
            digits=[1, 2, 77123],
            names=["lemon", "'b'", '"c"', "2"],
            options={"deep": {"b": [None, True, {"c": "zebra\ny"}]}},
            other=[1, {"k": "velvet"}],
        )
    ],
    "blank": [call(path="", body="  zebra \n", digits=[], options={}, names=[""])],
    "lines": [call(path="lemon", body="\nzebra\n\nquartz\n")],
    "nothing": [("stop", {})],
    "two": [call(path="lemon", count=77123), ("stop", {})],
    "the same twice": [call(path="lemon", body="zebra"), call(path="quartz", body="velvet")],
    "content": [call(path="zebra", count=77123)],
}

# what the templates leave out, or write so that nobody can tell what it was
ONE_CALL = {"GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B", "openai-gpt-oss-120b"}  # the first of several
REFUSES_TWO = {
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
}
WITHOUT_CONTENT = REFUSES_TWO | {  # beside calls
    "Cohere2MoE",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "MiniMax-M1",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",  # in another turn
    "mistralai-Mistral-Nemo-Instruct-2407",
    "muse-glimmer",
    "upstage-Solar-Open-100B",
}
AS_THOUGHT = {"openai-gpt-oss-120b"}  # content beside calls
OTHERWISE = {
    ("NVIDIA-Nemotron-Nano-v2", "content"),  # the call is in another turn, behind thoughts without an end
    ("llama-cpp-deepseek-r1", "content"),  # without the call
    ("LFM2.5-8B-A1B", "quotes"),  # Python's quotes around texts that have some
}
DROPS_NULL = {"MiniMax-M3"}  # in objects; in lists it is an empty element


def case_of(name: str, case: str) -> tuple[Asked, str]:
    """What is asked for, and the content beside it."""
    asked = CASES[case]
    if case == MARKS:
        format = format_of(TEMPLATES[name])
        thinking = format.thinking
        own = {thinking.open, thinking.close} if thinking else set()
        marks = " x ".join([*sorted(set(format.texts()) - own), "</parameter>", "</arg_value>", "</param>"])
        asked = [call(path="lemon", body=f"zebra {marks} quartz", count=77123)]
    return asked, CONTENT if case == "content" else ""


def without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_null(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return ["" if each is None else without_null(each) for each in value]
    return value


def expected(name: str, asked: Asked, content: str) -> tuple[str, str, Any]:
    """Content, thoughts and calls."""
    if name in ONE_CALL:
        asked = asked[:1]
    if name in DROPS_NULL:
        asked = [(tool, without_null(given)) for tool, given in asked]
    if name in AS_THOUGHT:
        return "", content, asked
    return "" if name in WITHOUT_CONTENT else content, "", asked


@functools.cache
def answers(name: str) -> list[tuple[str, Written, tuple[str, str, Any]]]:
    found = []
    for case in CASES:
        asked, content = case_of(name, case)
        if (name, case) in OTHERWISE:
            continue
        if name in REFUSES_TWO and len(asked) > 1:
            with pytest.raises(InvalidArgumentError):
                written(name, TOOLS, asked)
            continue
        found.append((case, written(name, TOOLS, asked, content), expected(name, asked, content)))
    return found


def parser_of(name: str, prompt: str) -> ReplyParser:
    ids = iter(range(100))
    return ReplyParser(format_of(TEMPLATES[name]), TOOLS, prompt, new_id=lambda: f"id{next(ids)}")


def told(found: Reply) -> str:
    """As JSON: 1 is not true. The order of arguments is the template's."""
    calls = [(each.name, json.loads(each.arguments)) for each in found.calls]
    return json.dumps((found.content.strip(), found.reasoning.strip(), calls), sort_keys=True)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_calls_are_read_back(name: str) -> None:
    for case, (prompt, said), wanted in answers(name):
        parser = parser_of(name, prompt)
        found = Reply.of([*parser.feed(said), *parser.end()])
        assert told(found) == json.dumps(wanted, sort_keys=True), (case, said)
        assert len({each.id for each in found.calls}) == len(found.calls)


@pytest.mark.parametrize("name", WITH_CALLS)
def test_cut_at_every_byte(name: str) -> None:
    """In two, and byte by byte: the same deltas together. On a commit a tenth of the places, each in turn."""
    for i, (case, (prompt, said), _) in enumerate(answers(name)):
        parser = parser_of(name, prompt)
        whole = Reply.of([*parser.feed(said), *parser.end()])
        data = said.encode()
        assert read(name, prompt, [data[n : n + 1] for n in range(len(data))]) == whole, case
        for n in range(i % chance.SHARE, len(data), chance.SHARE):
            assert read(name, prompt, [data[:n], data[n:]]) == whole, (case, n)


def read(name: str, prompt: str, pieces: list[bytes]) -> Reply:
    """As a detokenizer does: a character is told when it is whole."""
    parser, decoder = parser_of(name, prompt), codecs.getincrementaldecoder("utf-8")()
    deltas = [delta for piece in pieces for delta in parser.feed(decoder.decode(piece))]
    return Reply.of([*deltas, *parser.end()])


@pytest.mark.parametrize("name", WITH_CALLS)
def test_broken_off_at_every_byte(name: str) -> None:
    """Nothing that was said is lost, and arguments are as far as they came. On a commit: at each tenth."""
    for case, (prompt, said), _ in answers(name):
        if case == MARKS:
            continue
        parser = parser_of(name, prompt)
        whole = Reply.of([*parser.feed(said), *parser.end()])
        parser = parser_of(name, prompt)
        deltas: list[Delta] = []
        for n, letter in enumerate(said, 1):
            deltas += parser.feed(letter)
            if n % chance.SHARE:
                continue
            found = Reply.of([*deltas, *copy.deepcopy(parser).end()])
            together = " ".join(
                [found.content, found.reasoning, *(f"{each.name} {each.arguments}" for each in found.calls)]
            )
            for word in WORDS:
                assert together.count(word) == said[:n].count(word), (case, said[:n], found)
            for one, other in zip(found.calls, whole.calls, strict=False):
                assert one.name == other.name
                assert begins(other.arguments, one.arguments, said[:n]), (one, other)


def begins(whole: str, part: str, said: str) -> bool:
    """Whether the part is as the whole begins, but for the end of what was said, of which nobody knows yet
    whether it is a mark, or what it is the value of."""
    n = next((n for n in range(len(part)) if whole[n : n + 1] != part[n]), len(part))
    ends = {part[n:], part[n:].replace("\\n", "\n").replace('\\"', '"').replace("\\t", "\t")}
    return any(said.endswith(end) for end in ends)


def damaged(said: str, marks: Sequence[str], rng: random.Random) -> str:
    """With pieces left out, or said twice or elsewhere, and marks and signs in wrong places."""
    for _ in range(rng.randint(1, 4)):
        begin, at = rng.randrange(len(said) + 1), rng.randrange(len(said) + 1)
        end = begin + rng.randrange(30)
        piece = rng.choice([said[begin:end], rng.choice(marks), rng.choice("\"\\{}[]<>\n ':,")])
        said = rng.choice([said[:begin] + said[end:], said[:at] + piece + said[at:]])
    return said


def test_damaged_replies_are_read_alike_however_they_are_cut() -> None:
    rng = random.Random(chance.seed(1))
    for _ in range(4000 // chance.SHARE):
        name = rng.choice(WITH_CALLS)
        _, (prompt, said), _ = rng.choice(answers(name))
        said = damaged(said, format_of(TEMPLATES[name]).texts(), rng)
        parser = parser_of(name, prompt)
        whole = Reply.of([*parser.feed(said), *parser.end()])
        data = said.encode()
        places = sorted(rng.randrange(len(data) + 1) for _ in range(5))
        for cuts in ([0, *places, len(data)], range(len(data) + 1)):
            pieces = [data[a:b] for a, b in itertools.pairwise(cuts)]
            assert read(name, prompt, pieces) == whole, (name, said)


def test_the_bar_is_thirty_templates_of_ten_calls() -> None:
    assert len(WITH_CALLS) >= 30
    assert all(len(answers(name)) >= 10 for name in WITH_CALLS)
