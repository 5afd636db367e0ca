"""/embeddings, llama-server's and OpenAI's: texts as vectors."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.types import ASGIApp

from pykvgraph.context.pooling import Pooling, pooling_of
from pykvgraph.openai.errors import invalid, no_text, unsupported
from pykvgraph.openai.wire_json import dumps, dumps_in_parts
from pykvgraph.server.endpoints.rerank import ranks
from pykvgraph.server.http.reply import WorkReply
from pykvgraph.server.requests.fields import Fields
from pykvgraph.server.requests.prompts import prompts_of
from pykvgraph.server.service import Service

_INT16 = 32760.0
_HIGHEST_NORM = 1000
_MANY = 16  # prompts that are embedded before others have their turn
_Array = npt.NDArray[np.float32]


def embeddings(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """llama-server's: an array with the vectors of each text; one, or with pooling "none" of each token."""
    pooling = _pooling(service)
    return WorkReply(_Work(service, fields, pooling).array)


def openai_embeddings(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """OpenAI's. A body with `content` in place of `input` is answered in llama-server's form."""
    pooling = _pooling(service)
    if pooling == "none":
        raise invalid("Pooling type 'none' is not OAI compatible. Please use a different pooling type")
    work = _Work(service, fields, pooling)
    return WorkReply(work.object if "input" in fields else work.array)


def _pooling(service: Service) -> Pooling:
    """The server's, or the file's own. Raises WireError without --embeddings."""
    settings = service.settings
    if ranks(service):
        raise invalid(
            "this server reranks texts and embeds none: ask /rerank, or start it with `--pooling mean`, "
            "`cls` or `last`"
        )
    if not settings.embeddings and not service.engine.model.encodes:
        raise unsupported("This server does not support embeddings. Start it with `--embeddings`")
    return pooling_of(settings.pooling_number, service.engine.model.metadata)


class _Work:
    """The vectors of a body's texts. Raises WireError for a body that asks otherwise.

    A few texts at a time, between which others have their turn, and a client that has gone ends the work.
    """

    def __init__(self, service: Service, fields: Fields, pooling: Pooling) -> None:
        if "input" not in fields and "content" not in fields:
            raise invalid('"input" or "content" must be provided')
        vocabulary = service.vocabulary
        value = _as_prompts(fields.get("input", fields.get("content")))
        self._adapters = service.adapters.of(fields)
        most = service.settings.max_prompts
        self._prompts = prompts_of(value, vocabulary.tokenizer, vocabulary.n_vocab, most, service.n_ctx)
        for prompt in self._prompts:
            service.require_read(prompt)
        self._format = fields.text("encoding_format", "float")
        if self._format not in ("float", "base64"):
            raise invalid("The format to return the embeddings in. Can be either float or base64")
        n_embd = service.engine.model.n_embd
        self._n_dimensions = fields.integer("dimensions", n_embd, 1, n_embd)
        self._norm = fields.integer("embd_normalize", service.settings.embd_normalize, -1, _HIGHEST_NORM)
        self._model = fields.text("model", service.model_name)
        self._engine = service.engine
        self._embedder = service.embedder
        self._pooling = pooling
        self._is_over = False

    async def array(self) -> bytes:
        """As llama-server tells them. JSON."""
        return b"[%b]" % b",".join(await self._each_told(self._as_array))

    async def object(self) -> bytes:
        """As OpenAI does. JSON."""
        n_tokens = sum(map(len, self._prompts))
        usage = dumps({"prompt_tokens": n_tokens, "total_tokens": n_tokens})
        data = b",".join(await self._each_told(self._as_object))
        return b'{"model":%b,"object":"list","usage":%b,"data":[%b]}' % (dumps(self._model), usage, data)

    async def _each_told(self, told: Callable[[int, _Array], Any]) -> list[bytes]:
        """The JSON of each text's vectors: (1, n_embd), normalized, or (n_tokens, n_embd)."""
        loop, found = asyncio.get_running_loop(), list[bytes]()

        def tell(prompts: list[list[int]]) -> list[bytes]:
            whole = self._engine._embed_all(prompts, self._pooling, self._adapters, lambda: not self._is_over)
            vectors = [each[..., : self._n_dimensions] for each in whole]
            if self._pooling != "none":
                vectors = [normalized(each, self._norm)[None] for each in vectors]
            return [dumps_in_parts(told(len(found) + i, each)) for i, each in enumerate(vectors)]

        try:
            for prompts in _together(self._prompts, self._engine.context.n_batch):
                found += await loop.run_in_executor(self._embedder, tell, prompts)
        finally:
            self._is_over = True
        return found

    def _as_array(self, index: int, vectors: _Array) -> Any:
        return {"index": index, "embedding": vectors.tolist()}

    def _as_object(self, index: int, vectors: _Array) -> Any:
        return {**self._told(vectors[0]), "index": index, "object": "embedding"}

    def _told(self, vector: _Array) -> dict[str, Any]:
        if self._format == "float":
            return {"embedding": vector.tolist()}
        text = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return {"embedding": text, "encoding_format": "base64"}


def _as_prompts(value: Any) -> Any:
    """An input, where each `{"content": [...]}` is the text that its parts are together.

    Raises WireError for parts that are no text.
    """
    return list(map(_as_prompt, value)) if isinstance(value, list) else _as_prompt(value)


def _as_prompt(value: Any) -> Any:
    if not isinstance(value, dict) or "content" not in value:
        return value
    texts = []
    for part in Fields(value).array("content"):
        kind = Fields(part).text("type")
        if kind != "text":
            raise no_text(kind)
        if "text" not in part:
            raise invalid("a part of a content must have a text")
        texts.append(Fields(part).text("text"))
    return "".join(texts)


def _together(prompts: list[list[int]], most: int) -> Iterator[list[list[int]]]:
    """Prompts with so many tokens at most, or one, and 16 prompts at most."""
    group: list[list[int]] = []
    n = 0
    for prompt in prompts:
        if group and (n + len(prompt) > most or len(group) == _MANY):
            yield group
            group, n = [], 0
        group.append(prompt)
        n += len(prompt)
    yield group


def normalized(vector: _Array, norm: int) -> _Array:
    """Divided by its p-norm. norm: p; -1: as it is; 0: the largest component is 32760, as of an int16."""
    if norm < 0:
        return vector
    sizes = np.abs(vector.astype(np.float64))
    most = sizes.max()
    if most == 0:
        return vector
    length = most / _INT16 if norm == 0 else most * ((sizes / most) ** norm).sum() ** (1 / norm)
    divided: _Array = (vector / length).astype(np.float32)
    return divided
