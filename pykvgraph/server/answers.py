"""Endpoints that let the model go on with a text."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from pykvgraph.server.completion import CompletionForm
from pykvgraph.server.fields import Fields
from pykvgraph.server.form import Form
from pykvgraph.server.infill import infill_prompt
from pykvgraph.server.job import Job
from pykvgraph.server.keys import asker_of
from pykvgraph.server.prompts import prompts_of
from pykvgraph.server.reply import JobReply
from pykvgraph.server.service import FINGERPRINT, Service
from pykvgraph.server.text_completion import TextForm


def completion(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """llama-server's own."""
    return reply_of(service, _job(service, request, fields), _own_form(service, fields), fields)


def infill(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """What comes between a prefix and a suffix, in llama-server's own form."""
    n_batch = service.engine.context.n_batch
    settings = service.settings
    prompt = infill_prompt(
        fields, service.vocabulary, n_batch, settings.n_predict, service.n_ctx, settings.spm_infill
    )
    job = service.job([prompt], fields, asker_of(request))
    return reply_of(service, job, _own_form(service, fields), fields)


def _own_form(service: Service, fields: Fields) -> Form:
    return CompletionForm(
        service.model_name,
        service.vocabulary,
        with_tokens=fields.flag("return_tokens"),
        with_timings=fields.flag("timings_per_token"),
        fields=fields.texts("response_fields"),
    )


def text_completion(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """OpenAI's older one. `echo` and `suffix` are ignored, as in llama-server."""
    return reply_of(
        service,
        _job(service, request, fields),
        TextForm(service.model_name, FINGERPRINT, service.vocabulary),
        fields,
    )


def _job(service: Service, request: Request, fields: Fields) -> Job:
    vocabulary = service.vocabulary
    most = service.settings.max_prompts
    prompts = prompts_of(fields.get("prompt"), vocabulary.tokenizer, vocabulary.n_vocab, most, service.n_ctx)
    return service.job(prompts, fields, asker_of(request))


def reply_of(service: Service, job: Job, form: Form, fields: Fields) -> ASGIApp:
    """What a job says, in a form, as the body wants to have it."""
    settings = service.settings
    ping = fields.real("sse_ping_interval", settings.ping_seconds, -1.0, 1e6)
    return JobReply(
        job,
        form,
        streams=fields.flag("stream"),
        ping_seconds=max(ping, 0.0),
        io_seconds=settings.io_seconds,
    )
