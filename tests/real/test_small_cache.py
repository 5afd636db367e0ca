"""A text that is many times longer than its cache is predicted as well at its end as near its beginning."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from support.chance import THOROUGH
from support.engines import open_context
from support.real import N_BATCH, losses, news_of

import pykvgraph as kvg

pytestmark = pytest.mark.slow
N_KEEP = 32
THOROUGHLY = pytest.mark.skipif(not THOROUGH, reason="minutes: KVGRAPH_THOROUGH=1 runs it")
COMMIT = [("smollm2", 2_560, 1024, {}), ("gemma3", 2_560, 1024, {"swa_full": True})]
LONG = [
    ("smollm2", 4_608, 1024, {}),
    ("gemma3", 4_608, 1024, {"swa_full": True}),
    ("smollm2", 53_000, 2048, {}),
    ("smollm2", 53_000, 2048, {"type_k": "q8_0", "type_v": "q8_0"}),
    ("smollm2", 53_000, 2048, {"type_k": "q4_0", "type_v": "q4_0"}),
    ("gemma3", 12_000, 1024, {"swa_full": True}),
]


def perplexity(losses: Iterable[float]) -> float:
    return float(np.exp(np.mean(list(losses))))


@pytest.mark.parametrize(
    ("name", "n", "n_ctx", "options"),
    [*COMMIT, *(pytest.param(*each, marks=THOROUGHLY) for each in LONG)],
)
def test_perplexity_stays(
    name: str, n: int, n_ctx: int, options: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Here and there it is what it is in a cache that never shifted, of half as many tokens.

    One place is not compared with another: a text is harder in some places than in others.
    """
    model, n_half = request.getfixturevalue(name), n_ctx // 2
    ids, n_ends = news_of(model, n), 8 if THOROUGH else 2
    ends = [n * (i + 1) // n_ends for i in range(n_ends) if n * (i + 1) // n_ends >= n_ctx]
    judged = [range(end - n_half, end) for end in ends]
    shifts: list[kvg.ShiftReport] = []
    with open_context(model, n_ctx=n_ctx, n_batch=N_BATCH, **options) as ctx:
        shift = kvg.ContextShift(N_KEEP, on_shift=shifts.append)
        found = losses(ctx, ids, {*itertools.chain(*judged)}, shift)
    alone: dict[int, float] = {}
    with open_context(model, n_ctx=n_ctx, n_batch=N_BATCH) as ctx:
        for end in ends:
            ctx.reset()
            begin = end - n_ctx
            text = ids[:N_KEEP] + ids[begin + N_KEEP : end]  # models want the very first tokens of a text
            alone |= {begin + i: loss for i, loss in losses(ctx, text, range(n_half, n_ctx)).items()}
    assert len(shifts) >= n // n_ctx
    for places in [*judged, [*alone]]:
        ours, never_shifted = (perplexity(of[i] for i in places) for of in (found, alone))
        print(f"{name} to {places[-1]} {options}: {ours:.2f}, never shifted {never_shifted:.2f}")
        assert ours <= (1.15 if places in judged else 1.1) * never_shifted
