"""Eight texts with published models: each says together what it says alone, by the same logits to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.real import news_of
from support.spoken_rows import listen

import pykvgraph as kvg

SAY = kvg.SamplingParams(max_tokens=16)
# of the shared beginning, and of its own
LENGTHS = [(700, 40), (700, 3), (650, 70), (700, 1), (300, 90), (512, 33), (700, 64), (100, 80)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@pytest.mark.parametrize(
    "n_ctx", [4096, 1600]
)  # in the latter prefixes make way, and cells are taken in any order
def test_eight_texts(request: Any, monkeypatch: pytest.MonkeyPatch, name: str, n_ctx: int) -> None:
    model = request.getfixturevalue(name)
    rows = listen(monkeypatch)
    ids = news_of(model, 1500)
    prompts = [ids[:n] + ids[700 + 100 * i :][:own] for i, (n, own) in enumerate(LENGTHS)]
    with kvg.Engine(model, n_ctx=n_ctx, n_seq_max=4) as engine:
        requests = [engine.submit(prompt, SAY) for prompt in prompts]
        said = [each.result(120) for each in requests]
        assert engine.stats().prefix_hit_tokens > 1500
    for prompt, request_together, each in zip(prompts, requests, said, strict=True):
        with kvg.Engine(model, n_ctx=1024, n_seq_max=1) as engine:
            alone = engine.submit(prompt, SAY)
            assert alone.result(120).tokens == each.tokens
        assert np.array_equal(np.stack(rows[alone]), np.stack(rows[request_together]))
