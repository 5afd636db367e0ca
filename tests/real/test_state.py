"""A sequence that is saved and restored goes on as the one that never left."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engines import open_context
from support.judge import FLOOR, nmse
from support.real import N_BATCH, news_of

import pykvgraph as kvg

pytestmark = pytest.mark.slow
N_SAID = 12


def goes_on(ctx: kvg.Context, last: int) -> list[int]:
    """The next tokens, the likeliest each time."""
    return [piece.token for piece in kvg.generate(ctx, [last], max_tokens=N_SAID)]


@pytest.mark.parametrize(("name", "n"), [("smollm2_f32", 300), ("gemma3_f32", 800)])  # a window is 512
def test_saved_and_restored(name: str, n: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model = request.getfixturevalue(name)
    *ids, last = news_of(model, n)
    with open_context(model, n_ctx=1024, n_batch=N_BATCH) as ctx:
        for begin in range(0, n - 1, N_BATCH):
            batch = kvg.Batch()
            batch.extend(ids[begin : begin + N_BATCH], begin, logits=False)
            ctx.decode(batch)
        blob = ctx.kv.save(seq=0)
        ctx.kv.save_file(tmp_path / "saved.kvgstate", seq=0)
        said = goes_on(ctx, last)
        expected = ctx.logits()
        ctx.reset()
        ctx.kv.load(blob, seq=0)
        assert goes_on(ctx, last) == said
        assert nmse(ctx.logits(), expected) <= FLOOR
    with open_context(model, n_ctx=1536, n_batch=N_BATCH, n_seq_max=2) as other:
        other.kv.load_file(tmp_path / "saved.kvgstate", seq=1)
        assert [piece.token for piece in kvg.generate(other, [last], seq=1, max_tokens=N_SAID)] == said
