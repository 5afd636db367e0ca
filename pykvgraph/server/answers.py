"""Endpoints that let the model speak: completions and chats."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from pykvgraph.server.chat_completion import ChatForm
from pykvgraph.server.chat_request import chat_request_of, with_response_format
from pykvgraph.server.completion import CompletionForm
from pykvgraph.server.errors import invalid
from pykvgraph.server.fields import Fields
from pykvgraph.server.formats import Form
from pykvgraph.server.job import Job
from pykvgraph.server.keys import KEY_OF_SCOPE
from pykvgraph.server.prompts import prompts_of, text_tokens
from pykvgraph.server.reply import JobReply
from pykvgraph.server.service import FINGERPRINT, Service
from pykvgraph.server.text_completion import TextForm


def completion(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """llama-server's own."""
    form = CompletionForm(
        service.model_name,
        service.vocabulary,
        with_tokens=fields.flag("return_tokens"),
        with_timings=fields.flag("timings_per_token"),
        fields=fields.texts("response_fields"),
    )
    return _reply(service, _job(service, request, fields), form, fields)


def text_completion(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """OpenAI's older one. `echo` and `suffix` are ignored, as in llama-server."""
    model = fields.text("model", service.model_name)
    return _reply(
        service, _job(service, request, fields), TextForm(model, FINGERPRINT, service.vocabulary), fields
    )


def chat_completion(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """OpenAI's, of a conversation."""
    fields = with_response_format(fields)
    chat = chat_request_of(fields, service.settings.template_variables)
    if "top_logprobs" in fields and not fields.flag("logprobs"):
        raise invalid("top_logprobs requires logprobs to be set to true")
    prompt = text_tokens(chat.prompt(service.template), service.vocabulary.tokenizer)
    job = service.job([prompt], fields, _key(request))
    form = ChatForm(
        fields.text("model", service.model_name),
        FINGERPRINT,
        service.vocabulary,
        prefill=chat.prefill,
        with_usage=Fields(fields.object("stream_options")).flag("include_usage"),
        with_timings=fields.flag("timings_per_token"),
    )
    return _reply(service, job, form, fields)


def _job(service: Service, request: Request, fields: Fields) -> Job:
    vocabulary = service.vocabulary
    prompts = prompts_of(fields.get("prompt"), vocabulary.tokenizer, vocabulary.n_vocab)
    return service.job(prompts, fields, _key(request))


def _key(request: Request) -> bytes:
    key: bytes = request.scope.get(KEY_OF_SCOPE, b"")
    return key


def _reply(service: Service, job: Job, form: Form, fields: Fields) -> ASGIApp:
    settings = service.settings
    ping = fields.real("sse_ping_interval", settings.ping_seconds, -1.0, 1e6)
    return JobReply(
        job,
        form,
        streams=fields.flag("stream"),
        ping_seconds=max(ping, 0.0),
        io_seconds=settings.io_seconds,
    )
