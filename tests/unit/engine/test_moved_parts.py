"""Which parts of an older text are moved to where the new one has them."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from pykvgraph.engine.moved_parts import parts_of


def naive(old: list[int], new: list[int], n: int, least: int) -> list[tuple[int, int, int]]:
    """llama-server's search, token by token."""
    found, head_old, head_new = [], n, n
    while head_old < len(old) and head_new < len(new):
        n_same = 0
        while (
            head_old + n_same < len(old)
            and head_new + n_same < len(new)
            and old[head_old + n_same] == new[head_new + n_same]
        ):
            n_same += 1
        if n_same >= least:
            found.append((head_old, head_new, n_same))
            head_old, head_new = head_old + n_same, head_new + n_same
        else:
            head_old += 1
    return found


tokens = st.lists(st.sampled_from([0, 1, 256, 65536, 2**24]), max_size=40)


@given(tokens, tokens, tokens, st.integers(1, 5))
def test_as_token_by_token(front: list[int], old: list[int], new: list[int], least: int) -> None:
    """Also where bytes are the same at places that are no tokens' beginnings."""
    found = parts_of(array("i", front + old), array("i", front + new), len(front), least)
    assert [tuple(part) for part in found] == naive(front + old, front + new, len(front), least)


def test_a_part_that_was_taken_out() -> None:
    old = array("i", range(100))
    new = array("i", [*range(20), *range(35, 70), *range(80, 100)])
    assert parts_of(old, new, 20, 16) == [(35, 20, 35), (80, 55, 20)]
    assert parts_of(old, new, 20, 21) == [(35, 20, 35)]
    assert parts_of(old, new, 20, 36) == []
