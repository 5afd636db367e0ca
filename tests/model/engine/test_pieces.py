"""What pieces and completions tell beside their text: likely tokens, what ended them, counts and seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import where
from support.architectures import ArchSpec
from support.soak import F32

import pykvgraph as kvg


@pytest.fixture(scope="module")
def model(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(ArchSpec("llama", 2, 32, 2, 1, 16, 32)), device=where.device) as model:
        yield model


@pytest.fixture(scope="module")
def storyteller(stories: Path) -> Iterator[kvg.Model]:
    with kvg.Model(stories, device=where.device) as model:
        yield model


def logprobs_of(model: kvg.Model, ids: list[int]) -> npt.NDArray[np.float64]:
    """Of what follows the ids, decoded alone; float64 (n_vocab,)."""
    batch = kvg.Batch()
    batch.extend(ids, 0)
    with kvg.Context(model, n_ctx=256, **F32) as ctx:
        logits = ctx.decode_last(batch).astype(np.float64)
    logprobs: npt.NDArray[np.float64] = logits - np.log(np.exp(logits).sum())
    return logprobs


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_each_piece_tells_the_likeliest_tokens(model: kvg.Model, temperature: float) -> None:
    """Compared with every token's probability in a context of its own, for two samples and a neighbour."""
    prompts = [[5, 9, 2, 30], [7, 7, 1]]
    with kvg.Engine(model, n_ctx=256, n_seq_max=3, background=False, **F32) as engine:
        params = kvg.SamplingParams(
            max_tokens=5, n=2, temperature=temperature, top_k=0, seed=3, top_logprobs=4
        )
        asked = engine.submit(prompts[0], params)
        other = engine.submit(prompts[1], kvg.SamplingParams(max_tokens=5))
        pieces = list(asked)
        assert [piece.top for piece in other] == [()] * 5
    assert len(pieces) == 10
    for sample in range(2):
        ids = list(prompts[0])
        for piece in (piece for piece in pieces if piece.seq == sample):
            expected = logprobs_of(model, ids)
            best = np.sort(expected)[::-1][:4]
            assert [value for _, value in piece.top] == pytest.approx(best, abs=1e-4)
            assert [expected[token] for token, _ in piece.top] == pytest.approx(best, abs=1e-4)
            assert len({token for token, _ in piece.top}) == 4
            assert piece.logprob == pytest.approx(expected[piece.token], abs=1e-4)
            ids.append(piece.token)


def test_more_than_the_vocabulary_is_all_of_it(model: kvg.Model) -> None:
    with kvg.Engine(model, n_ctx=64, n_seq_max=1) as engine:
        (piece,) = engine.submit([1], kvg.SamplingParams(max_tokens=1, top_logprobs=10**6))
    assert len(piece.top) == model.n_vocab
    assert math.fsum(math.exp(value) for _, value in piece.top) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("bad", [-1, 1.5, "3", None])
def test_a_bad_number_of_likely_tokens_is_refused(bad: Any) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match="top_logprobs"):
        kvg.SamplingParams(top_logprobs=bad)


def test_a_completion_tells_what_ended_it(storyteller: kvg.Model) -> None:
    bos = storyteller.tokenizer.bos
    assert bos is not None
    eos = storyteller.tokenizer.eos
    with kvg.Engine(storyteller, n_ctx=1024, n_seq_max=4) as engine:

        def said(**params: Any) -> kvg.Completion:
            return engine.submit([bos], kvg.SamplingParams(**params)).result(60)

        by_word = said(max_tokens=100, stop=["boy", "little girl", "girl"])
        by_limit = said(max_tokens=7, stop=["girl"])
        by_eos = said(max_tokens=100, logit_bias={eos: 1e9})
    assert (by_word.finish_reason, by_word.stopping_word) == ("stop", "little girl")
    assert (by_limit.finish_reason, by_limit.stopping_word, by_limit.n_said) == ("length", "", 7)
    assert (by_eos.finish_reason, by_eos.stopping_word) == ("stop", "")
    assert (by_eos.n_said, by_eos.tokens) == (1, ())
    assert by_word.n_said == len(by_word.tokens) + 1  # the token that completed the word


def test_seconds_are_those_of_waiting_of_the_prompt_and_of_the_answer(model: kvg.Model) -> None:
    """The clock of the test goes around each: the second request waits until the first has ended."""
    with kvg.Engine(model, n_ctx=256, n_seq_max=2, background=False, prefix_cache=False) as engine:
        begin = time.perf_counter()
        params = kvg.SamplingParams(max_tokens=4, n=2, temperature=1.0)
        first = engine.submit([1, 2, 3], params)
        second = engine.submit([4, 5, 6], params)
        third = engine.submit([4, 5, 6], params)
        third.cancel()
        firsts = first.results()
        between = time.perf_counter() - begin
        seconds = second.results()
        whole = time.perf_counter() - begin
    for told in firsts:
        assert 0 <= told.waited < told.ttft <= told.seconds < between
    for told in seconds:
        assert firsts[0].ttft < told.waited < told.ttft <= told.seconds < whole
    never = third.result()
    assert (never.finish_reason, never.n_said) == ("cancelled", 0)
    assert math.isnan(never.waited) and math.isnan(never.ttft)


def test_control_tokens_add_their_names_if_asked(storyteller: kvg.Model) -> None:
    """BOS, forced three times: its name in the text is the one that the file's vocabulary has."""
    bos = storyteller.tokenizer.bos
    assert bos is not None
    name = storyteller.metadata["tokenizer.ggml.tokens"][bos]
    with kvg.Engine(storyteller, n_ctx=64, n_seq_max=1) as engine:
        for special, expected in ((True, 3 * name), (False, "")):
            params = kvg.SamplingParams(max_tokens=3, logit_bias={bos: 1e9}, special=special)
            assert engine.submit([bos], params).result(60).text == expected
