"""Where tokens of a text end, by a tokenizer that always takes the longest token."""

from __future__ import annotations

from typing import Any

import pytest

from pykvgraph.sampling.token_ends import settled


class Longest:
    """words: texts of tokens; each byte is one, too. front: the bytes that it puts before a text."""

    def __init__(self, *words: str, front: bytes = b"") -> None:
        self._words = sorted((word.encode() for word in words), key=len, reverse=True)
        self._front = front
        self._pieces: list[bytes] = []

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        assert (add_special, parse_special) == (False, True)
        left, tokens = self._front + text.encode(), []
        while left:
            piece = next((word for word in self._words if left.startswith(word)), left[:1])
            left = left[len(piece) :]
            self._pieces.append(piece)
            tokens.append(len(self._pieces) - 1)
        return tokens

    def token_to_piece(self, token: int, *, special: bool) -> bytes:
        assert special
        return self._pieces[token]


class Changing(Longest):
    """Its tokens have other bytes than the text."""

    def token_to_piece(self, token: int, *, special: bool) -> bytes:
        return super().token_to_piece(token, special=special).replace(b"{", b"?")


@pytest.mark.parametrize(
    ("words", "text", "follows", "wanted"),
    [
        ((), '"arguments": ', ("{}", '{"'), '"arguments": '),
        ((' {"',), '"arguments": ', ('{"',), '"arguments":'),
        ((' {"',), '"arguments": ', ("{}",), '"arguments": '),
        ((' {"',), '"arguments": ', ("{}", '{"'), '"arguments":'),
        ((">{}", 'x>{"'), "<f=x>", ("{}", '{"'), "<f="),  # each token begins elsewhere
        (("é{",), "aé", ("{",), "a"),
        (("\xe9 ",), "é", ("b",), "é"),
        (("all of it{",), "all of it", ("{",), ""),
        (("{",), "", ("{",), ""),
    ],
)
def test_no_token_has_both(words: tuple[str, ...], text: str, follows: Any, wanted: str) -> None:
    for front in (b"", b" "):
        tokenizer: Any = Longest(*words, front=front)
        assert settled(tokenizer, text, follows) == wanted


def test_a_token_that_ends_within_a_character() -> None:
    """Its first byte is a token's end, and no end of a text."""
    tokenizer: Any = Longest()
    tokenizer._words = [b"\xa9{"]
    assert settled(tokenizer, "aé", ["{"]) == "a"


def test_a_text_that_is_longer_than_any_token() -> None:
    """What stands far before its end is not looked at."""
    tokenizer: Any = Longest("b{")
    assert settled(tokenizer, "a" * 5000 + "b", ["{"]) == "a" * 5000
    assert len(tokenizer._pieces) < 1000


def test_a_tokenizer_that_changes_texts() -> None:
    tokenizer: Any = Changing()
    assert settled(tokenizer, "ab", ["{"]) == ""
    assert settled(tokenizer, "ab" * 1000, ["{"]) == ""
