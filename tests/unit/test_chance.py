"""`make thorough` runs the tests that are marked at_random: none that draws may be left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import chance

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("file", "drawn_by"),
    [
        ("unit/sequence/test_positions.py", "chance itself"),
        ("unit/sequence/test_lines.py", "hypothesis"),
        ("model/cells/test_states_at_random.py", "support.states_at_random"),
        ("model/cells/test_cells_machine.py", "hypothesis, and a constant of chance"),
        ("model/cli/test_inspect.py", "support.hostile, by support.mutations"),
        ("model/hostile/test_broken_splits.py", "support.hostile_split, in another process"),
    ],
)
def test_what_draws_is_at_random(file: str, drawn_by: str) -> None:
    assert chance.decides(TESTS / file), drawn_by


@pytest.mark.parametrize(
    "file", ["unit/_native/test_statuses.py", "model/numerics/test_logits.py", "support/where.py"]
)
def test_what_does_not_is_left_out(file: str) -> None:
    assert not chance.decides(TESTS / file)


def test_this_test_is_marked(request: pytest.FixtureRequest) -> None:
    """It imports `chance`."""
    assert request.node.get_closest_marker("at_random")
