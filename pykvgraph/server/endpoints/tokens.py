"""Endpoints that turn text into tokens and back, and messages into text."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp

from pykvgraph.checks import integers
from pykvgraph.server.http.reply import JsonReply
from pykvgraph.server.requests.chat_request import chat_request_of
from pykvgraph.server.requests.fields import Fields
from pykvgraph.server.requests.prompts import prompts_of
from pykvgraph.server.service import Service


def tokenize(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """content: text, or tokens and texts mixed, as a prompt may be. Or vLLM's form, whose text is prompt."""
    tokenizer = service.vocabulary.tokenizer
    if "prompt" in fields:
        tokens = tokenizer.encode(fields.text("prompt"), fields.flag("add_special_tokens", True), True)
        return JsonReply({"tokens": tokens, "count": len(tokens), "max_model_len": service.n_ctx})
    content = fields.get("content", "")
    if isinstance(content, list) and content:
        tokens = prompts_of([content], tokenizer, service.vocabulary.n_vocab)[0]
    else:
        text = fields.text("content") if content != [] else ""
        tokens = tokenizer.encode(text, fields.flag("add_special"), fields.flag("parse_special", True))
        tokens = tokens if text or fields.flag("add_special") else []
    if not fields.flag("with_pieces"):
        return JsonReply({"tokens": tokens})
    pieces = [{"id": token, "piece": _shown(service.vocabulary.piece(token))} for token in tokens]
    return JsonReply({"tokens": pieces})


def detokenize(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """tokens: their text, by llama-server's name and by vLLM's."""
    vocabulary = service.vocabulary
    tokens = integers(fields.array("tokens"), "tokens", 0, vocabulary.n_vocab - 1)
    text = vocabulary.text(tokens.tolist())
    return JsonReply({"content": text, "prompt": text})


def apply_template(service: Service, request: Request, fields: Fields) -> ASGIApp:
    """messages: the prompt that they become."""
    chat = chat_request_of(fields, service.settings)
    return JsonReply({"prompt": chat.prompt(service.template).whole})


def _shown(piece: bytes) -> str | list[int]:
    """Text, or bytes where they are none by themselves."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
