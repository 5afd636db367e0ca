"""Perplexity of news beside libllama's logits, and the table of divergences beside NumPy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from support import real
from support.chance import THOROUGH
from support.engines import Logits, open_context
from support.naive_perplexity import chunk_rows, kl_table, losses_of
from support.real import Libllama

import pykvgraph as kvg
from pykvgraph.demos.divergence import Divergence, diverged, statistics
from pykvgraph.demos.perplexity import bos_of, chunks_of, estimate, read_chunks

pytestmark = pytest.mark.slow
THOROUGHLY = pytest.mark.skipif(not THOROUGH, reason="minutes: KVGRAPH_THOROUGH=1 runs it")
FEW, MANY = (2, 64), (20, 512)  # chunks, and tokens of each


class Both(NamedTuple):
    """Losses of ours and of libllama's logits, token by token."""

    ours: np.ndarray
    theirs: np.ndarray


def losses(model: kvg.Model, kv_type: str, n_chunks: int, n_ctx: int) -> Both:
    chunks = chunks_of(model, real.NEWS.read_text(encoding="utf-8"), n_ctx, n_chunks)
    ours, theirs = [], []
    with (
        open_context(model, n_ctx=n_ctx, n_batch=n_ctx, type_k=kv_type, type_v=kv_type) as ctx,
        Libllama(model.path, n_ctx, kv_type=kv_type, flash=True) as libllama,
    ):
        ids = chunks.tokens.ravel().tolist()
        for found in read_chunks(ctx, chunks):
            ours.append(found.losses())
        for rows, nexts in chunk_rows(libllama.read, ids, n_ctx, bos_of(model), n_chunks):
            theirs.append(losses_of(rows, nexts))
    return Both(np.concatenate(ours), np.concatenate(theirs))


CASES = [
    *(("smollm2_f32", kv_type, FEW) for kv_type in ("f16", "q8_0")),
    *(("gemma3_f32", kv_type, FEW) for kv_type in ("f16", "q8_0")),
    *(
        pytest.param(name, kv_type, MANY, marks=THOROUGHLY)
        for name in ("smollm2_f32", "smollm2", "gemma3_f32", "gemma3")
        for kv_type in ("f16", "q8_0")
    ),
]


@pytest.mark.parametrize(("name", "kv_type", "sizes"), CASES)
def test_as_of_libllamas_logits(
    name: str, kv_type: str, sizes: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    """To three digits, but for chance: what is quantized is multiplied with rounded values, in two ways.

    Chance: two standard errors of the mean difference, token by token.
    """
    found = losses(request.getfixturevalue(name), kv_type, *sizes)
    ours, theirs = estimate(found.ours), float(np.exp(found.theirs.mean()))
    apart = found.ours - found.theirs
    chance = 2 * float(apart.std() / len(apart) ** 0.5)
    print(f"{name} {kv_type}, {sizes}: {ours.value:.4f}, libllama {theirs:.4f}, by chance {chance:.3%}")
    assert abs(np.log(ours.value / theirs)) <= 5e-4 + chance


@pytest.mark.parametrize(("n_chunks", "n_ctx"), [FEW, pytest.param(*MANY, marks=THOROUGHLY)])
def test_the_table_of_divergences(smollm2: kvg.Model, n_chunks: int, n_ctx: int) -> None:
    """Q8_0 beside F16, to 1e-6 what NumPy makes of the same rows of ours."""
    chunks = chunks_of(smollm2, real.NEWS.read_text(encoding="utf-8"), n_ctx, n_chunks)
    rows: dict[str, list[Logits]] = {"f16": [], "q8_0": []}
    nexts: list[list[int]] = []
    parts: list[Divergence] = []
    with (
        open_context(smollm2, n_ctx=n_ctx, n_batch=n_ctx) as plain,
        open_context(smollm2, n_ctx=n_ctx, n_batch=n_ctx, type_k="q8_0", type_v="q8_0") as small,
    ):
        for one, other in zip(read_chunks(plain, chunks), read_chunks(small, chunks), strict=True):
            parts.append(diverged(one.logits, other.logits, one.nexts))
            rows["f16"].append(one.logits.copy())
            rows["q8_0"].append(other.logits.copy())
            nexts.append(one.nexts.tolist())
    told, expected = statistics(Divergence.joined(parts)), kl_table(rows["f16"], rows["q8_0"], nexts)
    assert {name: told[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert expected["kl_mean"] > 1e-5
