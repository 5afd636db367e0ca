"""/rerank: documents in the order in which they answer a query, in Jina's form and in TEI's."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from pykvgraph.context.pooling import RANK, number_of
from pykvgraph.context.ranking import pair_tokens
from pykvgraph.openai.errors import invalid, no_room, too_many, unsupported
from pykvgraph.openai.wire_json import dumps_in_parts
from pykvgraph.server.http.reply import WorkReply
from pykvgraph.server.requests.fields import Fields
from pykvgraph.server.requests.prompts import require_room
from pykvgraph.server.service import Service
from pykvgraph.server.settings import POOLING_NAMES

_MANY = 16  # documents that are scored before others have their turn


def ranks(service: Service) -> bool:
    """Whether the server's pooling, or the file's own, is a reranker's."""
    settings = service.settings
    wanted = POOLING_NAMES.index(settings.pooling) if settings.pooling else -1
    return number_of(wanted, service.engine.model.metadata) == RANK


def rerank(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """documents: Jina's form, an object with results; texts: TEI's, an array."""
    if not ranks(service):
        raise unsupported("This server does not support reranking. Start it with `--reranking`")
    return WorkReply(_Scoring(service, fields).told)


class _Scoring:
    """The scores of a body's documents. Raises WireError for a body that asks otherwise."""

    def __init__(self, service: Service, fields: Fields) -> None:
        self._is_teis = "texts" in fields
        if "query" not in fields:
            raise invalid('"query" must be provided')
        query = fields.text("query")
        documents = fields.get("documents", fields.get("texts"))
        if not isinstance(documents, list) or not all(isinstance(each, str) for each in documents):
            documents = []
        if not documents:
            raise invalid('"documents" must be a non-empty string array')
        if len(documents) > service.settings.max_prompts:
            raise too_many(f"the body has {len(documents)} documents", service.settings.max_prompts)
        self._documents: list[str] = documents
        self._n_told = fields.integer("top_n", len(documents), 1)
        self._tells_text = fields.flag("return_text" if self._is_teis else "return_documents")
        self._model = fields.text("model", service.model_name)
        self._adapters = service.adapters.of(fields)
        self._prompts = [self._prompt(service, query, each) for each in documents]
        self._service = service
        self._is_over = False

    async def told(self) -> bytes:
        """JSON, best documents first; of equal ones the first."""
        scores = await self._scores()
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self._n_told]
        results = [self._result(i, scores[i]) for i in order]
        if self._is_teis:
            return b"".join([dumps_in_parts(results)])
        n_tokens = sum(map(len, self._prompts))
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return dumps_in_parts({"model": self._model, "object": "list", "usage": usage, "results": results})

    async def _scores(self) -> list[float]:
        loop, scores = asyncio.get_running_loop(), list[float]()
        engine = self._service.engine
        try:
            for begin in range(0, len(self._prompts), _MANY):
                some = self._prompts[begin : begin + _MANY]
                scores += await loop.run_in_executor(
                    self._service.embedder, engine._rank_all, some, self._adapters, lambda: not self._is_over
                )
        finally:
            self._is_over = True
        return scores

    @staticmethod
    def _prompt(service: Service, query: str, document: str) -> list[int]:
        for text in (query, document):
            require_room(text, service.vocabulary.tokenizer, service.n_ctx)
        prompt = pair_tokens(service.engine.model, query, document)
        if len(prompt) > service.n_ctx:
            raise no_room(len(prompt), service.n_ctx)
        return prompt

    def _result(self, index: int, score: float) -> dict[str, Any]:
        told: dict[str, Any] = {"index": index, "score" if self._is_teis else "relevance_score": score}
        if self._tells_text:
            text = self._documents[index]
            told |= {"text": text} if self._is_teis else {"document": {"text": text}}
        return told
