"""`echo` of /v1/completions: the answer begins with its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from pykvgraph.engine.prompt_scores import TokenScore, prompt_scores
from pykvgraph.openai.echo import Scores
from pykvgraph.openai.errors import invalid, no_room
from pykvgraph.server.http.reply import JsonReply, unless_gone
from pykvgraph.server.requests.fields import Fields
from pykvgraph.server.service import Service

_MOST_TOLD = 1 << 20  # likely tokens in the place of all tokens of a body's prompts


def echoed_texts(value: Any, prompts: list[list[int]], text_of: Callable[[list[int]], str]) -> list[str]:
    """The texts of a body's prompts, as they came; of tokens, what they say."""
    given = value if isinstance(value, list) and len(value) == len(prompts) else [value]
    return [
        text if isinstance(text, str) else text_of(prompt)
        for text, prompt in zip(given, prompts, strict=True)
    ]


class EchoReply:
    """Waits for the probabilities of all prompts' tokens, of which answer() makes the reply.

    n_top: of how many likely tokens it tells. A prompt waits in a thread that all share, as the engine takes
    one at a time. Raises WireError for a prompt that is too long, and for too many likely tokens.
    """

    def __init__(
        self,
        service: Service,
        prompts: list[list[int]],
        fields: Fields,
        key: bytes,
        n_top: int,
        answer: Callable[[Scores], ASGIApp],
    ) -> None:
        self._service = service
        self._prompts = prompts
        self._n_top = n_top
        self._answer = answer
        self._is_wanted = True
        # what is decoded here is found by the request behind it
        self._salt = service.salt(fields, key)
        self._adapters = service.adapters.of(fields)
        for prompt in prompts:
            if len(prompt) > service.n_ctx:
                raise no_room(len(prompt), service.n_ctx)
        n_told = n_top * sum(map(len, prompts))
        if n_told > _MOST_TOLD:
            raise invalid(
                f"Field 'logprobs': {n_top} likely tokens for each of the prompts' are {n_told}, over "
                f"{_MOST_TOLD}: ask for fewer"
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI calls it."""
        work = asyncio.ensure_future(self._scores())
        try:
            if not await unless_gone(work, receive):
                return
        finally:
            self._is_wanted = False
            work.cancel()
        try:
            scores = work.result()
            # in a thread, as a grammar takes a while to be read; whoever leaves meanwhile gets no answer
            reply = await self._service.slow_work.run(lambda: self._answer(scores), 0, receive)
        except ClientDisconnect:
            return
        except Exception as error:
            reply = JsonReply.of_error(error)
        await reply(scope, receive, send)

    async def _scores(self) -> Scores:
        loop, thread = asyncio.get_running_loop(), self._service.embedder
        return [await loop.run_in_executor(thread, self._scores_of, prompt) for prompt in self._prompts]

    def _scores_of(self, prompt: list[int]) -> list[TokenScore]:
        return prompt_scores(
            self._service.engine,
            prompt,
            self._n_top,
            salt=self._salt,
            adapters=self._adapters,
            is_wanted=lambda: self._is_wanted,
        )
