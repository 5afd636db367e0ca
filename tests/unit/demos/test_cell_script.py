"""Scripts of cache operations: what is read from a line, and what is said of a bad one."""

from __future__ import annotations

import pytest

from pykvgraph.demos.cell_script import DEMONSTRATION, parse
from pykvgraph.errors import InvalidArgumentError


def test_lines_and_comments() -> None:
    operations = parse("# nothing\n\n  decode 0   12 # a prompt\nseq_cp 0 1 0 -1\ndefrag sort\nupdate\n")
    assert [(o.line, o.name, o.arguments, o.text, o.comment) for o in operations] == [
        (3, "decode", (0, 12), "decode 0 12", "a prompt"),
        (4, "seq_cp", (0, 1, 0, -1), "seq_cp 0 1 0 -1", ""),
        (5, "defrag", ("sort",), "defrag sort", ""),
        (6, "update", (), "update", ""),
    ]
    assert [o.seq for o in operations] == [0, 1, None, None]


def test_every_sequence_is_none_in_particular() -> None:
    assert parse("seq_rm -1 0 -1")[0].seq is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("decoed 0 1", ["'decoed'", "decode", "seq_keep"]),
        ("decode 0", ["2 arguments, got 1", "decode SEQ N"]),
        ("update now", ["0 arguments, got 1"]),
        ("seq_add 0 1 2 x", ["'x' is not an integer", "seq_add SEQ P0 P1 DELTA"]),
        ("seq_add 0 1 2 1.5", ["'1.5' is not an integer"]),
        ("defrag fast", ["'fast' is not fill or sort"]),
        ("rewind 0", ["2 arguments, got 1", "rewind SEQ P"]),
        ("checkpoint", ["1 arguments, got 0", "checkpoint SEQ"]),
    ],
)
def test_a_bad_line_says_what_was_expected(line: str, words: list[str]) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        parse(f"decode 0 4\n{line}\n")
    assert str(error.value).startswith("line 2: ")
    assert all(word in str(error.value) for word in words)


def test_the_demonstration_is_a_script() -> None:
    names = {operation.name for operation in parse(DEMONSTRATION)}
    assert {"decode", "seq_cp", "seq_rm", "seq_add", "defrag", "update"} <= names
