"""Holds: cells that stay when no sequence sees them, and come back without being decoded."""

from __future__ import annotations

import gc
import threading
from typing import Literal

import numpy as np
import pytest
from support.engines import decode, open_context, random_ids, run_of
from support.models import N_VOCAB

import pykvgraph as kvg

Policy = Literal["fill", "sort"]
IDS = random_ids(40, N_VOCAB)


@pytest.mark.parametrize("policy", [None, "fill", "sort"])
def test_an_attached_prefix_is_as_good_as_a_decoded_one(
    small: kvg.Model, policy: Literal["fill", "sort"] | None
) -> None:
    with open_context(small, n_ctx=128, n_seq_max=3, type_k="f32", type_v="f32") as ctx:
        expected = decode(ctx, run_of(IDS))[32:]
        ctx.kv.clear()
        decode(ctx, run_of(random_ids(20, N_VOCAB, 1), 0, (1,)))  # in the way, and gone before defrag
        decode(ctx, run_of(IDS[:32]))
        holds = [ctx.kv.hold(0, 0, 16), ctx.kv.hold(0, 16, -1)]
        assert [(hold.p0, hold.p1) for hold in holds] == [(0, 16), (16, 32)]
        ctx.kv.seq_rm(-1, 0, -1)
        assert ctx.kv.n_used == 32
        assert ctx.kv.cells().held.sum() == 32
        if policy:
            ctx.kv.defrag(policy)
            assert ctx.kv.update().moved_cells > 0
        for hold in holds:
            ctx.kv.attach(hold, 2)
        assert ctx.kv.n_used == 32
        logits = decode(ctx, run_of(IDS[32:], 32, (2,)))
        assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


def test_what_a_hold_outlives(small: kvg.Model) -> None:
    with open_context(small, n_ctx=64, n_seq_max=2) as ctx:
        kv = ctx.kv
        decode(ctx, run_of(IDS[:8]))
        blob = kv.save()
        hold = kv.hold(0, 0, -1)
        kv.seq_rm(-1, 0, -1)
        kv.load(blob)
        kv.seq_keep(1)
        assert kv.n_used == 8
        kv.attach(hold, 1)
        kv.seq_add(1, 0, -1, 5)  # copies
        assert kv.n_used == 16
        assert kv.seq_pos_min(1) == 5
        kv.seq_rm(1, 0, -1)
        hold.release()
        assert kv.n_used == 0
        with pytest.raises(kvg.InvalidArgumentError, match="released"):
            hold.release()


def test_clear_releases(small: kvg.Model) -> None:
    with open_context(small, n_ctx=64) as ctx:
        decode(ctx, run_of(IDS[:8]))
        hold = ctx.kv.hold(0, 0, -1)
        ctx.kv.clear()
        assert ctx.kv.n_used == 0
        with pytest.raises(kvg.InvalidArgumentError, match="released"):
            ctx.kv.attach(hold, 0)
        with pytest.raises(kvg.InvalidArgumentError, match="released"):
            hold.release()
        assert (hold.p0, hold.p1) == (0, 8)


def test_refusals(small: kvg.Model) -> None:
    with open_context(small, n_ctx=64, n_seq_max=2) as ctx, open_context(small, n_ctx=64) as other:
        kv = ctx.kv
        decode(ctx, run_of(IDS[:8]))
        kv.seq_rm(0, 3, 4)
        for seq, p0, p1 in (
            (0, 0, -1),
            (0, 4, 9),
            (0, 5, 5),
            (1, 0, -1),
            (2, 0, 1),
            (-1, 0, 1),
            (0, 0, 2**70),
        ):
            with pytest.raises(kvg.InvalidArgumentError):
                kv.hold(seq, p0, p1)
        assert not kv.cells().held.any()
        hold = kv.hold(0, 4, 8)
        for seq in (0, 1, 2, -1, 2**70):
            with pytest.raises(kvg.InvalidArgumentError):
                kv.attach(hold, seq)
        with pytest.raises(kvg.InvalidArgumentError, match="this cache's"):
            other.kv.attach(hold, 0)
        with pytest.raises(kvg.InvalidArgumentError):
            kv.attach(hold._id, 0)  # type: ignore[arg-type]


def test_held_cells_are_no_room(small: kvg.Model) -> None:
    """A context shift of cells that are held frees none and copies them, and says so before it begins."""
    with open_context(small, n_ctx=16) as ctx:
        decode(ctx, run_of(IDS[:16]))
        hold = ctx.kv.hold(0, 0, -1)
        with pytest.raises(kvg.CacheFullError):
            kvg.ContextShift(n_keep=2).apply(ctx.kv)
        assert ctx.kv.seq_count(0, 4, 8) == (4, 4)
        assert ctx.kv.n_used == 16
        hold.release()
        kvg.ContextShift(n_keep=2).apply(ctx.kv)
        assert ctx.kv.n_used == 9


def test_a_collected_hold_is_released(small: kvg.Model) -> None:
    with open_context(small, n_ctx=64) as ctx:
        decode(ctx, run_of(IDS[:8]))
        holds = [ctx.kv.hold(0, i, i + 1) for i in range(8)]
        ctx.kv.seq_rm(0, 0, -1)
        del holds[:4]
        assert ctx.kv.n_used == 4
        cycle: list[object] = [holds]
        cycle.append(cycle)
        del holds, cycle
        gc.collect()
        assert ctx.kv.n_used == 0


def test_a_hold_collected_in_mid_call_or_after_the_end(small: kvg.Model) -> None:
    ctx = open_context(small, n_ctx=64)
    decode(ctx, run_of(IDS[:8]))
    holds = [ctx.kv.hold(0, 0, -1), ctx.kv.hold(0, 0, 4), ctx.kv.hold(0, 4, 8)]
    ctx.kv.seq_rm(0, 0, -1)
    ctx._handle.call(lambda _: holds.pop(0))  # the last reference goes while the handle is in use

    def while_another_thread_calls(_: int) -> None:
        thread = threading.Thread(target=lambda: holds.pop(0))
        thread.start()
        thread.join(10)
        assert not thread.is_alive()  # it doesn't wait for this call

    ctx._handle.call(while_another_thread_calls)
    assert ctx.kv.cells().held.sum() == 4
    assert ctx.kv.n_used == 4
    ctx.close()
    with pytest.raises(kvg.InvalidArgumentError, match="closed"):
        holds[0].release()
    holds.clear()


def test_threads_that_hold_and_let_go(small: kvg.Model) -> None:
    with open_context(small, n_ctx=256, n_seq_max=4) as ctx:
        for seq in range(4):
            decode(ctx, run_of(IDS[:32], 0, (seq,)))

        def work(seq: int) -> None:
            for i in range(300):
                kept = ctx.kv.hold(seq, i % 32, i % 32 + 1)
                dropped = ctx.kv.hold(seq, 0, -1)
                if i % 3 == 0:
                    kept.release()
                del dropped

        threads = [threading.Thread(target=work, args=(seq,)) for seq in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not ctx.kv.cells().held.any()
        ctx.kv.seq_rm(-1, 0, -1)
        assert ctx.kv.n_used == 0
