"""The beginning of a forced call beside the templates' own words: a model has learned from their tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf_parts import take_apart
from support.written_calls import TEMPLATES, written

import pykvgraph as kvg
from pykvgraph.reply.delta import Reply
from pykvgraph.reply.forced import WRITTEN, ForcedCall, forced_call
from pykvgraph.reply.format import Format
from pykvgraph.reply.formats import THINKING, format_of
from pykvgraph.reply.parser import ReplyParser
from pykvgraph.sampling.spelling import spelled
from pykvgraph.sampling.token_ends import settled

NAMES = ("get_weather", "get_time", "stop")
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Does.", "parameters": SCHEMA}}
    for name in NAMES
]
# one of each format that a call is forced in, and how much a call of get_weather has before its arguments
FRONTS = {
    "ByteDance-Seed-OSS": "<seed:tool_call>\n<function=get_weather>\n",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": '<|START_ACTION|>[\n    {"tool_call_id": "0", '
    '"tool_name": "get_weather", "parameters": ',
    "Kimi-K2-Instruct": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    "<|tool_call_argument_begin|>",
    "MiniMax-M2": '<minimax:tool_call>\n<invoke name="get_weather">\n',
    "NVIDIA-Nemotron-Nano-v2": '<TOOLCALL>[{"name": "get_weather", "arguments": ',
    "Qwen-Qwen2.5-7B-Instruct": '<tool_call>\n{"name": "get_weather", "arguments": ',
    "Qwen3-Coder": "<tool_call>\n<function=get_weather>\n",
    "fireworks-ai-llama-3-firefunction-v2": ' functools[{"name": "get_weather", "arguments": ',
    "inclusionai-ling-3.0-flash": "<tool_call>get_weather\n",
    "meetkai-functionary-medium-v3.1": "<function=get_weather>",
    "meta-llama-Llama-3.1-8B-Instruct": '{"name": "get_weather", "parameters": ',
    "mistralai-Mistral-Nemo-Instruct-2407": '[TOOL_CALLS][{"name": "get_weather", "arguments": ',
    "unsloth-Apriel-1.5": '<tool_calls>[{"name": "get_weather", "arguments": ',
    "unsloth-mistral-Devstral-Small-2507": "[TOOL_CALLS]get_weather[ARGS]",
}
NOT_FORCED = ', "id": "abcdefgh0"'  # which Nemo's template has behind the arguments
# of these texts tokens are made, as larger vocabularies have them: they reach over where arguments begin and
# end, and where names begin
CROSSING = ('{"', '▁{"', '>{"', ']{"', '":', "}}", '"}', '"}}', ">\n", "}]", "</", "}</", '"}</', "=g", ".g")


@pytest.fixture(scope="module", params=["small", "crossing"])
def tokenizer(request: pytest.FixtureRequest, stories: Path, tmp_path_factory: Any) -> Iterator[Any]:
    """That of stories260K, and the same with tokens for the texts above."""
    parts = take_apart(stories.read_bytes())
    if request.param == "crossing":
        for name, values in (
            ("tokens", [text.encode() for text in CROSSING]),
            ("scores", [0.0] * len(CROSSING)),
            ("token_type", [1] * len(CROSSING)),
        ):
            key = parts.find(f"tokenizer.ggml.{name}")
            assert key is not None and isinstance(key.value, list)
            key.value[-len(values) :] = values
    path = tmp_path_factory.mktemp("begun") / "model.gguf"
    parts.raw().write(path)
    yield kvg.Tokenizer.from_file(path)


def written_of(name: str) -> tuple[Format, str, str]:
    """Its format, the prompt with white space behind it, and a call as the template writes it."""
    prompt, said = written(name, TOOLS, [("get_weather", {"city": "Oslo"})])
    at = said.index(FRONTS[name])
    return (
        format_of(TEMPLATES[name]).without_thinking(),
        prompt + said[:at],
        said[at:].replace(NOT_FORCED, ""),
    )


def forced_of(tokenizer: kvg.Tokenizer, format: Format, prompt: str, *names: str) -> ForcedCall:
    tools = [each for each in TOOLS if each["function"]["name"] in names]  # type: ignore[index]
    cut, spell = functools.partial(settled, tokenizer), functools.partial(spelled, tokenizer)
    return forced_call(format, tools, prompt=prompt, spell=spell, settled=cut)


def encoded(tokenizer: kvg.Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, True, True)


def accepted(sampler: kvg.Sampler, tokenizer: kvg.Tokenizer, tokens: list[int]) -> tuple[int, int]:
    """How many of them may come next, one after the other; and what comes in place of the next one."""
    n = 0
    while True:
        logits = np.zeros(tokenizer.n_vocab, np.float32)
        logits[tokens[n : n + 1]] = 1.0
        said = sampler.sample(logits)
        if [said] != tokens[n : n + 1]:
            return n, said
        n += 1


def test_every_format_is_here() -> None:
    """But two: the templates of these write it otherwise, or no call at all."""
    assert {format_of(TEMPLATES[name]).name for name in FRONTS} == WRITTEN.keys() - {"gpt-oss", "granite"}


@pytest.mark.parametrize("name", FRONTS)
@pytest.mark.parametrize("names", [("get_weather",), NAMES])
def test_a_beginning_has_the_tokens_of_the_whole(tokenizer: Any, name: str, names: tuple[str, ...]) -> None:
    """And what the template goes on with passes the grammar, token for token, up to the end of the call."""
    format, prompt, call = written_of(name)
    forced = forced_of(tokenizer, format, prompt, *names)
    front = FRONTS[name] if len(names) == 1 else FRONTS[name].partition("get_weather")[0]
    assert forced.begun and front.startswith(forced.begun)
    assert len(front) - len(forced.begun) < 2  # a space or a sign, which a token has with the next one
    tokens, begun = encoded(tokenizer, prompt + call), encoded(tokenizer, prompt + forced.begun)
    assert tokens[: len(begun)] == begun
    sampler = kvg.Sampler(grammar=forced.grammar, tokenizer=tokenizer, temperature=0.0)
    n, last = accepted(sampler, tokenizer, tokens[len(begun) :])
    assert tokenizer.is_eog(last)
    n += len(begun)
    left = tokenizer.decode(tokens[n:]).strip()
    assert left in ("", WRITTEN[format.name].end)
    said = forced.begun + tokenizer.decode(tokens[len(begun) : n])
    parser = ReplyParser(forced.format, TOOLS, prompt)
    (found,) = Reply.of([*parser.feed(said), *parser.end()]).calls
    assert (found.name, found.arguments.replace(" ", "")) == ("get_weather", '{"city":"Oslo"}')


def test_nothing_is_certain_before_thoughts(tokenizer: Any) -> None:
    """Open ones, or such as may come; but behind their end, or beside an answer by a schema."""
    format = Format(THINKING[-1], format_of(TEMPLATES["Qwen-Qwen2.5-7B-Instruct"]).calls)
    cut, spell = functools.partial(settled, tokenizer), functools.partial(spelled, tokenizer)
    for prompt in ("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"):
        assert not forced_of(tokenizer, format, prompt, *NAMES).begun
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert forced_of(tokenizer, format, closed, *NAMES).begun == '<tool_call>\n{"name": "'
    own = forced_call(format, TOOLS, None, closed, {"type": "object"}, spell=spell, settled=cut)
    assert (own.begun, own.called) == ("", "")


def test_names_that_may_be_marks(tokenizer: Any) -> None:
    """Whether such a call can be read is known when it is there."""
    for name in ('a"b', "a>b", "a b"):
        tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}}]
        cut, spell = functools.partial(settled, tokenizer), functools.partial(spelled, tokenizer)
        forced = forced_call(Format(), tools, spell=spell, settled=cut)
        assert name in forced.begun and not forced.called
