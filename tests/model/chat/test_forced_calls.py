"""Grammars that force a call: whatever libllama's sampler lets through is read back as a call of the tool."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import chance, where

import pykvgraph as kvg
from pykvgraph.reply.delta import Reply
from pykvgraph.reply.forced import WRITTEN, _Rules, forced_call
from pykvgraph.reply.format import Format
from pykvgraph.reply.formats import CALLS, THINKING
from pykvgraph.reply.parser import ReplyParser

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "São [1]^-"]},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
    },
    "required": ["city", "days"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "stop", "parameters": {"properties": {"now": {"type": "boolean"}}}},
    },
]
THINK = next(each for each in THINKING if each.open == "<think>")


def format_named(name: str, thinks: bool = False) -> Format:
    calls = next((each for each in CALLS if each.name == name), None)
    return Format(THINK if thinks else None, calls, calls.headers if calls else None)


@pytest.fixture(scope="module")
def tokenizer(stories: Path) -> Any:
    with kvg.Model(stories, device=where.device) as model:
        yield model.tokenizer


def said(tokenizer: kvg.Tokenizer, grammar: str, seed: int, n_most: int = 600) -> str:
    """What a model without preferences says under a grammar: one byte after another."""
    rng = np.random.default_rng(chance.number(seed))
    sampler = kvg.Sampler(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed, grammar=grammar, tokenizer=tokenizer
    )
    data = b""
    for _ in range(n_most):
        token = sampler.sample(rng.normal(size=tokenizer.n_vocab).astype(np.float32))
        if tokenizer.is_eog(token):
            break
        data += tokenizer.token_to_piece(token)
    else:
        pytest.fail(f"no end after {n_most} tokens: {data!r}")
    return data.decode(errors="replace")  # libllama takes a byte above F7 for the first of four


@pytest.mark.parametrize("name", [*WRITTEN, "none"])
@pytest.mark.parametrize("tool", [None, "get_weather"])
def test_what_the_grammar_lets_through_is_a_call(tokenizer: Any, name: str, tool: str | None) -> None:
    forced = forced_call(format_named(name), TOOLS, tool)
    seen = set()
    for seed in range(4):
        text = said(tokenizer, forced.grammar, seed)
        parser = ReplyParser(forced.format, TOOLS)
        reply = Reply.of([*parser.feed(text), *parser.end()])
        assert (reply.content, reply.reasoning) == ("", ""), text
        (call,) = reply.calls
        seen.add(call.name)
        if call.name == "get_weather":
            given = json.loads(call.arguments)
            assert given["city"] in SCHEMA["properties"]["city"]["enum"]  # type: ignore[index]
            assert isinstance(given["days"], int)
            assert given.get("exact") in (True, False, None)
            assert given.keys() <= {"city", "days", "exact"}
    assert seen <= ({tool} if tool else {"get_weather", "stop"})


def test_thoughts_may_come_first(tokenizer: Any) -> None:
    """The prompt has opened them: they end at their mark, and the call follows."""
    forced = forced_call(format_named("hermes", True), TOOLS, "get_weather", "<think>\n")
    prefix = "a < b </thi </ </think"
    sampler = kvg.Sampler(grammar=forced.grammar, tokenizer=tokenizer)
    text = ""
    for letter in prefix + ">":
        text += accepted(tokenizer, sampler, letter)
    assert text == prefix + ">"
    with pytest.raises(AssertionError):
        accepted(tokenizer, sampler, "x")


def accepted(tokenizer: kvg.Tokenizer, sampler: kvg.Sampler, letter: str) -> str:
    """The letter, if the sampler takes it though everything else is less likely."""
    token = next(i for i in range(tokenizer.n_vocab) if tokenizer.token_to_piece(i) == letter.encode())
    logits = np.zeros(tokenizer.n_vocab, np.float32)
    logits[token] = 1.0
    assert sampler.sample(logits) == token
    return letter


@pytest.mark.parametrize("mark", ["</think>", "aab", "abab", "]-^\\", "<<|"])
def test_text_up_to_a_mark(mark: str) -> None:
    """The rules, followed as an automaton, end where the mark ends for the first time."""
    rules = _Rules()
    state = rules.until("u", mark)
    machine = {}
    for line in rules.text("x").splitlines()[1:]:
        name, _, rule = line.partition(" ::= ")
        machine[name] = re.findall(r'(?:"((?:\\.|[^"\\])*)"|(\[(?:\\.|[^\]\\])*\]))(?: (u[\w-]+))?', rule)
    rng = np.random.default_rng(chance.number(1))
    for _ in range(200):
        letters = rng.choice([*mark, "x"], size=60)
        text = "".join(letters) + mark
        at, now = 0, state
        while now:
            letter, at = text[at], at + 1
            ways = machine[now]
            now = next(
                (to for given, _, to in ways if given and given.replace("\\\\", "\\") == letter), ways[-1][2]
            )
        assert at == text.index(mark) + len(mark)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [1]},
        {"properties": {"a": 5}},
        {"properties": {"a": {"enum": 5}}},
        {"properties": {"a": {"type": "integer"}}, "required": 5},
    ],
)
def test_schemas_that_are_none(schema: Any) -> None:
    tools = [{"function": {"name": "f", "parameters": schema}}]
    with pytest.raises(kvg.InvalidArgumentError, match="must be"):
        forced_call(format_named("qwen3-coder"), tools)


@pytest.mark.parametrize("schema", [True, {}])
def test_a_schema_that_allows_anything(tokenizer: Any, schema: Any) -> None:
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": schema}, "required": ["a"]}}}]
    forced = forced_call(format_named("qwen3-coder"), tools)
    kinds: set[type] = set()
    for seed in range(100):  # eight say three kinds, mostly
        parser = ReplyParser(forced.format, tools)
        deltas = [*parser.feed(said(tokenizer, forced.grammar, seed)), *parser.end()]
        # a number as large as 1e999 is none that JSON can tell, and such a call is content
        kinds |= {type(json.loads(call.arguments)["a"]) for call in Reply.of(deltas).calls}
        if len(kinds) > 2:
            return
    pytest.fail(f"only {kinds}")


@pytest.mark.parametrize(
    ("tools", "name", "match"),
    [
        ([], None, "there are no tools"),
        (TOOLS, "other", "no tool has the name 'other'"),
        ([{"function": {"name": "a", "parameters": {"$ref": "#/nowhere"}}}], None, "can't be made a grammar"),
    ],
)
def test_what_cannot_be_forced(tools: Any, name: str | None, match: str) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match=match):
        forced_call(format_named("hermes"), tools, name)
