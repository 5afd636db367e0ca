"""Llama 4: layers that attend to their own chunk of positions, and queries that others temper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.architectures import ArchSpec
from support.engines import Engine, Logits, decode, open_context, prompt_then_singles, random_ids, run_of
from support.faults import fault
from support.judge import judge, nmse
from support.models import N_VOCAB

import pykvgraph as kvg

SPEC = ArchSpec("llama4", 3, n_expert=2, n_ff_shared=96)  # every layer has chunks
Architecture = Callable[[ArchSpec], Path]
N_BEFORE, N_PROMPT, N_MORE = 7900, 250, 150  # the chunk ends in the prompt, and the singles are behind it


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_logits_past_a_chunk(architecture: Architecture, seed: int) -> None:
    """8,300 tokens; the rows from 7,900 on are compared."""
    spec = ArchSpec("llama4", 4, 32, 2, 1, 16, 32, n_expert=2, n_ff_shared=32, seed=seed)
    ids = random_ids(N_BEFORE + N_PROMPT + N_MORE, N_VOCAB, seed)

    def run(engine: Engine) -> Logits:
        before = run_of(ids[:N_BEFORE])
        for first in range(0, N_BEFORE, 500):
            part = before[first : first + 500]
            engine.decode([token._replace(logits=i == len(part) - 1) for i, token in enumerate(part)])
        return prompt_then_singles(engine, ids[N_BEFORE:], N_PROMPT, pos0=N_BEFORE)

    judge(architecture(spec), run, n_ctx=8448, n_batch=512, attentions=("auto",))


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_chunk_knows_nothing_of_the_one_before(architecture: Architecture, cut: int) -> None:
    """Where every layer has chunks (of 24 here), each chunk is a text of its own."""
    ids = random_ids(60, N_VOCAB)
    with fault("chunk", 24), kvg.Model(architecture(SPEC), device="cpu") as model:
        with open_context(model, n_ctx=60, n_batch=cut, type_k="f32", type_v="f32") as ctx:
            parts = [run_of(ids[i : i + cut], i) for i in range(0, 60, cut)]
            rows = np.concatenate([decode(ctx, part) for part in parts])
            if cut < 24:
                assert ctx.kv.n_used < 60  # a chunk that is over is left behind
        for first in range(0, 60, 24):
            with open_context(model, n_ctx=60, type_k="f32", type_v="f32") as ctx:
                alone = decode(ctx, run_of(ids[first : first + 24], first))
            assert nmse(rows[first : first + 24], alone) <= 1e-6


def test_what_a_chunk_has_lost(architecture: Architecture) -> None:
    """A sequence may go back to a chunk's beginning; no shift brings lost positions into a chunk."""
    ids = random_ids(60, N_VOCAB)
    with (
        fault("chunk", 24),
        kvg.Model(architecture(SPEC), device="cpu") as model,
        open_context(model, n_ctx=60, n_batch=4, type_k="f32", type_v="f32") as ctx,
    ):
        for first in range(0, 60, 4):
            decode(ctx, run_of(ids[first : first + 4], first))
        ctx.kv.seq_rm(0, 52, -1)
        again = decode(ctx, run_of(ids[52:56], 52))
        with open_context(model, n_ctx=60, type_k="f32", type_v="f32") as fresh:
            assert nmse(again, decode(fresh, run_of(ids[48:56], 48))[4:]) <= 1e-6
        ctx.kv.seq_rm(0, 32, 48)
        with pytest.raises(kvg.UnsupportedError, match="swa_full"):
            ctx.kv.seq_add(0, 48, -1, -20)
