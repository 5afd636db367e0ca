"""The driver of libllama: what the referee and the bench ask of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.engines import Token, run_of

import pykvgraph as kvg
from pykvgraph._native import libllama
from pykvgraph.bench.libllama import LibllamaContext, LibllamaModel, opened
from pykvgraph.params.params import ContextParams

IDS = list(range(5, 13))


@pytest.fixture
def context(stories: Path) -> Iterator[LibllamaContext]:
    params = ContextParams(n_ctx=256, n_batch=16, n_seq_max=2, n_threads=1)
    with opened(stories, params) as (_, context):
        yield context


def test_rows_are_those_that_asked(context: LibllamaContext) -> None:
    assert context.logits().shape == (0, context.n_vocab)
    context.decode(run_of(IDS))
    rows = context.logits()
    assert rows.shape == (len(IDS), context.n_vocab)
    context.clear()
    context.decode(Token(token, i, (0,), i in (2, 5)) for i, token in enumerate(IDS))
    assert np.allclose(context.logits(), rows[[2, 5]], atol=1e-4)


def test_sequences(context: LibllamaContext) -> None:
    """A token of two sequences is in both; what is copied, saved or decoded again is the same."""
    context.decode(run_of(IDS, seq_ids=(0, 1)))
    assert [context.seq_pos_max(seq) for seq in (0, 1)] == [7, 7]
    context.decode([Token(20, 8, (1,))])
    expected = context.logits()
    context.seq_rm(1, 0, -1)
    assert context.seq_pos_max(1) == -1
    context.seq_cp(0, 1, 0, -1)
    context.decode([Token(20, 8, (1,))])
    assert np.allclose(context.logits(), expected, atol=1e-4)
    state = context.save(0)
    context.clear()
    context.load(state, 1)
    context.decode([Token(20, 8, (1,))])
    assert np.allclose(context.logits(), expected, atol=1e-4)
    context.seq_add(1, 0, -1, 8)
    context.seq_div(1, 0, -1, 2)
    assert context.seq_pos_max(1) == 8


def test_the_same_token_again(context: LibllamaContext) -> None:
    context.decode(run_of([0] * 4))
    expected = context.logits()[-1:]
    context.clear()
    context.decode_again(4, 0)
    assert np.allclose(context.logits(), expected, atol=1e-4)


def test_what_is_refused(context: LibllamaContext, tmp_path: Path) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match="more tokens than n_batch, 16"):
        context.decode(run_of([5] * 17))
    context.decode(run_of(IDS))
    with pytest.raises(kvg.DeviceError, match="could not decode 1 tokens"):
        context.decode([Token(5, 3)])  # behind the end
    assert len(context.logits()) == 0
    with pytest.raises(kvg.ModelLoadError, match="could not load"):
        LibllamaModel(tmp_path / "none.gguf")
    with pytest.raises(kvg.DeviceError, match="no device Nowhere"):
        LibllamaModel(tmp_path / "none.gguf", "Nowhere")


def test_encode(stories: Path) -> None:
    with kvg.Model(stories, device="cpu") as ours, opened(stories, ContextParams(n_ctx=256)) as (model, _):
        for text in ("Once upon a time", "", "  w\u00f6rld </s>"):
            assert model.encode(text) == ours.tokenizer.encode(text)


def test_the_numbers_of_flash_attention_are_libllamas() -> None:
    theirs = libllama.package("llama_cpp")
    for name in ("AUTO", "ON", "OFF"):
        word = {"ON": "ENABLED", "OFF": "DISABLED"}.get(name, name)
        number = getattr(theirs, f"LLAMA_FLASH_ATTN_TYPE_{word}")
        assert ContextParams(flash_attn=name).native(0).flash_attn == number  # type: ignore[arg-type]
