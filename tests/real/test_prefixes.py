"""Prompts that begin alike, on a model with windows: the second one goes on at the end of a block."""

from __future__ import annotations

import numpy as np
import pytest
from support.real import news_of
from support.soak import rows_behind

import pykvgraph as kvg

pytestmark = pytest.mark.slow
N_SHARED, N_OWN, BLOCK = 330, 20, 32


def test_the_second_prompt_hits(gemma3: kvg.Model) -> None:
    """What is decoded of each is counted; what is said is likely behind the prompt alone, too."""
    ids = news_of(gemma3, N_SHARED + 3 * N_OWN)
    prompts = [ids[:N_SHARED] + ids[N_SHARED + i * N_OWN :][:N_OWN] for i in range(3)]
    decoded, found = [], []
    with kvg.Engine(gemma3, n_ctx=4096, n_seq_max=2) as engine:
        for prompt in prompts:
            before = engine.stats().decoded_tokens
            found.append(engine.submit(prompt, kvg.SamplingParams(max_tokens=4)).result(120))
            decoded.append(engine.stats().decoded_tokens - before - 3)  # of its answer
    n_again = N_SHARED % BLOCK
    assert [each.n_cached for each in found] == [0, N_SHARED - n_again, N_SHARED]
    assert decoded == [N_SHARED + N_OWN, n_again + N_OWN, N_OWN]
    for prompt, each in zip(prompts, found, strict=True):
        rows = rows_behind(gemma3, prompt, each.tokens)
        chosen = rows[np.arange(len(each.tokens)), list(each.tokens)]
        assert (rows.max(axis=1) - chosen <= 0.01 * np.ptp(rows, axis=1)).all()  # Q8_0 rounds
