"""Forward pass: our logits against libllama's, the same token ids forced on both."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from support import where
from support.engines import (
    Engine,
    Logits,
    OurEngine,
    Token,
    decode,
    open_context,
    prompt_then_singles,
    random_ids,
    run_of,
)
from support.judge import judge, nmse
from support.models import N_VOCAB, SMALL, ModelSpec, WeightType

import pykvgraph as kvg

pytestmark = pytest.mark.any_device

N_PROMPT, N_SINGLE = 50, where.examples(64)

SHAPES = [
    ModelSpec(n_layer=3, n_embd=64, n_head=8, n_head_kv=8, tied=True, seed=1),
    ModelSpec(n_layer=2, n_embd=64, n_head=4, n_head_kv=2, seed=2),
    ModelSpec(n_layer=2, n_embd=128, n_head=4, n_head_kv=1, tied=True, rope_factors=True, seed=3),
    ModelSpec(n_layer=1, n_embd=256, n_head=4, n_head_kv=2, n_ff=256, rope_scale=4.0, seed=4),
    ModelSpec(n_layer=2, n_embd=256, n_head=2, n_head_kv=1, n_ff=256, rope_base=500000.0, tied=True, seed=5),
    ModelSpec(n_layer=2, n_embd=64, n_head=4, n_head_kv=2, head_dim=32, seed=6),
]
# Q4_0 and Q4_K are repacked on many CPUs
TYPES = [WeightType.F32, WeightType.F16, WeightType.BF16, WeightType.Q8_0, WeightType.Q4_0, WeightType.Q4_K]


# every shape in every type that its rows are long enough for
MODELS = [
    replace(shape, weights=weights)
    for shape in SHAPES
    for weights in TYPES
    if weights != WeightType.Q4_K or shape.n_embd % 256 == 0
]


Runs = Callable[[ModelSpec], bool]


@pytest.fixture(scope="module")
def runs_here(model_file: Callable[[ModelSpec], Path]) -> Runs:
    """Whether this CPU has the instructions that its ggml was compiled to use for a type of weights.

    A wheel from another machine may not; libllama is asked, once per type, in a process that may die.
    """

    @functools.cache
    def runs(weights: WeightType) -> bool:
        path = model_file(ModelSpec(n_embd=256, n_ff=256, weights=weights))
        script = (
            f"import sys; sys.path[:0] = {sys.path!r}\n"
            "from pathlib import Path\n"
            "from support.engines import run_of\n"
            "from support.referee import Referee\n"
            f"with Referee(Path({str(path)!r}), flash=False) as referee: referee.decode(run_of(range(3, 9)))"
        )
        return subprocess.run([sys.executable, "-c", script], check=False).returncode != -signal.SIGILL

    return lambda spec: spec.weights in (WeightType.F32, WeightType.F16) or runs(spec.weights)


@pytest.mark.parametrize("spec", MODELS, ids=str)
def test_prompt_and_single_tokens(
    model_file: Callable[[ModelSpec], Path], spec: ModelSpec, runs_here: Runs
) -> None:
    if not runs_here(spec):
        pytest.skip(f"libllama was compiled for another CPU: {spec.weights.name} kills it here")
    ids = random_ids(N_PROMPT + N_SINGLE, N_VOCAB, spec.seed)
    judge(model_file(spec), lambda engine: prompt_then_singles(engine, ids, N_PROMPT))


def test_f32_cache(model_file: Callable[[ModelSpec], Path]) -> None:
    ids = random_ids(N_PROMPT + N_SINGLE, N_VOCAB)
    judge(model_file(SMALL), lambda engine: prompt_then_singles(engine, ids, N_PROMPT), kv_type="f32")


@pytest.mark.parametrize("n_layer", [1, 2, 5, 10, 20, 42])
@pytest.mark.parametrize("biases", [False, True])
def test_graphs_of_any_depth_fit(model_file: Callable[[ModelSpec], Path], n_layer: int, biases: bool) -> None:
    """Every optional bias; depths at which the scheduler's table of tensors is about to grow."""
    spec = ModelSpec(n_layer=n_layer, n_embd=16, n_head=2, n_head_kv=1, n_ff=32, biases=biases)
    judge(model_file(spec), lambda engine: prompt_then_singles(engine, random_ids(12, N_VOCAB), 10))


@pytest.mark.parametrize("n_ubatch", [1, 7, 16])
def test_prompt_in_micro_batches(model_file: Callable[[ModelSpec], Path], n_ubatch: int) -> None:
    ids = random_ids(N_PROMPT, N_VOCAB)
    judge(model_file(SMALL), lambda engine: engine.decode(run_of(ids)), n_ubatch=n_ubatch)


