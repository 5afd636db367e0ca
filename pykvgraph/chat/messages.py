"""A list of messages, as OpenAI's API has them, as tokens: for `pykvgraph batch`."""

from __future__ import annotations

import itertools
from typing import Any

from pykvgraph.chat.turn_format import turn_format
from pykvgraph.chat.turn_tokens import TurnTokens
from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.model.model import Model


class MessageTokens:
    """Turns lists of messages into prompts, as the model's chat template writes them.

    What a message says can't become control tokens. Raises UnsupportedError for a model without a tokenizer.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._system: str | None = None
        self._tokens: TurnTokens
        model.tokenizer  # noqa: B018 which says what is missing

    def prompt(self, messages: Any) -> tuple[list[int], tuple[str, ...]]:
        """The tokens up to where the answer begins, and texts that end it.

        messages: {"role": ..., "content": text} each: "system", which may be missing, then "user" and
        "assistant" by turns, "user" last. Raises InvalidArgumentError for anything else, and for a chat
        template that can't be used.
        """
        system, said = _checked(messages)
        if system != self._system:
            self._tokens = TurnTokens(turn_format(self._model, system), self._model.tokenizer)
            self._system = system
        tokens = self._tokens
        ids = list(tokens.front)
        for i, (user, answer) in enumerate(itertools.zip_longest(said[::2], said[1::2])):
            ids += tokens.turn(user, is_first=i == 0).prompt
            if answer is not None:
                ids += [*tokens.cut([], answer), *tokens.closing]
        return ids, tokens.format.stop


def _checked(messages: Any) -> tuple[str, list[str]]:
    """The system prompt, and what was said by turns."""
    if not isinstance(messages, list) or not messages:
        raise InvalidArgumentError(f"messages must be a list of messages, got {shown(messages)}")
    for i, each in enumerate(messages):
        if not isinstance(each, dict) or not isinstance(each.get("content"), str):
            raise InvalidArgumentError(
                f'messages[{i}] must be {{"role": ..., "content": a text}}, got {shown(each)}'
            )
    has_system = messages[0].get("role") == "system"
    said = messages[has_system:]
    for i, each in enumerate(said, has_system):
        role = ("user", "assistant")[(i - has_system) % 2]
        if each.get("role") != role:
            raise InvalidArgumentError(
                f"messages[{i}] must be of the role {role!r}, got {shown(each.get('role'))}"
            )
    if len(said) % 2 == 0:
        raise InvalidArgumentError('messages: the last one must be of the role "user"')
    return messages[0]["content"] if has_system else "", [each["content"] for each in said]
