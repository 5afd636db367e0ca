"""How a conversation becomes text: what stands before it, around each message, and behind each answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pykvgraph.chat.chat_template import ChatTemplate
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.model.gguf_file import TEMPLATE_KEY
from pykvgraph.model.model import Model

# private characters, which stand for a message and for an answer while a template is rendered
USER, ANSWER = "\ue000", "\ue001"


@dataclass(frozen=True)
class TurnFormat:
    """The texts of a conversation: front, first, answer, closing, later, answer, closing, later, ...

    front: the system prompt, and what comes before it. first, later: a turn up to its answer, with USER where
    the message goes. closing: what comes after an answer before the next turn. stop: texts that end an answer
    beside the model's own tokens. is_plain: whether the model has no chat template.

    These texts are never rendered again. So a turn that was said stays as it is when others follow or are
    removed, even where the template would write it otherwise later, as those do that leave out what a model
    thought.
    """

    front: str
    first: str
    later: str
    closing: str
    stop: tuple[str, ...] = ()
    is_plain: bool = False


def turn_format(model: Model, system: str) -> TurnFormat:
    """The format of the model's own chat template, or lines of User: and Assistant: when it has none.

    system: the system prompt, "" for none. A template that knows no system prompt gets it in front of the
    first message. Raises InvalidArgumentError for a template that can't be read or fails.
    """
    source = model._value(TEMPLATE_KEY)
    if not isinstance(source, str) or not source:
        return _plain(system)
    tokenizer = model.tokenizer
    bos, eos = tokenizer._name(tokenizer.bos), tokenizer._name(tokenizer.eos)
    return _of_template(ChatTemplate(source, bos_token=bos, eos_token=eos), system)


def _plain(system: str) -> TurnFormat:
    turn = f"User: {USER}\nAssistant:"
    return TurnFormat(f"{system}\n\n" if system else "", turn, turn, "\n", ("\nUser:",), is_plain=True)


def _of_template(template: ChatTemplate, system: str) -> TurnFormat:
    user, answer = {"role": "user", "content": USER}, {"role": "assistant", "content": ANSWER}
    before: list[Any] = [{"role": "system", "content": system}] if system else []
    begin = user
    try:
        whole = template.render([*before, user])
    except InvalidArgumentError:
        if not system:
            raise
        before, begin = [], {"role": "user", "content": f"{system}\n\n{USER}"}
        whole = template.render([begin])
    behind = template.render([*before, begin, answer, user]).rpartition(ANSWER)[2]
    closing = template.render([*before, begin, answer], add_generation_prompt=False).rpartition(ANSWER)[2]
    if not behind.startswith(closing) or USER in closing:  # the template ends otherwise than it goes on
        closing = ""
    later = behind[len(closing) :]
    if USER not in whole or USER not in later:
        raise InvalidArgumentError("the chat template leaves out the user's message")
    front = whole.removesuffix(later)
    if front == whole:  # the first turn looks otherwise than later ones
        front = whole[: whole.index(USER)]
    return TurnFormat(front, whole[len(front) :], later, closing)
