"""Switching between texts: what an earlier one had is there when it comes back, on every kind of model."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import chance, where
from support.architectures import ArchSpec
from support.ctrl_c_at_a_line import ctrl_c_at
from support.engines import open_context, random_ids
from support.judge import nmse
from support.models import N_VOCAB, SMALL, ModelSpec, write_model

import pykvgraph as kvg
from pykvgraph.prefix import index, node, sequence_index
from pykvgraph.sequence import sequence, tokens
from pykvgraph.sequence.sequence import TokenSequence, checkpoint_cells, earlier_texts
from pykvgraph.types import CellsView

OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_batch": 64, "type_k": "f32", "type_v": "f32"}
SPECS: list[ModelSpec | ArchSpec] = [
    SMALL,
    ArchSpec("gemma3", n_layer=3, window=24, period=4),
    ArchSpec("qwen35", n_layer=4, period=4, state_heads=4),
]
# ggml's GELU is a table of F16: gemma3's logits differ by 1e-8 where a text is decoded in other pieces,
# llama's by 1e-12. One other token in sight makes it 1e-3.
ROUNDING = 1e-7
A, B, C = (random_ids(150, N_VOCAB, seed) for seed in range(3))


@pytest.fixture(scope="module", params=SPECS, ids=str)
def model(
    request: pytest.FixtureRequest,
    architecture: Callable[[ArchSpec], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[kvg.Model]:
    spec = request.param
    path = (
        architecture(spec) if isinstance(spec, ArchSpec) else write_model(spec, tmp_path_factory.mktemp("m"))
    )
    with kvg.Model(path, device=where.device) as model:
        yield model


@pytest.fixture
def ctx(model: kvg.Model) -> Iterator[kvg.Context]:
    with open_context(model, checkpoint_cells=checkpoint_cells(model), **OPTIONS) as ctx:
        yield ctx


def alone(model: kvg.Model, ids: list[int]) -> Any:
    """The logits after these tokens, in a context of their own."""
    with open_context(model, **OPTIONS) as ctx:
        return TokenSequence(ctx).set(ids).last.logits


def test_a_conversation_that_comes_back_decodes_what_is_new(ctx: kvg.Context) -> None:
    text = TokenSequence(ctx, earlier=earlier_texts(ctx))
    for ids, n_new in ((A, 150), (B, 150), (A + C[:5], 5), (B + C[:9], 9), (A + C[:20], 20)):
        change = text.set(ids)
        assert change.n_decoded <= n_new, (len(ids), n_new)
        assert nmse(change.last.logits, alone(ctx.model, ids)) <= ROUNDING
    assert ctx.kv.n_used <= 150 + 150 + 20 + 9


def test_a_window_that_keeps_everything_comes_back_too(architecture: Callable[[ArchSpec], Path]) -> None:
    """With cells for checkpoints, the group of a window is as large as the context."""
    path = architecture(ArchSpec("gemma3", n_layer=3, window=24, period=2))
    options = OPTIONS | {"n_ctx": 256}
    with (
        kvg.Model(path, device=where.device) as model,
        open_context(model, checkpoint_cells=checkpoint_cells(model), **options) as ctx,
    ):
        assert [group.n_cells for group in ctx.kv.groups] == [256, 256]
        text = TokenSequence(ctx, earlier=earlier_texts(ctx))
        for ids, n_new in ((A[:70], 70), (B[:70], 70), (A[:70] + C[:5], 5), (B[:70] + C[:5], 5)):
            change = text.set(ids)
            assert change.n_decoded == n_new
        assert nmse(change.last.logits, alone(model, ids)) <= ROUNDING


def test_earlier_texts_make_room(ctx: kvg.Context) -> None:
    """Texts of 150 tokens in 512 cells: there is room for three; token by token, too."""
    text = TokenSequence(ctx, earlier=earlier_texts(ctx))
    rng = random.Random(chance.seed(1))
    for seed in range(3, 8):
        ids = random_ids(150, N_VOCAB, seed)
        text.set(ids)
        for _ in range(30):
            ids.append(rng.randrange(N_VOCAB))
            last = text.append(ids[-1])
    assert nmse(last.logits, alone(ctx.model, ids)) <= ROUNDING
    whole = random_ids(500, N_VOCAB, 9)
    assert nmse(text.set(whole).last.logits, alone(ctx.model, whole)) <= ROUNDING


def test_texts_at_random(ctx: kvg.Context) -> None:
    """Set, append, clear, shift: the logits are always those of the text alone, or of the shifted cells."""
    text, rng = TokenSequence(ctx, earlier=earlier_texts(ctx)), random.Random(chance.seed(3))
    texts = [A, B, C, A[:60] + B[60:], A[:100] + C]
    for step in range(60):
        chosen = rng.choice(texts)
        ids = chosen[: rng.randrange(1, len(chosen))] + random_ids(rng.randrange(5), N_VOCAB, step)
        last = text.set(ids).last
        for token in random_ids(rng.randrange(4), N_VOCAB, 100 + step):
            ids.append(token)
            last = text.append(token)
        if step % 10 == 3:
            ctx.kv.clear()
        elif step % 10 == 7 and ctx.kv.can_shift and ctx.model.arch == "llama":
            text.discard(10, 20) if len(text) > 30 else None
        assert nmse(last.logits, alone(ctx.model, ids)) <= ROUNDING, step


def test_an_index_that_is_renewed_holds_nothing(ctx: kvg.Context) -> None:
    """After kv.clear() texts were kept beside dead ones, and their cells until Python's collector came."""
    earlier = earlier_texts(ctx)
    text = TokenSequence(ctx, earlier=earlier)
    for ids in (A, B):
        text.set(ids)
    ctx.kv.clear()
    gc.collect()
    gc.disable()
    try:
        for ids in (B, C, A + C[:5]):  # B is kept while A's holds are dead; the last finds them
            text.set(ids)
        assert ctx.kv.n_used == len(A) + 5
        text.set(B)
        earlier.clear()  # of the index that is in use now
        assert ctx.kv.n_used == len(B)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("n_texts", "wanted"),
    [
        pytest.param(1, B[:70], id="one is kept"),
        pytest.param(2, A[:70] + C[:5], id="one comes back"),
        pytest.param(3, random_ids(200, N_VOCAB, 4), id="all make room"),
    ],
)
def test_ctrl_c_before_any_line(model: kvg.Model, n_texts: int, wanted: list[int]) -> None:
    """The text has the cells that it says, and all others are empty once nobody wants them."""
    modules = (index, node, sequence_index, sequence, tokens)
    n_cut, came = 0, True
    with open_context(model, checkpoint_cells=checkpoint_cells(model), **(OPTIONS | {"n_ctx": 320})) as ctx:
        earlier = earlier_texts(ctx)
        text = TokenSequence(ctx, earlier=earlier)
        expected = text.set([*wanted, 7]).last.logits
        while came:
            text.go_back(0)
            earlier.clear()
            assert ctx.kv.n_used == 0
            for ids in (A, B, C)[:n_texts]:
                text.set(ids[:70])
            came = ctrl_c_at(n_cut + 1, partial(text.set, wanted), *modules)
            n_cut += 1
            text.append(7)
            assert ctx.kv.seq_pos_max(0) + 1 == len(text)
            change = text.set([*wanted, 7])
            assert nmse(change.last.logits, expected) <= ROUNDING
    assert n_cut > 100


