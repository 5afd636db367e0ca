"""Any Python integer is safe in every operation: the naive cells say what it does, or that it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.engines import Token, decode, open_context, run_of
from support.kv_rows import seqs_of
from support.models import N_VOCAB
from support.naive_cells import Cell, NaiveCells, Refusals

import pykvgraph as kvg

N_CELLS, N_SEQ = 16, 3

BORDERS = sorted(
    sign * 2**bits + step
    for bits in (7, 8, 15, 16, 31, 32, 63, 64)
    for sign in (-1, 1)
    for step in range(-2, 3)
)
any_integer = st.sampled_from(BORDERS) | st.integers(-(2**70), 2**70) | st.integers(-3, 20)
likely_seq = st.integers(0, N_SEQ - 1) | any_integer

# 0..7 are sequence 0's, the first four of them sequence 1's too; sequence 2 stands at the largest position
STORY = [*run_of(range(3, 7), 0, (0, 1)), *run_of(range(7, 11), 4), *run_of(range(3, 6), 2**31 - 3, (2,))]


def before(ctx: kvg.Context) -> NaiveCells:
    """Decodes STORY into an empty cache; the cells that it must have made, as they lie."""
    ctx.reset()
    decode(ctx, STORY)
    tokens = {(token.pos, token.seq_ids): token.id for token in STORY}
    cells = ctx.kv.cells()
    naive = NaiveCells(N_CELLS, N_SEQ)
    for i in np.flatnonzero(cells.pos >= 0):
        pos, seqs = int(cells.pos[i]), seqs_of(cells, i)
        naive.cells[i] = Cell(tokens[pos, seqs], pos, frozenset(seqs))
    return naive


def compare(ctx: kvg.Context, naive: NaiveCells) -> None:
    cells = ctx.kv.cells()
    expected = [cell or Cell(0, -1, frozenset()) for cell in naive.cells]
    assert cells.pos.tolist() == [cell.pos for cell in expected]
    assert cells.shift.tolist() == [cell.shift for cell in expected]
    assert [set(seqs_of(cells, i)) for i in range(N_CELLS)] == [cell.seqs for cell in expected]
    assert ctx.kv.n_used == len(naive.used)


def check(ctx: kvg.Context, op: str, arguments: tuple[int, ...]) -> None:
    naive = before(ctx)
    call: Callable[..., None] = getattr(ctx.kv, op)
    untouched = deepcopy(naive.cells)
    refusals: Refusals = getattr(naive, op)(*arguments)
    if refusals:
        assert naive.cells == untouched
        with pytest.raises(refusals):
            call(*arguments)
    else:
        call(*arguments)
    compare(ctx, naive)


@pytest.fixture(scope="module")
def ctx(tiny: kvg.Model) -> Iterator[kvg.Context]:
    with open_context(tiny, n_ctx=N_CELLS, n_batch=N_CELLS, n_seq_max=N_SEQ) as ctx:
        yield ctx


@settings(max_examples=400)
@given(arguments=st.tuples(likely_seq, any_integer, any_integer))
@example((0, -(2**63), 2**63 - 1))
@example((0, 0, 2**63))
@example((-(2**63), 2, 5))
def test_seq_rm(ctx: kvg.Context, arguments: tuple[int, ...]) -> None:
    check(ctx, "seq_rm", arguments)


@settings(max_examples=300)
@given(arguments=st.tuples(likely_seq, likely_seq, any_integer, any_integer))
@example((0, 2**32, 0, -1))
@example((2**64, 1, 0, -1))
def test_seq_cp(ctx: kvg.Context, arguments: tuple[int, ...]) -> None:
    check(ctx, "seq_cp", arguments)


@settings(max_examples=150)
@given(seq=likely_seq)
@example(2**64 + 1)
def test_seq_keep(ctx: kvg.Context, seq: int) -> None:
    check(ctx, "seq_keep", (seq,))


@settings(max_examples=500)
@given(arguments=st.tuples(likely_seq, any_integer, any_integer, any_integer))
@example((0, 4, -1, 2**31 - 1))
@example((0, 4, -1, -(2**63)))
@example((0, 4, -1, 2**63 - 1))
@example((2, 0, -1, 1))
@example((2, 0, 2**31 - 2, 1))
@example((0, 0, -1, -6))  # the shared cells go, the others too but two
def test_seq_add(ctx: kvg.Context, arguments: tuple[int, ...]) -> None:
    check(ctx, "seq_add", arguments)


@settings(max_examples=400)
@given(arguments=st.tuples(likely_seq, any_integer, any_integer, any_integer))
@example((0, 4, -1, 0))
@example((0, 4, -1, -(2**63)))
@example((2, -1, -1, 2**63 - 1))
@example((0, -1, -1, 2**62))
def test_seq_div(ctx: kvg.Context, arguments: tuple[int, ...]) -> None:
    check(ctx, "seq_div", arguments)


@settings(max_examples=150)
@given(seq=likely_seq)
@pytest.mark.parametrize("op", ["seq_pos_min", "seq_pos_max"])
def test_seq_pos(ctx: kvg.Context, op: str, seq: int) -> None:
    naive = before(ctx)
    if naive.refuse(seqs=(seq,)):
        with pytest.raises(kvg.InvalidArgumentError):
            getattr(ctx.kv, op)(seq)
    else:
        assert getattr(ctx.kv, op)(seq) == getattr(naive, op.removeprefix("seq_"))(seq)


@settings(max_examples=400)
@given(token=any_integer, pos=any_integer, seqs=st.lists(likely_seq, max_size=3))
@example(5, 8, [])
@example(5, 2**31, [0])
@example(2**32 + 5, 8, [0])
@example(5, 8, [2**32])
def test_batch(ctx: kvg.Context, token: int, pos: int, seqs: list[int]) -> None:
    naive = before(ctx)
    tokens = [Token(token, pos, tuple(seqs))]
    refusals = naive.check_batch(tokens, N_CELLS, N_VOCAB)
    if refusals:
        with pytest.raises(refusals):
            decode(ctx, tokens)
        compare(ctx, naive)
    else:
        decode(ctx, tokens)
        assert ctx.kv.n_used == len(naive.used) + 1


@settings(max_examples=150)
@given(layer=any_integer)
@pytest.mark.parametrize("read", ["read_k", "read_v"])
def test_layer(ctx: kvg.Context, tiny: kvg.Model, read: str, layer: int) -> None:
    if 0 <= layer < tiny.n_layer:
        assert getattr(ctx.kv, read)(layer).shape[0] == N_CELLS
    else:
        with pytest.raises(kvg.InvalidArgumentError):
            getattr(ctx.kv, read)(layer)


huge_or_too_small = any_integer.filter(lambda n: n < 1 or n > 2**31)


@settings(max_examples=100)
@given(number=huge_or_too_small)
@pytest.mark.parametrize(
    "name", ["n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch"]
)
def test_context_sizes(tiny: kvg.Model, name: str, number: int) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match=name):
        open_context(tiny, **{"n_ctx": N_CELLS, name: number})


@pytest.mark.parametrize("value", [1.0, "1", None, b"1", 1 + 0j, [1]])
@pytest.mark.parametrize(
    ("op", "n_arguments"), [("seq_rm", 3), ("seq_cp", 4), ("seq_keep", 1), ("seq_add", 4), ("seq_div", 4)]
)
def test_what_is_no_integer(ctx: kvg.Context, op: str, n_arguments: int, value: object) -> None:
    naive = before(ctx)
    for place in range(n_arguments):
        arguments: list[object] = [1] * n_arguments
        arguments[place] = value
        with pytest.raises((kvg.InvalidArgumentError, TypeError)):
            getattr(ctx.kv, op)(*arguments)
    compare(ctx, naive)


def test_integers_of_numpy(ctx: kvg.Context) -> None:
    before(ctx)
    ctx.kv.seq_rm(np.int64(0), np.int8(4), np.uint16(6))
    assert ctx.kv.n_used == len(STORY) - 2
