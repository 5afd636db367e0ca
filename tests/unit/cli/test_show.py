"""How values look in the terminal and in JSON."""

from __future__ import annotations

import json
import math

import pytest

from pykvgraph.checks import size_text
from pykvgraph.cli import show


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (2**30 + 2**29, "1.5 GiB"),
        (2**41, "2.0 TiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_size_text(n_bytes: int, text: str) -> None:
    assert size_text(n_bytes) == text


def test_what_a_file_says_cannot_steer_the_terminal() -> None:
    assert show.printable("a\nb\x1b[2J\x9b é漢\u202e") == r"a\nb\x1b[2J\x9b é漢\u202e"
    assert show.safe_cell("[red]x[/red]").plain == "[red]x[/red]"


def test_json_is_valid_whatever_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    show.print_json({"a": [math.nan, 1.5, (math.inf, 2)], "b": {"c": -math.inf}, "d": "é\n"})
    out = capsys.readouterr().out
    assert json.loads(out, parse_constant=pytest.fail) == {
        "a": [None, 1.5, [None, 2]],
        "b": {"c": None},
        "d": "é\n",
    }
    assert out.count("\n") == 1


def test_long_values_are_abbreviated() -> None:
    assert show.abbreviated([1, 2]) == "2 items: 1, 2"
    assert show.abbreviated(list(range(1000))) == "1000 items: 0, 1, 2, 3, 4, 5, …"
    assert show.abbreviated("x" * 1000) == "x" * 160 + "… (1000 characters)"
    assert show.abbreviated("plain") == "plain"
    assert show.abbreviated(True) == "true"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (9.999999747378752e-06, "1e-05"),  # as a float32
        (0.1, "0.1"),
        (500000.0, "500000.0"),
        (1e300, "1e+300"),
        (math.inf, "Infinity"),
        ([0.10000000149011612, 1], "2 items: 0.1, 1"),
    ],
)
def test_a_float_has_its_shortest_text(value: object, text: str) -> None:
    assert show.abbreviated(value) == text


@pytest.mark.parametrize(
    ("value", "n_digits", "text"),
    [(19433.2, 4, "19430"), (7948.4, 4, "7948"), (4243, 2, "4200"), (0.04567, 2, "0.046"), (0, 2, "0")],
)
def test_number_text(value: float, n_digits: int, text: str) -> None:
    assert show.number_text(value, n_digits) == text
