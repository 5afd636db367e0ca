from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.sequence.detokenizer import Detokenizer


def run(chunks: list[bytes], stop: Any = ()) -> tuple[list[str], bool]:
    """What each chunk, and the end, gave; whether a stop string came."""
    stream = Detokenizer(stop)
    return [stream.feed(chunk) for chunk in chunks] + [stream.finish()], bool(stream.stopping_word)


def test_plain_text_passes_at_once() -> None:
    assert run([b"Once", b" upon"]) == (["Once", " upon", ""], False)


def test_a_character_waits_for_all_its_bytes() -> None:
    assert run([b"caf\xc3", b"\xa9 \xf0\x9f", b"\x98", b"\x80"]) == (["caf", "é ", "", "😀", ""], False)


def test_half_a_character_at_the_end() -> None:
    assert run([b"a\xf0\x9f"]) == (["a", "\ufffd"], False)


def test_bytes_that_are_no_text() -> None:
    assert run([b"a\xffb"]) == (["a\ufffdb", ""], False)


def test_stop_string_across_pieces_is_held_back() -> None:
    assert run([b"Hi\n", b"Us", b"er", b": x"], ["\nUser:"]) == (["Hi", "", "", "", ""], True)


def test_what_only_looked_like_a_stop_string_comes_later() -> None:
    assert run([b"a\nUs", b"ual"], ["\nUser:"]) == (["a", "\nUsual", ""], False)


def test_held_text_comes_at_the_end() -> None:
    assert run([b"a\nUs"], ["\nUser:"]) == (["a", "\nUs"], False)


def test_a_stop_string_may_begin_again_within_itself() -> None:
    assert run([b"aa", b"ab"], ["aab"]) == (["", "a", ""], True)


def test_the_first_to_be_complete_counts() -> None:
    assert run([b"xabcd"], ["abcd", "bc"]) == (["xa", ""], True)
    assert run([b"x", b"a", b"b", b"c", b"d"], ["abcd", "bc"])[0][:4] == ["x", "", "", "a"]


def test_nothing_follows_a_stop() -> None:
    assert run([b"a.", b"b"], ["."]) == (["a", "", ""], True)


def test_one_string_is_one_stop() -> None:
    assert run([b"abc"], "bc") == (["a", ""], True)


@pytest.mark.parametrize("stop", [[""], "", ["a", None], [1], 5, None])
def test_bad_stop(stop: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^stop must be non-empty strings"):
        Detokenizer(stop)


def until_stop(text: str, stops: list[str]) -> str:
    """The definition: the shortest beginning that ends with a stop string, less the longest such string."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


letters = st.text("abé", max_size=12)


@given(letters, st.lists(st.text("abé", min_size=1, max_size=4), max_size=3), st.data())
def test_the_cuts_do_not_matter(text: str, stops: list[str], data: st.DataObject) -> None:
    encoded = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(encoded)), max_size=6)))
    edges = [0, *cuts, len(encoded)]
    chunks = [encoded[a:b] for a, b in itertools.pairwise(edges)]
    pieces, stopped = run(chunks, stops)
    assert "".join(pieces) == until_stop(text, stops)
    assert stopped == any(stop in text for stop in stops)


@given(letters, st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
def test_nothing_is_held_without_need(text: str, stops: list[str]) -> None:
    stream = Detokenizer(stops)
    shown = stream.feed(text.encode())
    held = stream.finish()
    if not stream.stopping_word and held:
        assert any(stop.startswith(held) for stop in stops)
        assert shown + held == text


def test_an_array_without_dimensions_is_no_stop_string() -> None:
    with pytest.raises(InvalidArgumentError, match="stop must be non-empty strings"):
        Detokenizer(np.array("end"))
