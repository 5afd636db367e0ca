"""Greedy sampling and the arguments; what libllama draws is tested with a model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from pykvgraph.errors import InvalidArgumentError, KVGraphError
from pykvgraph.sampling.sampler import Sampler

rows = nps.arrays(np.float32, st.integers(1, 50), elements=st.floats(-100, 100, width=32))


@given(rows)
def test_greedy_takes_the_first_of_the_largest(logits: Any) -> None:
    assert Sampler().sample(logits) == max(range(len(logits)), key=lambda i: (logits[i], -i))


@given(
    rows,
    st.dictionaries(st.integers(0, 60), st.floats(-200, 200, width=32) | st.just(-math.inf), min_size=1),
)
def test_greedy_behind_a_logit_bias(logits: Any, biases: dict[int, float]) -> None:
    """The first of the largest sums in float32; biases of tokens that there aren't change nothing."""
    before = logits.copy()
    sums = [logits[i] + np.float32(biases.get(i, 0.0)) for i in range(len(logits))]
    sampler = Sampler(logit_bias=biases)
    if max(sums) == -math.inf:
        with pytest.raises(InvalidArgumentError, match="no token may follow"):
            sampler.sample(logits)
    else:
        assert sampler.sample(logits) == max(range(len(logits)), key=lambda i: (sums[i], -i))
    assert np.array_equal(logits, before)  # they are views of the context's


@given(rows, st.dictionaries(st.integers(0, 49), st.floats(-200, 200, width=32), min_size=1))
def test_a_logit_bias_is_libllama_s(logits: Any, biases: dict[int, float]) -> None:
    """A penalty of nothing said so far changes no logit, but is applied by libllama's chain."""
    chain = Sampler(logit_bias=biases, presence_penalty=1.0)
    assert Sampler(logit_bias=biases).sample(logits) == chain.sample(logits)


@pytest.mark.parametrize(
    "logits",
    [
        np.zeros((1, 3), np.float32),
        np.zeros((0, 3), np.float32),
        np.zeros((), np.float32),
        np.empty(0, np.float32),
        np.array(["a", "b"]),
        np.array([1, 2]),
        [0.0, 1.0],
        None,
    ],
    ids=repr,
)
def test_what_are_no_logits(logits: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="logits must be"):
        Sampler().sample(logits)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_logits(broken: float) -> None:
    with pytest.raises(KVGraphError, match="broken"):
        Sampler().sample(np.array([0.0, broken, 1.0], np.float32))


def test_no_token_at_all_is_possible() -> None:
    with pytest.raises(KVGraphError, match="broken"):
        Sampler().sample(np.full(3, -np.inf, np.float32))


def test_tokens_of_no_probability_do_not_matter() -> None:
    assert Sampler().sample(np.array([-np.inf, -1.0, -np.inf], np.float32)) == 1


def test_dry_needs_a_tokenizer() -> None:
    with pytest.raises(InvalidArgumentError, match="tokenizer"):
        Sampler(dry_multiplier=1.0)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, math.nan, math.inf, "1", None, True]),
        ("top_k", [-1, 2**31, 1.5, None, True]),
        ("top_p", [-0.1, 1.1, math.nan, None]),
        ("min_p", [-0.1, 1.1, math.nan, None]),
        ("seed", [-1, 2**32 - 1, 2**64, 1.5, True]),
    ],
)
def test_bad_arguments_are_named(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidArgumentError, match=name):
            Sampler(**{name: value})
