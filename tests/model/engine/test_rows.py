"""Rows of logits are those of a text alone, whoever is decoded beside it and whatever it shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import where
from support.architectures import ArchSpec
from support.judge import nmse
from support.kinds import KINDS, SINKS
from support.recurrent import MAMBA2
from support.soak import F32
from support.spoken_rows import SpokenRows, listen

import pykvgraph as kvg

SPECS = [*KINDS, SINKS, MAMBA2]
N_SAID = 8


@pytest.fixture(scope="module", params=SPECS, ids=str)
def model(request: Any, architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(request.param), device=where.device) as model:
        yield model


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> SpokenRows:
    return listen(monkeypatch)


def alone(model: kvg.Model, ids: list[int]) -> npt.NDArray[np.float32]:
    """The last N_SAID rows of a text that one context decodes in one batch."""
    with kvg.Context(model, n_ctx=512, **F32) as ctx:
        batch = kvg.Batch()
        batch.extend(ids, 0, logits="all")
        ctx.decode(batch)
        return ctx.logits()[-N_SAID:]


@pytest.mark.parametrize("at_once", [True, False])
def test_logits_are_those_of_the_text_alone(model: kvg.Model, rows: SpokenRows, at_once: bool) -> None:
    """Six texts with 90 tokens in common: chunks of prompts beside texts that talk, cells, windows and states
    that are shared. NMSE at most 1e-6."""
    rng = np.random.default_rng(1)
    common = rng.integers(0, model.n_vocab, 90).tolist()
    prompts = [common + rng.integers(0, model.n_vocab, n).tolist() for n in (40, 3, 70, 1, 33)]
    prompts.append(common[:50] + prompts[0])
    params = kvg.SamplingParams(max_tokens=N_SAID)
    with kvg.Engine(model, n_ctx=2048, n_seq_max=4, n_batch=48, background=False, **F32) as engine:
        requests = []
        for prompt in prompts:
            requests.append(engine.submit(prompt, params))
            if not at_once:
                requests[-1].result()
        said = [request.result() for request in requests]
        assert engine.stats().prefix_hit_tokens > 200
    for request, prompt, each in zip(requests, prompts, said, strict=True):
        expected = alone(model, [*prompt, *each.tokens[:-1]])
        assert nmse(np.stack(rows[request]), expected) <= where.limit(1e-6)
