"""Grammars that force a call: whatever the guide lets through is read back as a call of the tool."""

from __future__ import annotations

import functools
import json
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
from pykvgraph.sampling.token_ends import settled

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
    """What a model without preferences says under a grammar."""
    text = begun(tokenizer, grammar, seed, n_most)
    assert text is not None, f"no end after {n_most} tokens"
    return text


def begun(tokenizer: kvg.Tokenizer, grammar: str, seed: int, n_most: int) -> str | None:
    """The same; None: it has not ended."""
    rng = np.random.default_rng(chance.number(seed))
    sampler = kvg.Sampler(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed, grammar=grammar, tokenizer=tokenizer
    )
    data = b""
    for _ in range(n_most):
        token = sampler.sample(rng.normal(size=tokenizer.n_vocab).astype(np.float32))
        if tokenizer.is_eog(token):
            return data.decode()
        data += tokenizer.token_to_piece(token)
    return None


@pytest.mark.parametrize("name", [*WRITTEN, "none"])
@pytest.mark.parametrize("tool", [None, "get_weather"])
@pytest.mark.parametrize("cuts", [False, True])
def test_what_the_grammar_lets_through_is_a_call(
    tokenizer: Any, name: str, tool: str | None, cuts: bool
) -> None:
    """The whole call, or what follows its beginning and needs no more marks."""
    cut = functools.partial(settled, tokenizer) if cuts else None
    forced = forced_call(format_named(name), TOOLS, tool, spell=json.dumps, settled=cut)
    assert bool(forced.begun) == cuts and forced.called == (tool if cuts and tool else "")
    seen = set()
    for seed in range(4):
        text = forced.begun + said(tokenizer, forced.grammar, seed)
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
    forced = forced_call(format_named("hermes", True), TOOLS, "get_weather", "<think>\n", spell=json.dumps)
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
def test_text_up_to_a_mark(tokenizer: Any, mark: str) -> None:
    """It ends where the mark ends for the first time."""
    rules = _Rules(json.dumps)
    grammar = rules.text(rules.until(mark))
    rng = np.random.default_rng(chance.number(1))
    for _ in range(40):
        text = "".join(rng.choice([*mark, "x"], size=30)) + mark
        sampler = kvg.Sampler(grammar=grammar, tokenizer=tokenizer)
        for letter in text[: text.index(mark) + len(mark)]:
            accepted(tokenizer, sampler, letter)
        with pytest.raises(AssertionError):
            accepted(tokenizer, sampler, "x")


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [1]},
        {"properties": {"a": 5}},
        {"properties": {"a": {"type": "integer"}}, "required": 5},
    ],
)
def test_schemas_that_are_none(schema: Any) -> None:
    tools = [{"function": {"name": "f", "parameters": schema}}]
    with pytest.raises(kvg.InvalidArgumentError, match="must be"):
        forced_call(format_named("qwen3-coder"), tools, spell=json.dumps)


@pytest.mark.parametrize("schema", [True, {}])
def test_a_schema_that_allows_anything(tokenizer: Any, schema: Any) -> None:
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": schema}, "required": ["a"]}}}]
    forced = forced_call(format_named("qwen3-coder"), tools, spell=json.dumps)
    kinds: set[type] = set()
    for seed in range(100):  # ten say three kinds, mostly; objects of many members may find no end
        text = begun(tokenizer, forced.grammar, seed, 100)
        if text is not None:
            parser = ReplyParser(forced.format, tools)
            # a number as large as 1e999 is none that JSON can tell, and such a call is content
            calls = Reply.of([*parser.feed(text), *parser.end()]).calls
            kinds |= {type(json.loads(call.arguments)["a"]) for call in calls}
        if len(kinds) > 2:
            return
    pytest.fail(f"only {kinds}")


@pytest.mark.parametrize(
    ("tools", "name", "match"),
    [
        ([], None, "there are no tools"),
        (TOOLS, "other", "no tool has the name 'other'"),
    ],
)
def test_what_cannot_be_forced(tools: Any, name: str | None, match: str) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match=match):
        forced_call(format_named("hermes"), tools, name, spell=json.dumps)


def test_a_schema_that_leads_nowhere(tokenizer: Any) -> None:
    tools = [{"function": {"name": "a", "parameters": {"$ref": "#/nowhere"}}}]
    forced = forced_call(format_named("hermes"), tools, spell=json.dumps)
    with pytest.raises(kvg.InvalidArgumentError, match="can't be obeyed"):
        kvg.Sampler(grammar=forced.grammar, tokenizer=tokenizer)


def test_a_reference_to_another_parameter(tokenizer: Any) -> None:
    """The grammar and the reader agree that it is a text, without quotes."""
    texts = {"a": {"enum": ["x", "1"]}, "b": {"$ref": "#/properties/a"}}
    tools = [{"function": {"name": "f", "parameters": {"properties": texts, "required": ["a", "b"]}}}]
    forced = forced_call(format_named("qwen3-coder"), tools, spell=json.dumps)
    for seed in range(8):
        parser = ReplyParser(forced.format, tools)
        (call,) = Reply.of([*parser.feed(said(tokenizer, forced.grammar, seed)), *parser.end()]).calls
        assert set(json.loads(call.arguments).values()) <= {"x", "1"}
