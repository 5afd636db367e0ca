"""Endpoints that tell of the server: health, models, props, slots, metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from pykvgraph.openai.errors import no_model, unavailable, unsupported
from pykvgraph.openai.form import now
from pykvgraph.server.http.reply import JsonReply
from pykvgraph.server.requests.fields import Fields
from pykvgraph.server.requests.sampling import told_briefly
from pykvgraph.server.service import FINGERPRINT, Service

_VOCABULARIES = ("none", "llama", "gpt2", "bert", "t5", "rwkv", "plamo2")  # as llama.cpp numbers them

_STARTED = now()


async def health(service: Service, request: Request) -> ASGIApp:
    """Whether the model is there."""
    service.engine  # noqa: B018 which says so where it can't be asked
    return JsonReply({"status": "ok"})


async def models(service: Service, request: Request) -> ASGIApp:
    """The one model, as the interfaces of OpenAI, Anthropic and Ollama list it."""
    name = service.model_name
    details = {"parent_model": "", "format": "gguf", "family": "", "families": [""]}
    of_ollama = {
        "name": name,
        "model": name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion"],
        "parameters": "",
        "details": {**details, "parameter_size": "", "quantization_level": ""},
    }
    pages = {"has_more": False, "first_id": name, "last_id": name}  # Anthropic's
    return JsonReply({"models": [of_ollama], "object": "list", "data": [_entry(service)], **pages})


async def model(service: Service, request: Request) -> ASGIApp:
    """The one model by its name or an alias, as OpenAI's interface tells it. Raises WireError for others."""
    wanted = request.path_params["name"]
    if wanted not in (service.model_name, *service.settings.aliases):
        raise no_model(wanted)
    return JsonReply(_entry(service) | {"id": wanted})


async def props(service: Service, request: Request) -> ASGIApp:
    """What the server was started with, and the model's template."""
    settings = service.settings
    settings_told = told_briefly(service.told(service.sampling(Fields({})), Fields({})))
    return JsonReply(
        {
            "default_generation_settings": {
                "params": settings_told,
                "n_ctx": service.n_ctx,
            },
            "total_slots": settings.n_slots,
            "model_alias": service.model_name,
            "model_path": settings.model_path,
            "modalities": {"vision": False, "video": False, "audio": False},
            "endpoint_slots": settings.slots,
            "endpoint_props": settings.props,
            "endpoint_metrics": settings.metrics,
            **_tokenizer(service),
            "build_info": FINGERPRINT,
            "is_sleeping": False,
        }
    )


async def tokenizer_info(service: Service, request: Request) -> ASGIApp:
    """vLLM's: by this lm-eval knows that /tokenize has tokens for it."""
    return JsonReply(_tokenizer(service))


async def set_props(service: Service, request: Request) -> ASGIApp:
    """There is nothing that can be changed; llama-server has nothing either."""
    if not service.settings.props:
        raise unsupported("This server does not support changing global properties. Start it with `--props`")
    return JsonReply({"success": True})


async def slots(service: Service, request: Request) -> ASGIApp:
    """Who is answered."""
    if not service.settings.slots:
        raise unsupported("This server does not support slots endpoint. Start it with `--slots`")
    if request.query_params.get("fail_on_no_slot") and service.slots.n_processing == service.slots.n:
        raise unavailable("no slot available")
    return JsonReply(service.slots.told(service.n_ctx))


async def metrics(service: Service, request: Request) -> ASGIApp:
    """For Prometheus."""
    if not service.settings.metrics:
        raise unsupported("This server does not support metrics endpoint. Start it with `--metrics`")
    # counting the cells waits for the engine's step, and the event loop must not
    text = await asyncio.to_thread(service.metrics.text)
    headers = {"Process-Start-Time-Unix": str(_STARTED)}  # llama-server's own, for those who count restarts
    return Response(text, media_type="text/plain; version=0.0.4", headers=headers)


def _tokenizer(service: Service) -> dict[str, Any]:
    tokenizer = service.vocabulary.tokenizer
    return {
        "chat_template": service.template.source,
        "bos_token": tokenizer._name(tokenizer.bos),
        "eos_token": tokenizer._name(tokenizer.eos),
    }


def _entry(service: Service) -> dict[str, Any]:
    """As OpenAI's interface has it, and llama-server's; Anthropic's has the last four fields."""
    name = service.model_name
    return {
        "id": name,
        "aliases": list(service.settings.aliases) or [name],
        "tags": list(service.settings.tags),
        "object": "model",
        "created": now(),
        "owned_by": "pykvgraph",
        "meta": _meta(service) if service.is_ready else None,
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",  # which stands for a date that nobody knows
        "lifecycle": "active",
    }


def _meta(service: Service) -> dict[str, Any]:
    model = service.engine.model
    kind = model._value("tokenizer.ggml.model")
    return {
        "vocab_type": _VOCABULARIES.index(kind) if kind in _VOCABULARIES else 0,
        "n_vocab": model.n_vocab,
        "n_ctx": service.n_ctx,
        "n_ctx_train": model.n_ctx_train,
        "n_embd": model.n_embd,
        "n_params": model.n_params,
        "size": model.weight_bytes,
    }
