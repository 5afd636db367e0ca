"""Texts in Lark, where control tokens stand for their names."""

from __future__ import annotations

import re
from typing import Any

from pykvgraph.model.tokenizer import Tokenizer
from pykvgraph.sampling.guide_text import literal, special

_CONTROL = 8  # libllama's attribute of a token


def spelled(tokenizer: Tokenizer, text: str) -> str:
    """A text in Lark. A guide takes a control token for no text, so its name must be written as its id."""
    names = tokenizer._ask(_controls_in, tokenizer, text)
    if not names:
        return literal(text)
    longest_first = sorted(map(re.escape, names), key=len, reverse=True)
    parts = re.split(f"({'|'.join(longest_first)})", text)
    return " ".join(special(names[part]) if part in names else literal(part) for part in parts if part)


def _controls_in(vocab: Any, tokenizer: Tokenizer, text: str) -> dict[str, int]:
    """The control tokens in a text, by name."""
    return {
        tokenizer.token_to_piece(token, special=True).decode("utf-8", "replace"): token
        for token in set(tokenizer.encode(text, add_special=False, parse_special=True))
        if tokenizer._llama.llama_vocab_get_attr(vocab, token) & _CONTROL
    }
