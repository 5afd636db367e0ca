"""A line of cells, coloured by the part of the text that they belong to."""

from __future__ import annotations

import numpy as np
import pytest

from pykvgraph.kv_cache.maps.colors import HELD_COLOR, color_of
from pykvgraph.kv_cache.maps.lines import Segment, as_text, length
from pykvgraph.kv_cache.maps.strip import strip
from pykvgraph.types import CellsView


def view(positions: list[int]) -> CellsView:
    pos = np.array(positions, np.int32)
    return CellsView(pos, (pos >= 0)[:, None], np.zeros(len(pos), np.int32), np.zeros(len(pos), np.uint8))


def test_one_character_for_each_cell() -> None:
    line = strip(view([0, 1, 5, 4, -1, 2, 3, -1]), [2, 4], 0, 80)
    assert line == [
        Segment("++", HELD_COLOR),
        Segment("bb", color_of(1)),
        Segment("."),
        Segment("aa", color_of(0)),
        Segment("."),
    ]


def test_numbers_go_on_when_parts_are_given_up() -> None:
    assert as_text([strip(view([0, 1, 2]), [1, 2], 25, 80)]) == "+zA"


def test_a_run_shows_what_most_of_its_cells_are() -> None:
    assert as_text([strip(view([0, 1, 2, 3, 4, 5, -1, -1, -1]), [2], 0, 3)]) == "+a."
    assert as_text([strip(view([0, -1, -1, 3, 4, -1]), [1], 0, 2)]) == "+a"


@pytest.mark.parametrize("width", [1, 7, 80, 4000])
def test_it_fits(width: int) -> None:
    assert length(strip(view(list(range(1000))), [10], 0, width)) <= width


def test_without_parts() -> None:
    assert as_text([strip(view([0, 1, -1]), [], 0, 80)]) == "++."
