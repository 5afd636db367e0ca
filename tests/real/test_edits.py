"""A cut in the middle of a real text: what it costs beside the edited text, decoded as it then stands."""

from __future__ import annotations

import pytest
from support.chance import THOROUGH
from support.engines import open_context
from support.real import divergences, news_of, read, same_top

import pykvgraph as kvg

pytestmark = pytest.mark.slow
N_TEXT, CUT, N_BEHIND = 1000, range(300, 600), 120


@pytest.mark.parametrize("article", [0, 60] if THOROUGH else [0])
def test_a_cut_costs_little(smollm2_f32: kvg.Model, article: int) -> None:
    """Not nothing: the rows behind the cut were made of what had seen it."""
    ids = news_of(smollm2_f32, N_TEXT + N_BEHIND, article)
    text, behind = ids[:N_TEXT], ids[N_TEXT:]
    edited = text[: CUT.start] + text[CUT.stop :]
    with open_context(smollm2_f32, n_ctx=1280, n_batch=128) as ctx:
        read(ctx, edited)
        fresh = read(ctx, behind, len(edited))
        ctx.reset()
        read(ctx, text)
        ctx.kv.seq_rm(0, CUT.start, CUT.stop)
        ctx.kv.seq_add(0, CUT.stop, -1, -len(CUT))
        cut = read(ctx, behind, len(edited))
    kl, same = float(divergences(fresh, cut).mean()), same_top(fresh, cut)
    print(f"mean KL {kl:.4f}, same top {same:.3f}")
    assert kl <= 0.03
    assert same >= 0.9
