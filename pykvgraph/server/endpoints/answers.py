"""Endpoints that let the model go on with a text."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from pykvgraph.openai.completion import CompletionForm, TextForm
from pykvgraph.openai.echo import Echo, Scores
from pykvgraph.openai.errors import invalid
from pykvgraph.openai.form import Form
from pykvgraph.server.endpoints.echo import EchoReply, echoed_texts
from pykvgraph.server.endpoints.infill import infill_prompt
from pykvgraph.server.http.keys import asker_of
from pykvgraph.server.http.reply import JobReply, JsonReply
from pykvgraph.server.job import Job
from pykvgraph.server.requests.chat_request import with_response_format
from pykvgraph.server.requests.fields import Fields
from pykvgraph.server.requests.prompts import prompts_of
from pykvgraph.server.service import FINGERPRINT, Service


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
    """OpenAI's older one. `suffix` is ignored, as in llama-server."""
    asker, fields = asker_of(request), with_response_format(fields)
    prompts, params = _prompts(service, fields), service.sampling(fields)
    echoes = fields.flag("echo") and not asker.only_reads
    tells_probs = service.tells_probs(fields)
    service.require_few(len(prompts), params)  # before anything is decoded
    says_nothing = echoes and fields.get("max_tokens") == 0
    if says_nothing and fields.flag("stream"):
        raise invalid("Field 'max_tokens': with 0 there is nothing to stream; ask without `stream`")

    def answer(scores: Scores = ()) -> ASGIApp:
        echo = None
        if echoes:
            texts = echoed_texts(fields.get("prompt"), prompts, service.vocabulary.text)
            echo = Echo(texts, prompts, scores, params.n)
        form = TextForm(
            service.model_name,
            FINGERPRINT,
            service.vocabulary,
            echo,
            with_usage=wants_usage(fields),
            details=details_of(service, fields),
            with_timings=fields.flag("timings_per_token"),
        )
        if echo is not None and says_nothing:
            return JsonReply.of_long(form.whole(echo.samples(tells_probs, params.top_logprobs)))
        return reply_of(service, service.job(prompts, fields, asker, params), form, fields)

    if echoes and tells_probs:
        return EchoReply(service, prompts, fields, asker.key, params.top_logprobs, answer)
    return answer()


def details_of(service: Service, fields: Fields) -> CompletionForm | None:
    """What tells how the answer to a body was made, if that is wanted: its prompt, its settings, times."""
    wants = fields.flag("verbose", service.settings.verbose)
    return CompletionForm(service.model_name, service.vocabulary) if wants else None


def _prompts(service: Service, fields: Fields) -> list[list[int]]:
    vocabulary = service.vocabulary
    most = service.settings.max_prompts
    return prompts_of(
        fields.get("prompt"), vocabulary.tokenizer, vocabulary.n_vocab, most, service.most_of_prompt
    )


def _job(service: Service, request: Request, fields: Fields) -> Job:
    return service.job(_prompts(service, fields), fields, asker_of(request))


def wants_usage(fields: Fields) -> bool:
    """Whether a stream of OpenAI's forms ends with the usage."""
    return Fields(fields.object("stream_options")).flag("include_usage")


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
