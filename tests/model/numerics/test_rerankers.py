"""Scores of texts by a model's classifier, as libllama gives them of the same file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import where
from support.architectures import ArchSpec
from support.embedder import RANK, vectors_by_libllama
from support.engines import random_ids
from support.faults import fault
from support.models import N_VOCAB, WeightType

import pykvgraph as kvg
from pykvgraph.context.pooling import pooled
from pykvgraph.context.prompt_batches import states_of
from pykvgraph.context.ranking import pooling_of_classes

Architecture = Callable[[ArchSpec], Path]
MEAN, FIRST = 1, 2
MOST = 2e-4  # between scores: ggml's GELU is a table of F16

BERT = ArchSpec("bert", head_dim=16, n_head_kv=4, pooling=RANK, n_classes=1)
QWEN = ArchSpec("qwen3", pooling=RANK, n_classes=2)
JINA = ArchSpec("jina-bert-v2", head_dim=16, n_head_kv=4, pooling=RANK, n_classes=1, gates="in one")
MODERN = ArchSpec(
    "modern-bert",
    n_layer=4,
    head_dim=16,
    n_head_kv=4,
    fused=True,
    window=24,
    period=3,
    pooling=RANK,
    n_classes=1,
)
NEO = ArchSpec("neo-bert", head_dim=16, fused=True, pooling=RANK, n_classes=3)
RERANKERS = [
    BERT,
    replace(BERT, class_hidden=False, seed=1),
    replace(BERT, n_classes=3, class_pooling=MEAN, seed=2),
    replace(BERT, weights=WeightType.Q8_0),
    QWEN,
    replace(QWEN, weights=WeightType.F16, seed=1),
    # with 0, ggml's table of GELU, which is in F16, tells nearly equal numbers apart
    replace(JINA, seed=1),
    replace(JINA, weights=WeightType.F16, seed=2),
    replace(JINA, gates="apart", seed=3),
    MODERN,
    replace(MODERN, class_pooling=FIRST, seed=1),
    replace(MODERN, class_hidden=False, n_classes=2, seed=2),
    NEO,
]
TEXTS = [random_ids(n, N_VOCAB, seed=n) for n in (60, 1, 33, 7)]


@pytest.mark.parametrize("spec", RERANKERS, ids=str)
def test_scores_are_libllamas(architecture: Architecture, spec: ArchSpec) -> None:
    """Of each text, and of each class: with K and V in F32, as libllama has them, and as they are by default,
    beside what flash attention makes of libllama's own.
    """
    path = architecture(spec)
    plain, flash = (np.stack(vectors_by_libllama(path, TEXTS, flash=on)) for on in (False, True))
    assert np.ptp(plain[:, 0]) > 1e-2  # or any scores would do
    with kvg.Model(path, device=where.device) as model:
        assert model.n_classes == spec.n_classes
        own = np.abs(flash - plain).max()
        rounded = scores_of(model)
        assert rounded.shape == plain.shape == (len(TEXTS), spec.n_classes)
        assert np.abs(rounded - plain).max() <= where.rule(max(MOST, 2 * own))
        if model.encodes:  # whose K and V libllama doesn't round
            exact = scores_of(model, type_k="f32", type_v="f32", flash_attn="off")
            # ggml rounds rows to F16 beside F16, and our products don't; to Q8_0 each rounds its own
            most = MOST if spec.weights == WeightType.F32 else 2e-3
            assert np.abs(exact - plain).max() <= where.rule(most)


def scores_of(model: kvg.Model, **arguments: Any) -> npt.NDArray[np.float32]:
    pooling = pooling_of_classes(model)
    with kvg.Context(model, n_ctx=256, n_batch=192, n_seq_max=4, **arguments) as ctx:
        states = states_of(ctx, TEXTS, "all")
        return ctx.classify(np.stack([pooled(rows, pooling) for rows in states]))


def test_what_is_no_reranker(architecture: Architecture) -> None:
    with (
        kvg.Model(architecture(replace(BERT, n_classes=0)), device="cpu") as model,
        kvg.Context(model, n_ctx=64) as ctx,
    ):
        assert model.n_classes == 0
        with pytest.raises(kvg.UnsupportedError, match=r"no reranker.*cls\.output\.weight"):
            pooling_of_classes(model)
        with pytest.raises(kvg.UnsupportedError, match="no classifier"):
            ctx.classify(np.zeros((1, model.n_embd), np.float32))


def test_a_classifier_that_fails(architecture: Architecture) -> None:
    with kvg.Model(architecture(BERT), device="cpu") as model, kvg.Context(model, n_ctx=64) as ctx:
        vectors = np.ones((2, model.n_embd), np.float32)
        expected = ctx.classify(vectors)
        with fault("classify"), pytest.raises(kvg.DeviceError, match="scores of 2 texts"):
            ctx.classify(vectors)
        assert (ctx.classify(vectors) == expected).all()


def test_vectors_of_another_shape(architecture: Architecture) -> None:
    with kvg.Model(architecture(BERT), device="cpu") as model, kvg.Context(model, n_ctx=64) as ctx:
        for shape in ((model.n_embd,), (2, model.n_embd + 1), (1, 1, model.n_embd)):
            with pytest.raises(kvg.InvalidArgumentError, match="vectors must be an array"):
                ctx.classify(np.zeros(shape, np.float32))
        assert ctx.classify(np.zeros((0, model.n_embd), np.float32)).shape == (0, 1)
