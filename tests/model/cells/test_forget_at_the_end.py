"""Texts that forget where the positions end that the model was trained on: their gaps are closed in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.engines import open_context, random_ids
from support.faults import fault
from support.models import N_VOCAB, SMALL, ModelSpec
from support.naive_scores import cells_of

import pykvgraph as kvg
from pykvgraph.context.forgetting import N_SINKS

N_TRAINED = 170
IDS = random_ids(600, N_VOCAB)


@pytest.fixture(scope="module")
def model(model_file: Callable[[ModelSpec], Path]) -> Iterator[kvg.Model]:
    lengths = {"llama.context_length": N_TRAINED}
    with kvg.Model(model_file(SMALL), device="cpu", kv_overrides=lengths) as model:
        yield model


def positions(ctx: kvg.Context) -> list[int]:
    return [pos for pos, _ in cells_of(ctx, 0, 0)]


@pytest.mark.parametrize("composite", [False, True])
def test_batches(model: kvg.Model, composite: bool) -> None:
    """What finds room beside what was forgotten counts, too."""
    with open_context(model, n_ctx=400, n_batch=50) as ctx:
        for budget in range(118, N_TRAINED, 3):
            ctx.kv.clear()
            reader = kvg.LongReader(ctx, on_full=kvg.Forget(budget, composite=composite))
            for begin, n in ((0, 50), (50, 50), (100, 30), (130, 50), (180, 20), (200, 50)):
                reader.read(IDS[begin : begin + n])
                assert ctx.kv.seq_pos_max(0) < N_TRAINED


@pytest.mark.parametrize("composite", [False, True])
def test_no_room_for_copies(model: kvg.Model, composite: bool) -> None:
    """A hold has cells that would move: it is said before any is forgotten."""
    told: list[kvg.ForgetReport] = []
    with open_context(model, n_ctx=N_TRAINED, n_batch=200) as ctx:
        kvg.Sequence(ctx).set(IDS[:N_TRAINED])
        hold = ctx.kv.hold(0, 60, -1)
        before = positions(ctx)
        forget = kvg.Forget(None, "keydiff", told.append, composite)
        with pytest.raises(kvg.CacheFullError, match="takes 110 copies of cells that others have"):
            next(kvg.generate(ctx, [7], on_full=forget))
        assert (positions(ctx), told) == (before, [])
        hold.release()
        hold = ctx.kv.hold(0, 0, N_SINKS)  # these don't move
        assert len(list(kvg.generate(ctx, [7], max_tokens=3, on_full=forget))) == 3
        assert len(told) == 1
        hold.release()


@pytest.mark.parametrize("site", ["copy-build", "copy-alloc", "copy-compute"])
def test_a_device_that_fails_while_they_are_closed(model: kvg.Model, site: str) -> None:
    """Whoever is to be told of what went is told, and the text goes on."""
    told: list[kvg.ForgetReport] = []
    with open_context(model, n_ctx=N_TRAINED, n_batch=200) as ctx:
        kvg.Sequence(ctx).set(IDS[:N_TRAINED])
        hold = ctx.kv.hold(0, N_TRAINED - 5, -1)
        forget = kvg.Forget(None, "window", told.append)
        with fault(site), pytest.raises(kvg.DeviceError):
            next(kvg.generate(ctx, [7], on_full=forget))
        n_gone = len(told[0].positions)
        assert ctx.kv.n_used == N_TRAINED - n_gone
        assert ctx.kv.seq_pos_max(0) == N_TRAINED - 1
        pieces = list(kvg.generate(ctx, [7], max_tokens=100, on_full=forget))
        assert (len(pieces), pieces[-1].finish_reason) == (100, "length")
        assert ctx.kv.seq_pos_max(0) < N_TRAINED
        hold.release()
