"""SmolLM2's chat template: the text and the tokens that llama-cpp-python makes of messages."""

from __future__ import annotations

from typing import Any

import pytest
from support.real import Libllama, names_of, prompt_of, template_of

import pykvgraph as kvg
from pykvgraph.chat import Conversation
from pykvgraph.chat.chat_template import ChatTemplate

SYSTEM = {"role": "system", "content": "Answer in one word."}
HI = {"role": "user", "content": "Hi!\n\nIs <|im_end|> a word? Ещё: 日本語 👍🏽"}
HELLO = {"role": "assistant", "content": " Hello.\n"}
ODD = {"role": "tool", "content": ""}


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize(
    "messages",
    [[HI], [SYSTEM, HI], [SYSTEM], [HI, HELLO, HI], [SYSTEM, HI, HELLO, HI, HELLO], [HI, SYSTEM], [ODD, HI]],
)
def test_rendered(smollm2: kvg.Model, messages: list[Any], add: bool) -> None:
    ours = ChatTemplate(template_of(smollm2), **names_of(smollm2))
    assert ours.render(messages, add_generation_prompt=add) == prompt_of(smollm2, messages, add=add)


@pytest.mark.parametrize("system", ["", "Answer in one word."])
def test_a_conversation_has_the_tokens_of_the_rendered_text(
    smollm2: kvg.Model, libllama: Libllama, system: str
) -> None:
    """But for control tokens that a message spells: there they stay text."""
    said = {**HI, "content": "Hi!\n\nЕщё: 日本語 👍🏽"}  # noqa: RUF001
    messages = [said] if not system else [{"role": "system", "content": system}, said]
    with kvg.Context(smollm2, n_ctx=256) as ctx:
        conversation = Conversation(ctx, system=system)
        piece, *_ = conversation.ask(said["content"], kvg.SamplingParams(max_tokens=1))
        expected = libllama.model.encode(prompt_of(smollm2, messages), parse_special=True)
        assert conversation.ids == [*expected, piece.token]
