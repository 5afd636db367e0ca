"""What a chat writes on a terminal."""

from __future__ import annotations

import pytest

from pykvgraph.cli.chat_page import Page


@pytest.mark.parametrize("last", ["", " ", ".", ". Then", " Then"])
def test_a_note_in_a_word_waits_for_its_end(capsys: pytest.CaptureFixture[str], last: str) -> None:
    """The last piece of an answer may have no text."""
    page = Page(on_terminal=True)
    page.write("In Paris")
    page.note("context full")
    page.write(last)
    page.end()
    before, after = {". Then": (".", "Then"), " Then": ("", "Then")}.get(last, (last.strip(), ""))
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [line for line in (f"In Paris{before}", "[context full]", after) if line]
