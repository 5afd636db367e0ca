# ruff: noqa: RUF001  # marks of models have fullwidth bars
"""Calls of tools as chat templates write them: what a model is shown to have said."""

from __future__ import annotations

import functools
import json
import lzma
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pykvgraph.chat.chat_template import ChatTemplate
from pykvgraph.reply.formats import THINKING, format_of

DATA = Path(__file__).parents[1] / "data" / "chat_templates.json.xz"
TEMPLATES: dict[str, str] = json.loads(lzma.decompress(DATA.read_bytes()))["templates"]
# they show a model its tools, or not even these, but no call that it made
WITHOUT_CALLS = {
    "HuggingFaceTB-SmolLM3-3B",
    "LFM2-8B-A1B",
    "LFM2.5-Instruct",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "google-gemma-2-2b-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
# the system's words come behind the conversation
TURNED_AROUND = {"CohereForAI-c4ai-command-r-plus-tool_use"}
WITH_CALLS = sorted(TEMPLATES.keys() - WITHOUT_CALLS - TURNED_AROUND)
# the wire's own form: arguments as text
TAKES_TEXT = {"meetkai-functionary-medium-v3.2"}
# what ends a turn with calls, where it isn't what ends one without
_ENDS = (
    "<|close|>message<|sep|><|end_of_msg|>",
    "<|tool_response>",
    "<|eom_id|>",
    "<｜hy_eos:opensource｜>",
    "<|call|>",
)

Asked = Sequence[tuple[str, dict[str, Any]]]  # names and arguments


class Written(NamedTuple):
    """prompt: up to where the answer begins. said: the answer, without what ends a turn."""

    prompt: str
    said: str


@functools.cache
def template_of(name: str) -> ChatTemplate:
    """One of the collection."""
    return ChatTemplate(TEMPLATES[name], bos_token="<s>", eos_token="</s>")


def written(name: str, tools: Any, asked: Asked, content: str = "", thought: str = "") -> Written:
    """An answer with calls, as a template writes it. Raises InvalidArgumentError where it refuses that."""
    template = template_of(name)
    question = {"role": "user", "content": "Q?"}
    prompt = template.render([question], tools=tools)
    calls = [
        {
            "id": f"abcdefgh{i}",
            "type": "function",
            "function": {"name": tool, "arguments": json.dumps(given) if name in TAKES_TEXT else given},
        }
        for i, (tool, given) in enumerate(asked)
    ]
    answer = {"role": "assistant", "content": content, "tool_calls": calls}
    if thought:
        answer["reasoning_content"] = thought
    text = template.render([question, answer], tools=tools, add_generation_prompt=False)
    if not text.startswith(prompt):  # what was thought in turns before isn't shown again
        for mark in [mark for each in THINKING for mark in (each.close, each.open)] * 2:
            prompt = prompt.rstrip().removesuffix(mark) if prompt.rstrip().endswith(mark) else prompt
    prompt = prompt if text.startswith(prompt) else prompt.rstrip("\n")
    assert text.startswith(prompt)
    said = _without_end(text[len(prompt) :], _end_of_plain(name))
    thinking = format_of(TEMPLATES[name]).thinking
    if thinking is not None and said.lstrip().startswith(thinking.close):  # no thoughts: it is the prompt's
        n = said.index(thinking.close) + len(thinking.close)
        prompt, said = prompt + said[:n], said[n:]
    return Written(prompt, said)


@functools.cache
def _end_of_plain(name: str) -> str:
    conversation = [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": "Plain."}]
    return template_of(name).render(conversation, add_generation_prompt=False).partition("Plain.")[2].strip()


def _without_end(said: str, end: str) -> str:
    ends = [end[mark.start() :] for mark in re.finditer(r"[<\[]", end)]
    said = said.partition("<｜end▁of▁sentence｜>")[0]  # some go on with another turn
    for mark in (*_ENDS, *(each for each in ends if not each.startswith("<|sep|>"))):
        if said.rstrip().endswith(mark):
            return said.rstrip().removesuffix(mark)
    return said