def interleaved(engine: Engine) -> Logits:
    """Three prompts shuffled into one batch, then a token of each per batch; the second is copied."""
    rng = np.random.default_rng(3)
    prompts = [run_of(random_ids(n, N_VOCAB, n), 0, (seq,)) for seq, n in enumerate((20, 13, 7))]
    order = rng.permutation(np.repeat([0, 1, 2], [20, 13, 7]))
    queues = [iter(prompt) for prompt in prompts]
    rows = [engine.decode([next(queues[seq]) for seq in order])]
    ends = [20, 13, 7]
    for step in range(16):
        ids = random_ids(3, N_VOCAB, 100 + step)
        rows.append(engine.decode([Token(ids[seq], ends[seq] + step, (seq,)) for seq in (2, 0, 1)]))
    engine.seq_cp(1, 3, -1, -1)
    for step in range(8):
        ids = random_ids(2, N_VOCAB, 200 + step)
        rows.append(engine.decode([Token(ids[0], 29 + step, (3,)), Token(ids[1], 29 + step, (1,))]))
    return np.concatenate(rows)


def test_interleaved_sequences(model_file: Callable[[ModelSpec], Path]) -> None:
    judge(model_file(SMALL), interleaved, n_seq_max=4)


def shared_prefix(engine: Engine) -> Logits:
    """A prefix decoded once for three sequences, which then part."""
    rows = [engine.decode(run_of(random_ids(24, N_VOCAB), 0, (0, 1, 2)))]
    for step in range(8):
        ids = random_ids(3, N_VOCAB, 50 + step)
        rows.append(engine.decode([Token(ids[seq], 24 + step, (seq,)) for seq in range(3)]))
    return np.concatenate(rows)


def test_tokens_of_several_sequences(model_file: Callable[[ModelSpec], Path]) -> None:
    judge(model_file(SMALL), shared_prefix, n_seq_max=3)


def with_holes(engine: Engine) -> Logits:
    """Tokens are taken out of the middle and positions stay: what is left must not see them."""
    engine.decode(run_of(random_ids(60, N_VOCAB)))
    engine.seq_rm(0, 10, 40)
    return prompt_then_singles(engine, random_ids(24, N_VOCAB, 1), 4, pos0=60)


def test_removed_tokens_are_not_seen(model_file: Callable[[ModelSpec], Path]) -> None:
    judge(model_file(SMALL), with_holes)


def test_idle_sequences_are_not_seen(small: kvg.Model) -> None:
    ids = random_ids(40, N_VOCAB)
    with (
        open_context(small, n_ctx=256, n_seq_max=3) as alone,
        open_context(small, n_ctx=256, n_seq_max=3) as among,
    ):
        expected = prompt_then_singles(OurEngine(alone), ids, 30)
        decode(among, run_of(random_ids(50, N_VOCAB, 1), 0, (1,)))
        decode(among, run_of(random_ids(50, N_VOCAB, 2), 0, (2,)))
        assert nmse(prompt_then_singles(OurEngine(among), ids, 30), expected) <= where.limit(1e-6)


def test_outputs_of_some_tokens_come_in_batch_order(small: kvg.Model) -> None:
    tokens = run_of(random_ids(30, N_VOCAB))
    wanted = [0, 3, 4, 11, 12, 27]
    some = [token._replace(logits=i in wanted) for i, token in enumerate(tokens)]
    with open_context(small, n_ctx=64, n_ubatch=5) as ctx:
        every = decode(ctx, tokens)
        ctx.reset()
        rows = decode(ctx, some)
    assert rows.shape == (len(wanted), N_VOCAB)
    assert nmse(rows, every[wanted]) <= where.limit(1e-6)


def test_only_distances_matter(small: kvg.Model) -> None:
    """Rotary embedding sees differences: the same tokens later, gap included, say the same."""
    ids = random_ids(24, N_VOCAB)

    def with_gap(ctx: kvg.Context, pos0: int) -> Logits:
        return np.concatenate([decode(ctx, run_of(ids[:12], pos0)), decode(ctx, run_of(ids[12:], pos0 + 90))])

    with open_context(small, n_ctx=64, type_k="f32", type_v="f32") as ctx:
        first = with_gap(ctx, 0)
        ctx.reset()
        later = with_gap(ctx, 500)
        ctx.reset()
        without = decode(ctx, run_of(ids))
    assert nmse(later, first) <= where.limit(1e-6)
    assert nmse(without[12:], first[12:]) > 1e-3  # the gap itself is seen


def test_several_threads_compute_what_one_does(small: kvg.Model) -> None:
    """To the last bit: cells are split among threads for few tokens, tokens for many."""
    if not where.is_cpu():
        pytest.skip("threads are the CPU's")
    ids = random_ids(1600, N_VOCAB)
    parts = [*range(0, 1501, 500), 1501, 1502, 1518, 1550]  # then 1, 1, 16, 32 and 50 tokens at a time
    rows: dict[int, list[Logits]] = {}
    for n_threads in (1, 2, 5):
        with open_context(small, n_ctx=2048, n_threads=n_threads, n_threads_batch=n_threads) as ctx:
            rows[n_threads] = [
                decode(ctx, run_of(ids[begin:end], begin)) for begin, end in pairwise([*parts, 1600])
            ]
    for n_threads in (2, 5):
        for ours, alone in zip(rows[n_threads], rows[1], strict=True):
            assert np.array_equal(ours, alone)
