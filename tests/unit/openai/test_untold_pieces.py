"""Which tokens a text came with, where thoughts, calls and marks have tokens, too."""

from __future__ import annotations

from pykvgraph.openai.untold_pieces import UntoldPieces
from pykvgraph.reply.delta import Content, Delta, Reasoning, ToolCall
from pykvgraph.types import Piece


def texts_of(untold: UntoldPieces, said: list[str], deltas: list[Delta]) -> list[list[str]]:
    for text in said:
        untold.add(Piece(text, 0, -1.0, None))
    return [[piece.text for piece in pieces] for pieces in untold.of(deltas)]


def test_marks_and_thoughts_are_left_out() -> None:
    """Also where a mark has the text's own letters."""
    untold = UntoldPieces()
    assert texts_of(untold, ["Hm", " so"], [Reasoning("Hm so")]) == [[]]
    assert texts_of(untold, ["</", "think", ">", "\n"], []) == []
    assert texts_of(untold, ["think"], [Content("think")]) == [["think"]]
    assert texts_of(untold, [" on", ""], [Content(" on")]) == [[" on"]]


def test_several_deltas_at_once() -> None:
    said = ["Hm", "</think>", "a", "", "é", "<tool_call>", "{}", "</tool_call>"]
    deltas: list[Delta] = [Reasoning("Hm"), Content("aé"), ToolCall("1", "f", "{}")]
    assert texts_of(UntoldPieces(), said, deltas) == [[], ["a", "", "é"], []]


def test_a_token_that_is_half_text() -> None:
    assert texts_of(UntoldPieces(), ["Hm<", "/think>So", " it"], [Content("So it")]) == [["/think>So", " it"]]


def test_a_text_that_is_not_the_pieces_alone() -> None:
    """A request may begin the answer."""
    assert texts_of(UntoldPieces(), ["b", "c"], [Content("abc")]) == [["b", "c"]]


def test_a_token_that_stops_the_text() -> None:
    untold = UntoldPieces()
    untold.add(Piece("", 2, -1.0, "stop"))
    assert untold.of([Content("held back")]) == [[]]
