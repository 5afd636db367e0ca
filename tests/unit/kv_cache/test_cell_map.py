"""The cell map, drawn by hand beside what is drawn."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.kv_cache.maps.colors import (
    HELD_COLOR,
    SEQUENCE_COLORS,
    SHARED_COLOR,
    contrast,
    ink,
    terminal_color,
)
from pykvgraph.kv_cache.maps.snapshot import map_of
from pykvgraph.types import CellGroup, CellsView
from pykvgraph.viz import CellMap, Frame, Row, cell_map, plot_film, plot_rows

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def view(*cells: tuple[int, str, int] | None, n_seq_max: int = 3) -> CellsView:
    """Cells as (position, the sequences' digits, shift), None for an empty one."""
    n = len(cells)
    seq = np.zeros((n, n_seq_max), np.bool_)
    made = CellsView(np.full(n, -1, np.int32), seq, np.zeros(n, np.int32), np.zeros(n, np.uint8))
    for i, cell in enumerate(cells):
        if cell is not None:
            made.pos[i], made.shift[i] = cell[0], cell[2]
            made.seq[i, [int(digit) for digit in cell[1]]] = True
    return made


CELLS = view((0, "01", 0), (1, "0", 0), None, (9, "1", 4), None, (5, "0", -3), (2, "2", 0), None)


def test_cells_that_only_a_hold_keeps() -> None:
    cells = view((0, "", 0), (1, "0", 0), None, (2, "01", 0))
    cells.held[[0, 1, 3]] = 1, 1, 2
    assert cell_map(cells).splitlines()[:2] == ["4 cells: 3 used, n_kv 4, 1 holes", "0 +a.*"]


def test_every_mark() -> None:
    assert cell_map(CELLS, seq=0).splitlines() == [
        "8 cells: 5 used, n_kv 7, 2 holes",
        "0 *a.b.ac.",
        "     > <",
        "  ^^^^^^",
        "a sequence 0: 3 cells, positions 0-5, 1 of them shared; ^ its span",
        "b sequence 1: 2 cells, positions 0-9, 1 of them shared",
        "c sequence 2: 1 cells, positions 2-2",
    ]


def test_states_and_checkpoints() -> None:
    rows = view((9, "0", 0), None, (4, "", 0), (7, "12", 0), *[None] * 20)
    rows.held[[0, 2]] = 1
    whole = map_of(view(None, None))
    lines = replace(whole, states=rows, checkpoints=[[5, 10], [], [8]]).text(width=20).splitlines()
    assert lines[2:] == [
        "24 states: 3 used",
        "  a.+*" + "." * 14,
        "  ......",
        "a checkpoints of sequence 0: 5, 10",
        "c checkpoints of sequence 2: 8",
    ]


def test_nothing_is_marked_of_an_empty_cache() -> None:
    assert cell_map(view(None, None), seq=1) == "2 cells: 0 used, n_kv 0, 0 holes\n0 .."


def test_rows_fit_the_width_and_begin_with_their_index() -> None:
    cells = view(*[(i, "0", 0) for i in range(100)])
    assert cell_map(cells, seq=0, width=43).splitlines()[1:7] == [
        " 0 " + "a" * 40,
        "   " + "^" * 40,
        "40 " + "a" * 40,
        "   " + "^" * 40,
        "80 " + "a" * 20,
        "   " + "^" * 20,
    ]


@pytest.mark.parametrize("width", range(20, 90, 7))
def test_no_width_loses_a_cell(width: int) -> None:
    cells = view(*[(i, "0", 0) if i % 3 else None for i in range(150)])
    rows = [line.split()[1] for line in cell_map(cells, width=width).splitlines()[1:-1]]
    assert "".join(rows) == ".aa" * 50
    assert all(len(row) + 4 <= width for row in rows)


def test_letters_beyond_z() -> None:
    cells = view(*[None] * 4, n_seq_max=60)
    cells.pos[:] = 0
    for cell, seq in enumerate((25, 26, 51, 52)):
        cells.seq[cell, seq] = True
    assert cell_map(cells).splitlines()[1] == "0 zAZ#"


def test_colours_only_on_request_and_for_nothing_but_letters() -> None:
    plain, colored = cell_map(CELLS, seq=0), cell_map(CELLS, seq=0, color=True)
    assert "\x1b" not in plain
    assert ESCAPE.sub("", colored) == plain
    escapes = {ESCAPE.findall(part)[0] for part in re.findall(r"\x1b\[[0-9;]*m[abc*]", colored)}
    assert len(escapes) == 4


@pytest.mark.parametrize(("seq", "width"), [(3, 80), (-1, 80), (0, 19)])
def test_what_cannot_be(seq: int, width: int) -> None:
    with pytest.raises(InvalidArgumentError):
        cell_map(CELLS, seq=seq, width=width)


def test_a_picture(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = tmp_path / "cells.png"
    plot_rows([Row("before", map_of(CELLS)), Row("after", map_of(CELLS, 0))], path)
    colors = {
        tuple(pixel) for pixel in (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3).tolist()
    }
    # empty, shared, and the three sequences
    assert {(238, 238, 238), (214, 39, 40), (31, 119, 180), (44, 160, 44), (255, 127, 14)} <= colors
    with pytest.raises(InvalidArgumentError):
        plot_rows([], path)


def test_every_letter_can_be_read_on_its_colour() -> None:
    """4.5 is what WCAG 2.1 asks of small text."""
    for color in (*SEQUENCE_COLORS, SHARED_COLOR, HELD_COLOR):
        for behind in (color, terminal_color(color)[1]):
            assert contrast(ink(behind), behind) >= 4.5
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)  # a figure that is well known


def test_a_terminal_gets_letters_and_what_is_behind_them() -> None:
    """So the terminal's own colours, dark or light, are nowhere together with ours."""
    colored = cell_map(CELLS, color=True)
    codes = [code for code in ESCAPE.findall(colored) if code != "\x1b[0m"]
    assert codes
    assert all(re.fullmatch(r"\x1b\[38;5;(16|231);48;5;\d+m", code) for code in codes)
    by_number = {terminal_color(color)[0]: terminal_color(color)[1] for color in SEQUENCE_COLORS}
    for letters, behind in re.findall(r"38;5;(\d+);48;5;(\d+)m[abc]", colored):
        assert ink(by_number[int(behind)]) == ("#000000" if letters == "16" else "#ffffff")
    assert terminal_color("#ff0000") == (196, "#ff0000")


def test_cells_that_wait_are_not_those_that_are_pending() -> None:
    assert not CELLS.waiting.any()
    settled = CellsView(CELLS.pos, CELLS.seq, CELLS.shift, CELLS.dither, settled=True)
    assert np.flatnonzero(settled.waiting).tolist() == [3, 5]
    assert cell_map(settled).splitlines()[2] == "     ~ ~"
    assert repr(CELLS) == "<CellsView: 5 of 8 cells used, by 3 sequences, 2 holes, 1 shared, 2 pending>"
    assert repr(settled) == "<CellsView: 5 of 8 cells used, by 3 sequences, 2 holes, 1 shared, 2 waiting>"


def groups(seq: int | None = None) -> CellMap:
    """A full group, one with a window, and states."""
    window = view((3, "0", 0), None, (5, "0", 0), (4, "", 0))
    window.held[3] = 1
    kinds = (CellGroup("full", (0,), 8, 0, 5, 7, 4), CellGroup("window", (1,), 4, 2, 3, 4, 4))
    return CellMap(kinds, (CELLS, window), view((5, "0", 0)), [[4]], seq)


def test_groups_are_side_by_side_or_one_below_the_other() -> None:
    below = [
        "a sequence 0, full: 3 cells, positions 0-5, 1 of them shared; ^ its span",
        "a sequence 0, window of 2: 2 cells, positions 3-5; ^ its span",
        "b sequence 1, full: 2 cells, positions 0-9, 1 of them shared",
        "c sequence 2, full: 1 cells, positions 2-2",
        "1 states: 1 used",
        "  a",
        "a checkpoints of sequence 0: 4",
    ]
    full = ["full", "8 cells: 5 used, n_kv 7, 2 holes", "0 *a.b.ac.", "     > <", "  ^^^^^^"]
    window = ["window of 2", "4 cells: 3 used, n_kv 4, 1 holes", "0 a.a+", "  ^^^"]
    beside = [f"{a:35}{b}".rstrip() for a, b in itertools.zip_longest(full, window, fillvalue="")]
    assert groups(0).text(width=70).splitlines() == beside + below
    assert groups(0).text(width=66).splitlines() == full + window + below
    assert str(groups(0)) == repr(groups(0)) == groups(0).text()
    assert ESCAPE.sub("", groups(0).text(width=70, color=True)) == groups(0).text(width=70)


def test_a_notebook_gets_colours_and_no_markup_of_the_cells() -> None:
    page = groups(0)._repr_html_()
    assert "&gt; &lt;" in page
    plain = re.sub(r"</?(?:pre|span)[^<>]*>", "", page)
    assert "<" not in plain and ">" not in plain
    text = plain.replace("&lt;", "<").replace("&gt;", ">")
    assert text == groups(0).text(width=100)
    colors = dict(zip("abc", SEQUENCE_COLORS, strict=False)) | {"*": SHARED_COLOR, "+": HELD_COLOR}
    for symbol, color in colors.items():
        assert f'<span style="background: {color}; color: {ink(color)}">{symbol}</span>' in page


def pixels(path: Path) -> set[tuple[int, ...]]:
    from matplotlib.image import imread

    return set(map(tuple, (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3).tolist()))


def test_a_picture_of_groups(tmp_path: Path) -> None:
    path = tmp_path / "cells.png"
    plot_rows([Row("before", groups()), Row("after", groups(0))], path)
    # empty, hole, held, shared, first sequence
    expected = {(238, 238, 238), (198, 198, 198), (85, 85, 85), (214, 39, 40), (31, 119, 180)}
    assert expected <= pixels(path)


def test_a_film_has_the_marked_cells(tmp_path: Path) -> None:
    path = tmp_path / "film.png"
    cells = view(*[(i, "0", 0) if i < 900 else None for i in range(1000)])
    plot_film([Frame("one", cells, []), Frame("two", cells, [450, 451])], path)
    assert {(238, 238, 238), (214, 39, 40)} <= pixels(path)
    plot_film([Frame("one", cells, [])], path)
    assert (214, 39, 40) not in pixels(path)
    with pytest.raises(InvalidArgumentError):
        plot_film([], path)
