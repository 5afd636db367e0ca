"""The field `prompt` of a body: texts, tokens, both mixed, or several of them, as tokens."""

from __future__ import annotations

from typing import Any

from pykvgraph.model.tokenizer import Tokenizer
from pykvgraph.openai.errors import invalid, no_room, no_text, too_many

_SHAPES = (
    '"prompt" must be a string, an array of tokens, an array of tokens and strings, an object with a '
    '"prompt_string", or an array of these'
)


def prompts_of(
    value: Any, tokenizer: Tokenizer, n_vocab: int, most: int = 1, n_ctx: int | None = None
) -> list[list[int]]:
    """One prompt or more, up to `most`. n_ctx: tokens that fit; what is longer for sure isn't encoded.

    Raises WireError.
    """
    if isinstance(value, list) and not _is_mixed(value):
        if not value:
            raise invalid('"prompt" must not be empty')
        if len(value) > most:
            raise too_many(f"the body has {len(value)} prompts", most)
        return [_one(each, tokenizer, n_vocab, n_ctx) for each in value]
    return [_one(value, tokenizer, n_vocab, n_ctx)]


def text_tokens(text: str, tokenizer: Tokenizer, first: bool = True, n_ctx: int | None = None) -> list[int]:
    """Text that may name control tokens. first: it begins the prompt. n_ctx: as in prompts_of()."""
    require_room(text, tokenizer, n_ctx)
    return tokenizer.encode(text, first, True)


def require_room(text: str, tokenizer: Tokenizer, n_ctx: int | None) -> None:
    """Raises WireError for a text that is too long for sure, without encoding it."""
    if n_ctx is not None and len(text) > n_ctx:
        n_least = tokenizer.least_tokens(text)
        if n_least > n_ctx:
            raise no_room(n_least, n_ctx, is_least=True)


def _is_mixed(value: list[Any]) -> bool:
    """Whether it is one prompt of tokens, or of tokens and texts."""
    return all(map(_is_part, value)) and not all(isinstance(each, str) for each in value)


def _is_part(value: Any) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool)


def _one(value: Any, tokenizer: Tokenizer, n_vocab: int, n_ctx: int | None) -> list[int]:
    if isinstance(value, dict) and isinstance(value.get("prompt_string"), str):
        if value.get("multimodal_data"):
            raise no_text("multimodal_data")
        value = value["prompt_string"]
    parts = value if isinstance(value, list) else [value]
    if not all(map(_is_part, parts)) or isinstance(value, int):
        raise invalid(_SHAPES)
    tokens: list[int] = []
    for i, part in enumerate(parts):
        if n_ctx is not None and len(tokens) > n_ctx:
            raise no_room(len(tokens), n_ctx, is_least=True)
        if isinstance(part, str):
            tokens += text_tokens(part, tokenizer, i == 0, n_ctx)
        elif 0 <= part < n_vocab:
            tokens.append(part)
        else:
            raise invalid(f"the prompt has a token {part}, and the model {n_vocab} tokens")
    if not tokens:
        raise invalid('"prompt" must not be empty')
    return tokens
