"""For tests of conversations: a chat template, contexts, and what a conversation's tokens say."""

from __future__ import annotations

from typing import Any

import numpy as np

import pykvgraph as kvg
from pykvgraph.chat import Conversation
from pykvgraph.model.gguf_file import TEMPLATE_KEY
from pykvgraph.sequence.sequence import checkpoint_cells
from support.judge import nmse

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
OPTIONS: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "n_threads": 1}
SYSTEM = "Be kind."
GREEDY = kvg.SamplingParams(max_tokens=12)


def with_template(model: kvg.Model, template: str | None) -> kvg.Model:
    """The same model, as if its file had this template."""
    metadata = {key: value for key, value in model.metadata.items() if key != TEMPLATE_KEY}
    model.__dict__["metadata"] = metadata | ({} if template is None else {TEMPLATE_KEY: template})
    return model


def opened(model: kvg.Model, n_ctx: int = 1024, **options: Any) -> kvg.Context:
    """A context with room for checkpoints."""
    room = {"checkpoint_cells": checkpoint_cells(model), "n_batch": 64}
    return kvg.Context(model, n_ctx=n_ctx, **(OPTIONS | room | options))


def ask(conversation: Conversation, message: str, params: kvg.SamplingParams = GREEDY) -> str:
    """The answer."""
    return "".join(piece.text for piece in conversation.ask(message, params))


def text_of(model: kvg.Model, ids: list[int]) -> str:
    """With the names of control tokens, and without SentencePiece's space after the one that ends."""
    names = {1: b"<s>", 2: b"</s>"}
    data = b"".join(names.get(id) or model.tokenizer.token_to_piece(id) for id in ids)
    return data.decode("utf-8", "replace").replace("</s> ", "</s>")


def greedy(model: kvg.Model, ids: list[int], n: int) -> list[int]:
    """The next n tokens by the likeliest each time, each from a text that is decoded anew."""
    said: list[int] = []
    with kvg.Context(model, n_ctx=2048, n_batch=2048, **OPTIONS) as ctx:
        for _ in range(n):
            batch = kvg.Batch()
            batch.extend([*ids, *said], 0)
            ctx.reset()
            said.append(int(ctx.decode_last(batch).argmax()))
    return said


def require_rows_of(conversation: Conversation, ctx: kvg.Context, model: kvg.Model) -> None:
    """Each cell has K of the token at its position, as layer 0 makes it of that token alone."""
    n = ctx.kv.seq_pos_max(0) + 1
    ids = conversation.ids[:n]
    view = ctx.kv.cells()
    used = np.flatnonzero(view.seq[:, 0])  # others are held for texts that the conversation has left
    assert sorted(view.pos[used].tolist()) == list(range(n))
    with kvg.Context(model, n_ctx=max(n, 1), n_batch=max(n, 1), **OPTIONS) as fresh:
        batch = kvg.Batch()
        batch.extend(ids, 0)
        fresh.decode(batch)
        expected = fresh.kv.read_k(0)
    assert nmse(ctx.kv.read_k(0)[used], expected[view.pos[used]]) <= 1e-6
