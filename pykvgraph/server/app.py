"""The application: which path leads where."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pykvgraph.openai.errors import as_wire, error_body, not_found
from pykvgraph.openai.wire_json import loads
from pykvgraph.server.endpoints import (
    about,
    adapters,
    answers,
    cells,
    chats,
    embeddings,
    rerank,
    slot_actions,
    tokens,
)
from pykvgraph.server.http import page_files
from pykvgraph.server.http.asker import NAME_HEADER, SAID_FIELD, SAID_HEADER
from pykvgraph.server.http.cors import Cors
from pykvgraph.server.http.keys import OF_RUN, SAID_OF_SCOPE, Keys, OfRun
from pykvgraph.server.http.reply import JsonReply
from pykvgraph.server.requests.fields import Fields
from pykvgraph.server.service import Service
from pykvgraph.server.slow_work import forget_values
from pykvgraph.server.structured_outputs import with_own_rules

Teller = Callable[[Service, Request], Awaitable[ASGIApp]]
Answerer = Callable[[Service, Request, Fields], ASGIApp]

_log = logging.getLogger("pykvgraph.server")
LARGE = 1 << 13  # bytes of a body that takes a while: the event loop goes on meanwhile
_MANY = 64  # commas, of prompts perhaps, each of which takes a while
# a name may be written with escapes
_SLOW = (
    b'"grammar"',
    b'"guided_',
    b'"structured_outputs"',
    b'"json_schema"',
    b'"tools"',
    b'"response_format"',
    SAID_FIELD.encode(),
    b"\\u",
)

WITHOUT_BODY: dict[tuple[str, str], Teller] = {
    ("GET", "/health"): about.health,
    ("GET", "/v1/health"): about.health,
    ("GET", "/models"): about.models,
    ("GET", "/v1/models"): about.models,
    ("GET", "/v1/models/{name:path}"): about.model,
    ("GET", "/props"): about.props,
    ("POST", "/props"): about.set_props,
    ("GET", "/tokenizer_info"): about.tokenizer_info,
    ("GET", "/slots"): about.slots,
    ("POST", "/slots/{id_slot}"): slot_actions.act,
    ("GET", "/metrics"): about.metrics,
    ("GET", "/lora-adapters"): adapters.told,
    ("POST", "/lora-adapters"): adapters.set_scales,
    ("GET", "/cells"): cells.cells,
}
WITH_BODY: dict[str, Answerer] = {
    "/tokenize": tokens.tokenize,
    "/detokenize": tokens.detokenize,
    "/apply-template": tokens.apply_template,
    "/completion": answers.completion,
    "/completions": answers.completion,
    "/v1/completions": answers.text_completion,
    "/infill": answers.infill,
    "/embedding": embeddings.embeddings,
    "/embeddings": embeddings.embeddings,
    "/v1/embeddings": embeddings.openai_embeddings,
    "/rerank": rerank.rerank,
    "/reranking": rerank.rerank,
    "/v1/rerank": rerank.rerank,
    "/v1/reranking": rerank.rerank,
    "/chat/completions": chats.chat_completion,
    "/v1/chat/completions": chats.chat_completion,
    "/chat/completions/input_tokens": chats.count_chat,
    "/v1/chat/completions/input_tokens": chats.count_chat,
    "/v1/messages": chats.messages,
    "/v1/messages/count_tokens": chats.count_messages,
    "/responses": chats.responses,
    "/v1/responses": chats.responses,
    "/responses/input_tokens": chats.count_responses,
    "/v1/responses/input_tokens": chats.count_responses,
}


def application(service: Service) -> ASGIApp:
    """All of it, with keys and CORS in front."""
    routes = [
        Route(path, _WithoutBody(service, teller), methods=[method])
        for (method, path), teller in WITHOUT_BODY.items()
    ]
    if service.settings.page:
        routes += [
            Route(path, _WithoutBody(service, page_files.page), methods=["GET"]) for path in page_files.FILES
        ]
    routes += [
        Route(path, _WithBody(service, answerer), methods=["POST"]) for path, answerer in WITH_BODY.items()
    ]
    router = Starlette(routes=routes, exception_handlers={HTTPException: no_such_path})
    router.router.redirect_slashes = False  # it would send the client to whatever its Host header says
    app: ASGIApp = Cors(Keys(router, service.settings.api_keys), service.settings.cors_origins)
    return OfRun(app, service.settings.run_token) if service.settings.run_token else app


class Endpoint:
    """Whatever is raised becomes an answer."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            reply = await self._reply(request)
        except ClientDisconnect:
            return
        except Exception as error:
            told = as_wire(error)
            if told.code == 500:
                _log.exception("%s failed", scope["path"])
            reply = JsonReply(error_body(scope["path"], told), told.code)
            forget_values(error)
        await reply(scope, receive, send)

    async def _reply(self, request: Request) -> ASGIApp:
        raise NotImplementedError


class _WithoutBody(Endpoint):
    """An endpoint that looks at no body, or reads it itself."""

    def __init__(self, service: Service, teller: Teller) -> None:
        self._service = service
        self._teller = teller

    async def _reply(self, request: Request) -> ASGIApp:
        if self._teller not in (about.health, about.models, about.model, page_files.page):
            self._service.engine  # noqa: B018 which says so while the model is loaded
        return await self._teller(self._service, request)


class _WithBody(Endpoint):
    """An endpoint that gets a JSON object."""

    def __init__(self, service: Service, answerer: Answerer) -> None:
        self._service = service
        self._answerer = answerer

    async def _reply(self, request: Request) -> ASGIApp:
        async with self._service.bodies.of(request) as body:
            return await self._answer(request, body)

    async def _answer(self, request: Request, body: bytearray) -> ASGIApp:
        self._service.engine  # noqa: B018 which says so while the model is loaded

        def answer() -> ASGIApp:
            fields = with_own_rules(Fields(loads(body)))
            if OF_RUN in request.scope and SAID_HEADER in request.headers:
                request.scope[SAID_OF_SCOPE] = tuple(fields.array(SAID_FIELD))
            return self._answerer(self._service, request, fields)

        name = request.headers.get(NAME_HEADER) if OF_RUN in request.scope else None
        if name is None:
            return await self._read(answer, body, request)
        self._service.tell_reading(name, True)
        try:
            return await self._read(answer, body, request)
        finally:
            self._service.tell_reading(name, False)

    async def _read(self, answer: Callable[[], ASGIApp], body: bytearray, request: Request) -> ASGIApp:
        """In a thread, where it takes a while."""
        is_many = len(body) > LARGE or body.count(b",") > _MANY
        if is_many or any(sign in body for sign in _SLOW):
            return await self._service.slow_work.run(answer, len(body), request.receive)
        return answer()


async def no_such_path(request: Request, error: Exception) -> Any:
    """What Starlette calls for one."""
    told = not_found()
    return JsonReply(error_body(request.url.path, told), told.code)
