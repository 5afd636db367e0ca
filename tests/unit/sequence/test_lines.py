"""Texts that end with a line: the same however they are cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykvgraph.sequence.detokenizer import Lines


def said(text: str, cuts: list[int], n_indent: int) -> str:
    lines, begin, told = Lines(n_indent, 0), 0, ""
    for cut in [*sorted(cuts), len(text)]:
        piece, begin = text[begin:cut], max(cut, begin)
        end = lines.end_of(piece)
        if end >= 0:
            return told + piece[:end]
        told += piece
    return told


@given(st.text("a \t\n", max_size=20), st.lists(st.integers(0, 20), max_size=5), st.integers(0, 3))
def test_however_it_is_cut(text: str, cuts: list[int], n_indent: int) -> None:
    cuts = [min(cut, len(text)) for cut in cuts]
    first, *others = text.split("\n")
    wanted = first
    for number, line in enumerate(others, 1):
        rest = line.lstrip(" \t")
        spaces = len(line) - len(rest)
        if spaces < n_indent and (rest or number < len(others)):
            wanted += "\n" + line[:spaces]
            break
        wanted += "\n" + line
    assert said(text, cuts, n_indent) == wanted


def test_a_late_line_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    lines = Lines(0, 0.5)
    assert lines.end_of("a\n") == -1
    now = 100.4
    assert lines.end_of("b\n") == -1
    now = 100.6
    assert lines.end_of("c") == -1
    assert lines.end_of("d\ne") == 3
