"""Endpoints that answer conversations."""

from __future__ import annotations

import functools
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from pykvgraph.context.common_length import common_length
from pykvgraph.engine.types import Pin
from pykvgraph.openai.blocks import BlockForm
from pykvgraph.openai.chat_completion import ChatForm
from pykvgraph.openai.errors import TOO_LONG, WireError
from pykvgraph.openai.messages import MessageWriter
from pykvgraph.openai.responses import ResponseWriter
from pykvgraph.server.chat_job import begun_tokens, chat_job, count_tokens, tokens_without
from pykvgraph.server.endpoints.answers import details_of, reply_of, wants_usage
from pykvgraph.server.http.keys import asker_of
from pykvgraph.server.http.reply import JsonReply
from pykvgraph.server.requests.cache_control import TTLS, breakpoints_of
from pykvgraph.server.requests.context_edits import EditedBody, edited
from pykvgraph.server.requests.fields import Fields
from pykvgraph.server.requests.messages_request import chat_of_messages
from pykvgraph.server.requests.responses_request import asked_of_responses, chat_of_responses
from pykvgraph.server.requests.truncation import truncated
from pykvgraph.server.service import FINGERPRINT, Service


def chat_completion(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """OpenAI's, of a conversation."""
    chat = chat_job(service, fields, asker_of(request))
    for sample in chat.job.samples:
        sample.without = functools.partial(tokens_without, service, fields)
    form = ChatForm(
        service.model_name,
        FINGERPRINT,
        service.vocabulary,
        chat.new_output,
        with_usage=wants_usage(fields),
        with_timings=fields.flag("timings_per_token"),
        details=details_of(service, fields),
    )
    return reply_of(service, chat.job, form, fields)


def messages(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """Anthropic's."""
    fields, applied, _ = _edited(service, fields)
    chat_fields, breakpoints = chat_of_messages(fields), breakpoints_of(fields)

    def pins_of(tokens: list[int]) -> list[Pin]:
        begun = [begun_tokens(service, chat_of_messages(each.body)) for each in breakpoints]
        seconds = [TTLS[each.ttl] for each in breakpoints]
        return [Pin(max(common_length(a, tokens), 1), b) for a, b in zip(begun, seconds, strict=True)]

    chat = chat_job(service, chat_fields, asker_of(request), pins_of, hears_progress=True)
    writer = MessageWriter(service.model_name, [each.ttl for each in breakpoints], applied)
    form = BlockForm(writer, chat.new_output, service.vocabulary)
    return reply_of(service, chat.job, form, chat_fields)


def responses(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """OpenAI's newer one. Nothing is stored."""
    asked = asked_of_responses(fields)
    fields = _fitting(service, fields)
    chat = chat_job(service, fields, asker_of(request))

    def count(text: str) -> int:
        return len(service.vocabulary.tokenizer.encode(text, False))

    with_timings = fields.flag("timings_per_token")
    writer = ResponseWriter(service.model_name, asked, count, with_timings=with_timings)
    form = BlockForm(writer, chat.new_output, service.vocabulary)
    return reply_of(service, chat.job, form, fields)


def count_chat(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """How many tokens the prompt of a chat has."""
    return JsonReply({"input_tokens": count_tokens(service, fields), "object": "response.input_tokens"})


def count_messages(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """The same, of Anthropic's body; and of what it was before its edits."""
    body, applied, n_before = _edited(service, fields)
    told: dict[str, Any] = {"input_tokens": count_tokens(service, chat_of_messages(body))}
    if applied is not None:
        told["context_management"] = {"original_input_tokens": n_before}
    return JsonReply(told)


def _edited(service: Service, fields: Fields) -> EditedBody:
    return edited(fields, lambda body: count_tokens(service, chat_of_messages(body)))


def count_responses(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """The same, of a body for /v1/responses."""
    return count_chat(service, request, _fitting(service, fields))


def _fitting(service: Service, fields: Fields) -> Fields:
    """As a chat, of those items of a body for /v1/responses that fit."""

    def fits(body: Fields, n_tokens: int) -> bool:
        try:
            return count_tokens(service, chat_of_responses(body), n_tokens) <= n_tokens
        except WireError as error:
            if error.kind != TOO_LONG:
                raise
            return False

    return chat_of_responses(truncated(fields, service.n_ctx, fits))
