"""A limit on thoughts, on a tokenizer whose tokens are bytes, or a mark."""

from __future__ import annotations

from typing import Any

import pytest

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.params.params import ThoughtLimit
from pykvgraph.sampling.thought_limit import Thoughts

MARKS = {"<think>": 256, "</think>": 257}
NAMES = {token: name.encode() for name, token in MARKS.items()}


class Bytes:
    """Each byte is a token; two marks are one, too."""

    n_vocab = 258

    def encode(self, text: str, _add_special: bool, _parse_special: bool) -> list[int]:
        return [MARKS[text]] if text in MARKS else list(text.encode())

    def token_to_piece(self, token: int, special: bool) -> bytes:
        assert special
        return NAMES.get(token) or bytes([token])


def said(limit: ThoughtLimit, wanted: str) -> str:
    """What is said where a model wants to say this, and is overruled."""
    thoughts = Thoughts(limit, Bytes())  # type: ignore[arg-type]
    return text_of(thoughts, tokens_of(wanted))


def tokens_of(text: str) -> list[int]:
    found: list[int] = []
    for name, token in MARKS.items():
        text = text.replace(name, chr(0xE000 + token))
    for character in text:
        is_mark = ord(character) >= 0xE000
        found += [ord(character) - 0xE000] if is_mark and ord(character) < 0xF000 else character.encode()
    return found


def text_of(thoughts: Thoughts, wanted: list[int]) -> str:
    text = b""
    for token in wanted:
        due = thoughts.due
        token = token if due is None else due
        thoughts.accept(token)
        text += NAMES.get(token) or bytes([token])
    return text.decode()


@pytest.mark.parametrize(
    ("n_tokens", "wanted", "expected"),
    [
        (3, "<think>abcdefghi", "<think>abc</think>efghi"),
        (3, "<think>ab</think>cdefghij", "<think>ab</think>cdefghij"),
        (3, "<think>abc</think>defg", "<think>abc</think>defg"),
        (0, "<think>abc", "<think></think>bc"),
        (2, "abc<think>", "abc<think>"),
        (2, "<think>abcd<think>efgh", "<think>ab</think>d<think>ef</think>h"),  # each anew
        (2, "<thi<think>abcd", "<thi<think>ab</think>d"),
        (1, "<think>\u20acabc", "<think>\u20ac</think>bc"),  # three bytes
    ],
)
def test_what_is_said(n_tokens: int, wanted: str, expected: str) -> None:
    assert said(ThoughtLimit(n_tokens), wanted) == expected


@pytest.mark.parametrize(
    ("n_begun", "expected"), [(0, "abc</think>"), (2, "a</think>cd"), (9, "</think>bcd")]
)
def test_thoughts_that_the_prompt_began(n_begun: int, expected: str) -> None:
    assert said(ThoughtLimit(3, n_begun=n_begun), "abcd") == expected


def test_a_message_comes_before_the_mark() -> None:
    assert said(ThoughtLimit(1, message="So."), "<think>abcdefg") == "<think>aSo.</think>fg"


def test_a_copy_goes_on_by_itself() -> None:
    thoughts = Thoughts(ThoughtLimit(3), Bytes())  # type: ignore[arg-type]
    text_of(thoughts, tokens_of("<think>ab"))
    copy = thoughts.copy()
    assert text_of(thoughts, tokens_of("cde")) == "c</think>e"
    assert text_of(copy, tokens_of("c")) == "c"
    assert copy.due == 257
    assert text_of(copy, tokens_of("d")) == "</think>"


@pytest.mark.parametrize(
    "arguments",
    [{"n_tokens": -1}, {"n_tokens": "5"}, {"open": ""}, {"close": None}, {"message": 5}, {"n_begun": -1}],
)
def test_bad_limits(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(InvalidArgumentError, match=name):
        ThoughtLimit(**{"n_tokens": 5, **arguments})
