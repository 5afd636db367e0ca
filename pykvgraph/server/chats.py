"""Endpoints that answer conversations."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from pykvgraph.server.answers import key_of, reply_of
from pykvgraph.server.chat_completion import ChatForm
from pykvgraph.server.chat_job import chat_job, count_tokens
from pykvgraph.server.fields import Fields
from pykvgraph.server.reply import JsonReply
from pykvgraph.server.service import FINGERPRINT, Service


def chat_completion(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """OpenAI's, of a conversation."""
    chat = chat_job(service, fields, key_of(request))
    form = ChatForm(
        fields.text("model", service.model_name),
        FINGERPRINT,
        service.vocabulary,
        chat.new_output,
        with_usage=Fields(fields.object("stream_options")).flag("include_usage"),
        with_timings=fields.flag("timings_per_token"),
    )
    return reply_of(service, chat.job, form, fields)


def count_chat(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """How many tokens the prompt of a chat has."""
    return JsonReply({"input_tokens": count_tokens(service, fields), "object": "response.input_tokens"})
