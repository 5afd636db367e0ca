"""Vectors of texts, as libllama makes them of the same file: by encoders, and by a decoder that embeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import where
from support.arch_table import Judged, Record, leave
from support.architectures import ArchSpec
from support.embedder import Vector, cosine, vectors_by_libllama
from support.engines import random_ids
from support.judge import EXACT, FLOOR, nmse
from support.models import N_VOCAB, WeightType

import pykvgraph as kvg
from pykvgraph.context.pooling import pooled, pooling_of
from pykvgraph.context.prompt_batches import states_of

Architecture = Callable[[ArchSpec], Path]
MEAN, FIRST, LAST = 1, 2, 3
LEAST = 1e-6  # of 1 - cosine: far closer than the 0.9999 that people ask for

BERT = ArchSpec("bert", head_dim=16, n_head_kv=4, pooling=FIRST)
NOMIC = ArchSpec("nomic-bert", head_dim=16, n_head_kv=4, fused=True, pooling=MEAN)
# windows of an odd and of an even number
GEMMA = ArchSpec("gemma-embedding", n_layer=6, window=24, period=3, pooling=MEAN)
JINA_2 = ArchSpec("jina-bert-v2", head_dim=16, n_head_kv=4, pooling=MEAN)
JINA_3 = ArchSpec("jina-bert-v3", head_dim=16, n_head_kv=4, fused=True, pooling=MEAN)
MODERN = ArchSpec(
    "modern-bert", n_layer=4, head_dim=16, n_head_kv=4, fused=True, window=24, period=3, pooling=MEAN
)
EURO = ArchSpec("eurobert", head_dim=16, pooling=MEAN)
NEO = ArchSpec("neo-bert", head_dim=16, fused=True, pooling=MEAN)
NEWER = [
    *(replace(JINA_2, seed=i, gates=gates) for i, gates in enumerate(("apart", "in one", "none"))),
    replace(JINA_2, two_norms=True, biases=True),
    *(replace(JINA_3, seed=seed, n_rot=8 * (seed == 1)) for seed in range(3)),
    *(replace(MODERN, seed=seed, window=24 + seed) for seed in range(3)),
    replace(MODERN, activation="silu", window=0),
    replace(MODERN, period=2),
    *(replace(EURO, seed=seed, biases=seed == 1, scaling="yarn" * (seed == 2)) for seed in range(3)),
    *(replace(NEO, seed=seed, n_rot=8 * (seed == 1)) for seed in range(3)),
    *(replace(each, weights=WeightType.Q8_0) for each in (JINA_2, JINA_3, MODERN, EURO, NEO)),
]
ENCODERS = [
    *NEWER,
    *(replace(BERT, seed=seed, fused=seed == 1) for seed in range(3)),
    *(replace(NOMIC, seed=seed, biases=seed == 1) for seed in range(3)),
    # with 0, two experts are as good for a token
    *(replace(NOMIC, arch="nomic-bert-moe", n_layer=4, n_expert=4, seed=seed) for seed in (1, 2, 3)),
    *(replace(GEMMA, seed=seed, window=24 + seed) for seed in range(3)),
    replace(GEMMA, n_dense=96, n_head=8, n_head_kv=1),
    replace(GEMMA, scaling="linear"),
]
QWEN = [ArchSpec("qwen3", pooling=LAST), ArchSpec("qwen3", pooling=MEAN)]
TEXTS = [random_ids(n, N_VOCAB, seed=n) for n in (90, 1, 33, 7)]  # past windows


def exact_context(model: kvg.Model) -> kvg.Context:
    """Nothing is rounded but sums, and ggml's GELU."""
    return kvg.Context(
        model, n_ctx=256, n_batch=192, n_seq_max=4, flash_attn="off", type_k="f32", type_v="f32"
    )


