"""Hidden states after the final norm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from support.engines import decode, open_context, random_ids, run_of
from support.judge import nmse
from support.models import N_VOCAB, SMALL, ModelSpec

import pykvgraph as kvg


def test_embeddings_times_output_weights_are_the_logits(
    model_file: Callable[[ModelSpec], Path], small: kvg.Model
) -> None:
    reader = gguf.GGUFReader(model_file(SMALL))
    weights = next(np.asarray(tensor.data) for tensor in reader.tensors if tensor.name == "output.weight")
    with open_context(small, n_ctx=64, n_ubatch=7) as ctx:
        logits = decode(ctx, run_of(random_ids(20, N_VOCAB)))
        embeddings = ctx.embeddings()
    assert embeddings.shape == (20, small.n_embd)
    assert embeddings.dtype == np.float32
    assert nmse(embeddings @ weights.T, logits) <= 1e-6


def test_rows_are_those_of_the_outputs(small: kvg.Model) -> None:
    tokens = run_of(random_ids(20, N_VOCAB))
    with open_context(small, n_ctx=64) as ctx:
        decode(ctx, tokens)
        every = ctx.embeddings()
        ctx.reset()
        decode(ctx, [token._replace(logits=token.pos in (2, 19)) for token in tokens])
        assert nmse(ctx.embeddings(), every[[2, 19]]) <= 1e-6
