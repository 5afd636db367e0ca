"""The cell map, drawn by hand beside what is drawn."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.types import CellsView
from pykvgraph.viz import Row, cell_map, checkpoint_lines, plot_rows, state_map

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
        "a sequence 0: 3 cells, positions 0-5, 1 of them shared",
        "b sequence 1: 2 cells, positions 0-9, 1 of them shared",
        "c sequence 2: 1 cells, positions 2-2",
    ]


def test_states_and_checkpoints() -> None:
    rows = view((9, "0", 0), None, (4, "", 0), (7, "12", 0), *[None] * 20)
    rows.held[[0, 2]] = 1
    assert state_map(rows, width=20).splitlines() == ["24 states: 3 used", "  a.+*" + "." * 14, "  ......"]
    assert checkpoint_lines([[5, 10], [], [8]]) == [
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
    plot_rows([Row("before", CELLS, None), Row("after", CELLS, 0)], path)
    colors = {
        tuple(pixel) for pixel in (imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3).tolist()
    }
    # empty, shared, and the three sequences
    assert {(238, 238, 238), (214, 39, 40), (31, 119, 180), (44, 160, 44), (255, 127, 14)} <= colors
    with pytest.raises(InvalidArgumentError):
        plot_rows([], path)