def distance(ours: list[Vector], theirs: list[Vector]) -> float:
    return 1 - min(cosine(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("spec", ENCODERS + QWEN, ids=str)
def test_vectors_are_libllamas(architecture: Architecture, spec: ArchSpec, record_property: Record) -> None:
    """Of each token, and pooled as the file says; four texts in one batch."""
    path = architecture(spec)
    theirs = vectors_by_libllama(path, TEXTS)
    plain, flash = (vectors_by_libllama(path, TEXTS, pooling=0, flash=on) for on in (False, True))
    own, worst = nmse(np.concatenate(flash), np.concatenate(plain)), 0.0
    allowed = LEAST
    if spec.weights is not WeightType.F32:  # whose products round every activation
        other = vectors_by_libllama(path, TEXTS, flash=True)
        allowed = max(LEAST, 2 * distance(other, theirs))
    with kvg.Model(path, device=where.device) as model:
        assert model.encodes == (spec.arch != "qwen3")
        pooling = pooling_of(-1, model.metadata)
        for flash_attn in ("off", "on"):
            with kvg.Context(model, n_ctx=256, n_batch=192, n_seq_max=4, flash_attn=flash_attn) as ctx:
                states = states_of(ctx, TEXTS, "all")
                if not spec.n_dense:  # libllama gives those of tokens as they are before the two matrices
                    theirs_here = np.concatenate(flash if flash_attn == "on" else plain)
                    worst = max(worst, nmse(np.concatenate(states), theirs_here))
                assert distance([pooled(rows, pooling) for rows in states], theirs) <= where.rule(allowed)
    assert worst <= where.rule(max(FLOOR, 2 * own))
    if model.encodes:
        with kvg.Model(path, device="cpu") as model, exact_context(model) as ctx:
            exact = (
                None
                if spec.n_dense
                else nmse(np.concatenate(states_of(ctx, TEXTS, "all")), np.concatenate(plain))
            )
        exact = exact if spec.weights is WeightType.F32 else None
        assert exact is None or exact <= EXACT
        leave(record_property, path, Judged(exact, worst, own))


def test_every_token_sees_the_whole_text(architecture: Architecture) -> None:
    """The last token changes what comes of the first, which is within reach in every layer or another's."""
    for spec in (BERT, GEMMA):
        with kvg.Model(architecture(spec), device="cpu") as model:
            ids = random_ids(40, N_VOCAB, seed=1)
            with kvg.Context(model, n_ctx=64) as ctx:
                first, other = (states_of(ctx, [[*ids, last]], "all")[0] for last in (3, 4))
                assert cosine(first[0], other[0]) < 0.9999


def test_nothing_stays(architecture: Architecture) -> None:
    """A text is the same whatever came before it, beside others, and longer than n_ubatch."""
    with (
        kvg.Model(architecture(BERT), device="cpu") as model,
        kvg.Context(model, n_ctx=128, n_batch=128, n_ubatch=16, n_seq_max=4) as ctx,
    ):
        assert ctx.n_ubatch == 128
        alone = [states_of(ctx, [ids], "all")[0] for ids in TEXTS[:2]]
        assert ctx.kv.n_used == 0
        assert ctx.kv.seq_pos_max(0) == -1
        together = states_of(ctx, TEXTS[:3], "all")
        assert ctx.kv.n_used == 0
        assert distance(together[:2], alone) <= where.rule(LEAST)


def test_what_an_encoder_does_not_do(architecture: Architecture) -> None:
    with (
        kvg.Model(architecture(BERT), device="cpu") as model,
        kvg.Context(model, n_ctx=128, n_batch=64, n_seq_max=2) as ctx,
    ):
        batch = kvg.Batch()
        batch.extend([1, 2, 3], 0)
        for call in (
            lambda: ctx.decode(batch, scores=True),
            lambda: ctx.decode_last(batch),
            lambda: ctx.decode_rows(batch),
            lambda: ctx.append(1),
            ctx.logits,
            ctx.logits_view,
            ctx.scores,
            lambda: kvg.generate(ctx, [1]),
        ):
            with pytest.raises(kvg.UnsupportedError, match=r"bert is an encoder.*Llama.embed"):
                call()
        for bad in ({"checkpoints": [2]}, {"seq_ids": (0, 1)}):
            asked = kvg.Batch()
            asked.extend([1, 2, 3], 0, **bad)
            with pytest.raises(kvg.UnsupportedError, match="encoder"):
                ctx.decode(asked)
        ctx.decode(batch)
        assert ctx.embeddings().shape == (1, model.n_embd)
        with pytest.raises(kvg.InvalidArgumentError, match="n_batch"):
            states_of(ctx, [[1] * 65], "all")


def test_learned_positions_end(architecture: Architecture) -> None:
    short = replace(BERT, n_ctx_train=16)
    with kvg.Model(architecture(short), device="cpu") as model, kvg.Context(model, n_ctx=64) as ctx:
        assert len(states_of(ctx, [[5] * 16], "all")[0]) == 16
        with pytest.raises(kvg.InvalidArgumentError, match="positions 0 to 15"):
            states_of(ctx, [[5] * 17], "all")


def test_a_text_is_one_batch(architecture: Architecture) -> None:
    """A later part would see what came before, and what came before would not see the part."""
    with kvg.Model(architecture(BERT), device=where.device) as model, exact_context(model) as ctx:
        later, long = kvg.Batch(), kvg.Batch()
        later.extend([5, 6], 3, (0,))
        long.extend([5] * 193, 0, (0,))
        with pytest.raises(kvg.InvalidArgumentError, match="from position 0 on"):
            ctx.decode(later)
        with pytest.raises(kvg.InvalidArgumentError, match="use a larger n_batch"):
            ctx.decode(long)
        with pytest.raises(kvg.UnsupportedError, match="encoder"):
            kvg.LongReader(ctx)
