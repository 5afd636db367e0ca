"""Engine.embed: the hidden states that a context of its own gives, beside texts that run."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import where
from support.architectures import ArchSpec
from support.kinds import KINDS
from support.soak import F32, are_likeliest

import pykvgraph as kvg


@pytest.mark.parametrize("spec", KINDS, ids=str)
def test_vectors_beside_texts_that_run(spec: ArchSpec, architecture: Callable[[ArchSpec], Path]) -> None:
    rng = random.Random(1)
    with kvg.Model(architecture(spec), device=where.device) as model:
        text, other = ([rng.randrange(model.n_vocab) for _ in range(n)] for n in (150, 20))
        with kvg.Context(model, n_ctx=256, **F32) as ctx:
            batch = kvg.Batch()
            batch.extend(text, 0, logits="all")
            ctx.decode(batch)
            states = ctx.embeddings()
        with kvg.Engine(model, n_ctx=256, n_seq_max=2, background=False, **F32) as engine:
            running = engine.submit(other, kvg.SamplingParams(max_tokens=30))
            for _ in range(3):
                engine.step()
            used, n_steps = engine.context.kv.groups[0].n_used, engine.stats().steps
            wanted: dict[str, Any] = {"none": states, "mean": states.mean(axis=0)}
            wanted |= {"first": states[0], "last": states[-1]}
            for pooling, vector in wanted.items():
                found = engine.embed(text, pooling)  # type: ignore[arg-type]
                assert found.shape == vector.shape
                assert np.abs(found - vector).max() <= 1e-3 * np.abs(vector).max()
            n_steps = engine.stats().steps - n_steps  # of the text that runs, each of which took a cell
            assert engine.context.kv.groups[0].n_used == used + n_steps
            assert are_likeliest(model, other, running.result().tokens)
            with pytest.raises(kvg.CacheFullError, match="300 tokens"):
                engine.embed(text * 2)
            with pytest.raises(kvg.InvalidArgumentError, match="pooling"):
                engine.embed(text, "rank")  # type: ignore[arg-type]
            with pytest.raises(kvg.InvalidArgumentError, match="empty"):
                engine.embed([])
