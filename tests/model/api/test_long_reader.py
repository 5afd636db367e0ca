"""Texts that are read in several calls, with other work on the cache between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.engines import Token, decode, open_context, random_ids, run_of
from support.kv_rows import same_cells
from support.models import N_VOCAB

import pykvgraph as kvg

N_BATCH, N_GRP, N_KEEP = 16, 4, 4
IDS = random_ids(3 * N_BATCH, N_VOCAB)


@pytest.fixture
def ctx(tiny: kvg.Model) -> Iterator[kvg.Context]:
    with open_context(tiny, n_ctx=64, n_batch=N_BATCH, n_seq_max=2) as ctx:
        yield ctx


def reader_of(ctx: kvg.Context, n_grp: int = N_GRP) -> kvg.LongReader:
    return kvg.LongReader(ctx, n_keep=N_KEEP, n_grp=n_grp)


def positions(ctx: kvg.Context) -> list[int]:
    cells = ctx.kv.cells()
    return sorted(cells.pos[cells.seq[:, 0]].tolist())


def grouped(n: int) -> list[int]:
    return [i // N_GRP for i in range(n)]


def test_two_reads_leave_what_one_leaves(ctx: kvg.Context) -> None:
    reader_of(ctx).read(IDS)
    cells = ctx.kv.cells()
    assert positions(ctx) == grouped(2 * N_BATCH) + [2 * N_BATCH // N_GRP + i for i in range(N_BATCH)]
    ctx.reset()
    reader = reader_of(ctx)
    reader.read(IDS[:N_BATCH])
    assert positions(ctx) == list(range(N_BATCH))  # the newest batch has positions of its own
    reader.read([])
    reader.read(IDS[N_BATCH:])
    assert same_cells(ctx.kv.cells(), cells)


def test_what_was_generated_between_two_reads_is_grouped_too(ctx: kvg.Context) -> None:
    reader = reader_of(ctx)
    reader.read(IDS[:N_BATCH])
    list(kvg.generate(ctx, [5], max_tokens=7))
    assert ctx.kv.pending_token(0) is not None  # the eighth
    reader.read(IDS[:N_BATCH])
    end = (N_BATCH + 8) // N_GRP
    assert positions(ctx) == grouped(N_BATCH + 8) + [end + i for i in range(N_BATCH)]


@pytest.mark.parametrize(("n_before", "n_left"), [(0, 12), (1, 12), (2, 16)])
def test_what_was_given_up_between_two_reads_is_no_part_of_a_group(
    ctx: kvg.Context, n_before: int, n_left: int
) -> None:
    """The newest batch moves down with the shift, or loses its own positions from n_keep on."""
    reader = reader_of(ctx)
    reader.read(IDS[: N_BATCH * (n_before + 1)])
    reader.make_room(ctx.kv.n_free + 1)
    before = positions(ctx)
    start = before[-1] + 1 - n_left
    reader.read(IDS[:N_BATCH])
    older = [pos for pos in before if pos < start]
    newest = [start + i // N_GRP for i in range(n_left)]
    assert positions(ctx) == older + newest + [newest[-1] + 1 + i for i in range(N_BATCH)]


def test_after_a_reset_there_is_nothing_to_group(ctx: kvg.Context) -> None:
    reader = reader_of(ctx)
    reader.read(IDS)
    ctx.reset()
    reader.read(IDS[:N_BATCH])
    assert positions(ctx) == list(range(N_BATCH))


def test_no_room_for_what_can_never_fit(ctx: kvg.Context) -> None:
    """More than the cache, or more than another sequence leaves: nothing is given up for it."""
    reader = reader_of(ctx, 1)
    reader.read(IDS)
    reader.make_room(16)
    before = ctx.kv.cells()
    with pytest.raises(kvg.CacheFullError, match="65 tokens need as many empty cells: of 64, 60 are"):
        reader.make_room(65)
    ctx.kv.seq_cp(0, 1, 0, 40)
    with pytest.raises(kvg.CacheFullError, match="25 tokens need as many empty cells: of 64, 24 are"):
        reader.make_room(25)
    ctx.kv.seq_rm(1, 0, -1)
    assert same_cells(ctx.kv.cells(), before)


def test_a_decode_between_the_making_of_room_and_the_own_one(
    ctx: kvg.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread takes the cells that were just made free: the reader makes room again."""
    reader = reader_of(ctx, 1)
    reader.read(IDS)  # 16 of 64 cells are free
    call = ctx._handle.call
    taken: list[int] = []

    def late(function: Any, *arguments: Any) -> Any:
        if function == ctx._decode and not taken:
            taken.append(ctx.kv.n_free)
            decode(ctx, [Token(5, i, (1,)) for i in range(taken[0])])
        return call(function, *arguments)

    monkeypatch.setattr(ctx._handle, "call", late)
    reader.read(IDS[:N_BATCH])
    assert taken == [16]
    assert positions(ctx) == list(range(3 * N_BATCH))  # a batch was given up for the newest
    assert int(ctx.kv.cells().seq[:, 1].sum()) == 16


@pytest.mark.parametrize("n_tokens", [-1, 1.5, True, "1", 2**63])
def test_room_for_what_is_no_number(ctx: kvg.Context, n_tokens: int) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match="n_tokens"):
        reader_of(ctx).make_room(n_tokens)


def test_a_generation_gives_nothing_up_for_no_room(ctx: kvg.Context) -> None:
    """All that it could give up is another sequence's too."""
    for begin in range(0, 64, N_BATCH):
        decode(ctx, run_of(IDS[:N_BATCH], begin))
    ctx.kv.seq_cp(0, 1, 0, -1)
    before = ctx.kv.cells()
    shift = kvg.ContextShift(n_keep=N_KEEP, n_discard=60)
    with pytest.raises(kvg.CacheFullError, match="of 64, 0 are empty"):
        list(kvg.generate(ctx, [5], max_tokens=1, on_full=shift))
    assert same_cells(ctx.kv.cells(), before)
