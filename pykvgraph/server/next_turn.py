"""What a conversation's next prompt begins with is decoded when an answer ends, while its user reads."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import operator
from collections.abc import Callable
from typing import Any

from pykvgraph.errors import InvalidArgumentError, KVGraphError
from pykvgraph.openai.chat_output import ChatOutput
from pykvgraph.openai.sample import Sample
from pykvgraph.reply.delta import Reply
from pykvgraph.server.job import Job
from pykvgraph.server.requests.chat_request import ChatRequest
from pykvgraph.server.requests.prompts import text_tokens
from pykvgraph.server.service import Service

_log = logging.getLogger("pykvgraph.server")
# What a user might say. A token that holds the end of the template's words and the beginning of the user's is
# another one for each of these.
_WORDS = ("a", "\n1")


class NextTurn:
    """Of a chat that is answered. new_output: takes the answer apart, as for the client.

    Only the next turn of a user is prepared: behind calls of tools, their results come, and templates keep
    thoughts until the user speaks again. Nor is one behind an answer that says nothing, or that went on with
    words of the request, as nobody can tell how it comes back.
    """

    def __init__(
        self,
        service: Service,
        job: Job,
        chat: ChatRequest,
        new_output: Callable[[], ChatOutput],
    ) -> None:
        self._service = service
        self._job = job
        self._chat = chat
        self._new_output = new_output

    def prepare(self, sample: Sample) -> None:
        """The answer has ended; in a thread of its own. What goes wrong here, nobody waits for."""
        if sample.n_discarded or self._chat.begun is not None:
            return
        output = self._new_output()
        output.feed(sample.text)
        output.end()
        try:
            ids, spoken = self._ids(output.reply), [*sample.prompt, *sample.tokens]
            # what begins with all that was spoken is there: the rest is said with the user's words
            if ids[: len(spoken)] != spoken[: len(ids)] and len(ids) < self._service.n_ctx:
                self._job.prepare(ids, spoken)
        except KVGraphError as error:  # the engine has ended, perhaps
            _log.debug("the next turn is not prepared: %s", error)

    def _ids(self, reply: Reply) -> list[int]:
        """The tokens up to the next user's words; [] where nobody knows.

        They are others than what was spoken where the template drops some of it, thoughts most often, or
        where the text of an answer has other tokens when it is read than when it was said.
        """
        if reply.calls or not reply.content:
            return []
        try:
            texts = [self._text(reply, words) for words in _WORDS]
        except InvalidArgumentError:  # the template takes no such turn
            return []
        first, other = (text_tokens(text, self._service.vocabulary.tokenizer) for text in texts)
        are_same = map(operator.eq, first, other)
        return [token for token, _ in zip(first, itertools.takewhile(bool, are_same), strict=False)]

    def _text(self, reply: Reply, words: str) -> str:
        """With the answer as its client sends it back: with thoughts only if it does so with earlier ones."""
        chat = self._chat
        answer: dict[str, Any] = {"role": "assistant", "content": reply.content}
        if reply.reasoning and any(each.get("reasoning_content") for each in chat.messages):
            answer["reasoning_content"] = reply.reasoning
        messages = [*chat.messages, answer, {"role": "user", "content": words}]
        return dataclasses.replace(chat, messages=messages).prompt(self._service.template).text
