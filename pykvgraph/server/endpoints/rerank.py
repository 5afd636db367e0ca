"""/rerank: documents in the order in which they answer a query, in Jina's form and in TEI's."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from pykvgraph.context.pooling import RANK, number_of
from pykvgraph.context.ranking import pair_tokens
from pykvgraph.openai.errors import invalid, too_many, unsupported
from pykvgraph.openai.wire_json import dumps_in_parts
from pykvgraph.server.http.reply import WorkReply
from pykvgraph.server.requests.fields import Fields
from pykvgraph.server.requests.prompts import require_room
from pykvgraph.server.service import Service

_MANY = 16  # documents that are scored before others have their turn


def ranks(service: Service) -> bool:
    """Whether the server's pooling, or the file's own, is a reranker's."""
    return number_of(service.settings.pooling_number, service.engine.model.metadata) == RANK


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
        for text in (query, *documents):
            require_room(text, service.vocabulary.tokenizer, service.n_ctx)
        self._query = query
        self._service = service
        self._n_tokens = 0  # of the prompts that are scored
        self._is_over = False

    async def told(self) -> bytes:
        """JSON, best documents first; of equal ones the first."""
        scores = await self._scores()
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self._n_told]
        results = [self._result(i, scores[i]) for i in order]
        if self._is_teis:
            return await asyncio.to_thread(dumps_in_parts, results)
        usage = {"prompt_tokens": self._n_tokens, "total_tokens": self._n_tokens}
        told = {"model": self._model, "object": "list", "usage": usage, "results": results}
        return await asyncio.to_thread(dumps_in_parts, told)

    async def _scores(self) -> list[float]:
        loop, scores = asyncio.get_running_loop(), list[float]()
        try:
            for begin in range(0, len(self._documents), _MANY):
                some = self._documents[begin : begin + _MANY]
                scores += await loop.run_in_executor(self._service.embedder, self._scores_of, some)
        finally:
            self._is_over = True
        return scores

    def _scores_of(self, documents: list[str]) -> list[float]:
        """In the embedder's thread. Each prompt has the whole query, so that not all are made at once."""
        prompts = [self._prompt(each) for each in documents]
        self._n_tokens += sum(map(len, prompts))
        return self._service.engine._rank_all(prompts, self._adapters, lambda: not self._is_over)

    def _prompt(self, document: str) -> list[int]:
        prompt = pair_tokens(self._service.engine.model, self._query, document)
        self._service.require_read(prompt)
        return prompt

    def _result(self, index: int, score: float) -> dict[str, Any]:
        told: dict[str, Any] = {"index": index, "score" if self._is_teis else "relevance_score": score}
        if self._tells_text:
            text = self._documents[index]
            told |= {"text": text} if self._is_teis else {"document": {"text": text}}
        return told
