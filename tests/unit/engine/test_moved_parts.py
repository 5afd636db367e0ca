"""Which parts of an older text are moved to where the new one has them."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st
from support.naive_cache import NaiveCache

from pykvgraph.engine.moved_parts import Part, anew_of, move, parts_of


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


def naive_with_gaps(old: list[int], new: list[int], n: int, least: int) -> list[tuple[int, int, int]]:
    """The same, but a token of the new text that begins no part is passed over."""
    found, at_old, at_new = [], n, n
    while at_new < len(new):
        lengths = {begin: run(old[begin:], new[at_new:]) for begin in range(at_old, len(old))}
        begin = next((begin for begin, length in lengths.items() if length >= least), -1)
        if begin < 0:
            at_new += 1
        else:
            found.append((begin, at_new, lengths[begin]))
            at_old, at_new = begin + lengths[begin], at_new + lengths[begin]
    return found


def run(old: list[int], new: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
    )


@given(tokens, tokens, tokens, st.integers(1, 5))
def test_as_token_by_token_with_gaps(front: list[int], old: list[int], new: list[int], least: int) -> None:
    found = parts_of(array("i", front + old), array("i", front + new), len(front), least, gaps=True)
    assert [tuple(part) for part in found] == naive_with_gaps(front + old, front + new, len(front), least)


def test_what_is_decoded_anew() -> None:
    parts = [Part(0, 0, 20), Part(40, 20, 30), Part(70, 55, 10)]  # 20 taken out; 5 in place of none
    assert anew_of(parts, 4) == [*range(20, 24), *range(50, 59)]
    assert anew_of(parts, 0) == [*range(50, 55)]
    assert anew_of([Part(5, 0, 20)], 4) == [0, 1, 2, 3]
    assert anew_of([Part(0, 3, 20)], 2) == [0, 1, 2, 3, 4]


sizes = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=6)


@given(sizes)
def test_parts_move_without_meeting_each_other(steps: list[tuple[int, int, int]]) -> None:
    """NaiveCache says so when two tokens come to one position."""
    parts, old, new = [], 0, 0
    for gone, came, n in steps:
        old, new = old + gone, new + came
        parts.append(Part(old, new, n))
        old, new = old + n, new + n
    kv = NaiveCache(200, 1)
    kv.decode(0, list(range(old + 3)), range(old + 3))
    keys = [cell.key for cell in kv.text(0)]
    move(kv.as_cache(), 0, parts)
    wanted = {part.new + i: keys[part.old + i] for part in parts for i in range(part.n)}
    assert {cell.pos: cell.key for cell in kv.text(0)} == wanted