def test_a_shifted_text_is_not_kept_for_others(small: kvg.Model) -> None:
    """K and V behind what was discarded were computed with it: they are of no other text."""
    with open_context(small, **OPTIONS) as ctx:
        text = TokenSequence(ctx, earlier=earlier_texts(ctx))
        text.set(A)
        text.discard(0, 50)
        text.set(B)
        change = text.set(A[50:])
        assert change.n_decoded == 100
        assert nmse(change.last.logits, alone(small, A[50:])) <= ROUNDING


def test_llama_comes_back_to_a_conversation(stories: Path) -> None:
    llm = kvg.Llama(str(stories), n_ctx=512, verbose=False)
    first, second = "Once upon a time there was a cat", "Lily and Tom went to the park"
    said = llm(first, max_tokens=80, temperature=0)["choices"][0]["text"]
    llm(second, max_tokens=80, temperature=0)
    seen: list[int] = []
    decode = kvg.Context._decode_last

    def counted(self: kvg.Context, context: int, batch: kvg.Batch, copy: bool = True) -> Any:
        seen.append(len(batch))
        return decode(self, context, batch, copy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvg.Context, "_decode_last", counted)
        llm(first + said + " And then", max_tokens=1, temperature=0)
    assert sum(seen) <= 10
    view: CellsView = llm.kv.cells()
    assert np.count_nonzero(view.held) > 80
