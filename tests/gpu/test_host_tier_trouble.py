"""kv_tier="host" where something is too small, fails, or is used by many at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines import Logits, Token, decode, open_context, random_ids, run_of
from support.faults import fault
from support.judge import nmse
from support.models import N_VOCAB, ModelSpec

import pykvgraph as kvg

pytestmark = pytest.mark.gpu

SPEC = ModelSpec(n_layer=5, n_head=4, n_head_kv=2, head_dim=16)
N_CELLS = 256


@pytest.fixture(scope="module")
def path(model_file: Callable[[ModelSpec], Path]) -> Path:
    return model_file(SPEC)


@pytest.fixture(scope="module")
def model(device: str, path: Path) -> Iterator[kvg.Model]:
    with kvg.Model(path, device=device) as model:
        yield model


def open_tier(model: kvg.Model, **options: Any) -> kvg.Context:
    return open_context(model, kv_tier="host", **{"n_ctx": N_CELLS, **options})


def test_a_full_cache(model: kvg.Model) -> None:
    """A batch that is too large leaves all as it was, and what is given up has room for another text."""
    n = 64
    with open_tier(model, n_ctx=n) as ctx:
        decode(ctx, run_of(random_ids(n - 1, N_VOCAB)))
        before = ctx.kv.save()
        with pytest.raises(kvg.CacheFullError):
            decode(ctx, run_of(random_ids(2, N_VOCAB), n - 1))
        assert ctx.kv.save() == before
        decode(ctx, [Token(5, n - 1)])
        with pytest.raises(kvg.CacheFullError):
            ctx.append(5)
        ctx.kv.seq_rm(0, 0, n // 2)
        ctx.kv.seq_add(0, n // 2, -1, -n // 2)
        for _ in range(n // 2):
            ctx.append(5)
        assert ctx.kv.n_used == n


def test_many_sequences(model: kvg.Model, path: Path) -> None:
    """32 of unequal length, all in each batch, of which every other one goes."""

    def run(ctx: kvg.Context) -> list[Logits]:
        rows = []
        for seq in range(32):
            decode(ctx, run_of(random_ids(1 + seq % 5, N_VOCAB, seq), 0, (seq,)))
        rows.append(decode(ctx, [Token(seq, 1 + seq % 5, (seq,)) for seq in range(32)]))
        for seq in range(0, 32, 2):
            ctx.kv.seq_rm(seq, 0, -1)
        ctx.kv.defrag("sort")
        rows.append(decode(ctx, [Token(seq, 2 + seq % 5, (seq,)) for seq in range(1, 32, 2)]))
        return rows

    with kvg.Model(path, device="cpu") as cpu, open_context(cpu, n_ctx=N_CELLS, n_seq_max=32) as ctx:
        expected = run(ctx)
    with open_tier(model, n_seq_max=32) as ctx:
        for found, exact in zip(run(ctx), expected, strict=True):
            assert nmse(found, exact) <= 1e-3


def test_contexts_in_threads(model: kvg.Model) -> None:
    """Each says what it says alone."""
    n = 3

    def say(seed: int, ctx: kvg.Context) -> Logits:
        decode(ctx, run_of(random_ids(24, N_VOCAB, seed)))
        return np.stack([ctx.append(token) for token in random_ids(5, N_VOCAB, seed)])

    with open_tier(model) as ctx:
        expected = []
        for seed in range(n):
            ctx.reset()
            expected.append(say(seed, ctx))
    found: list[Any] = [None] * n

    def run(seed: int) -> None:
        with open_tier(model, device_layers=1 + seed) as ctx:
            found[seed] = say(seed, ctx)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(n):
        assert np.array_equal(found[seed], expected[seed])


@pytest.mark.parametrize("site", ["build", "cells", "compute", "alloc"])
def test_a_decode_that_fails(model: kvg.Model, site: str) -> None:
    """The first micro-batch's rows came to the host, the second's didn't: the text is as before."""
    ids = random_ids(45, N_VOCAB)
    with open_tier(model, n_ubatch=16, n_batch=32) as ctx:
        decode(ctx, run_of(ids[:10]))
        before = ctx.kv.save()
        with (
            fault(site, 1 if site == "cells" else 2),
            pytest.raises((kvg.DeviceError, MemoryError)),
        ):
            decode(ctx, run_of(ids[10:33], 10))
            decode(ctx, run_of(ids[33:40], 33))
        ctx.kv.seq_rm(0, 10, -1)
        assert ctx.kv.save() == before
        decode(ctx, run_of(ids[10:30], 10))
        found = decode(ctx, run_of(ids[30:], 30))
        ctx.reset()
        decode(ctx, run_of(ids[:10]))
        decode(ctx, run_of(ids[10:30], 10))
        assert np.array_equal(found, decode(ctx, run_of(ids[30:], 30)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_tier": "hosts"},
        {"kv_tier": ""},
        {"kv_tier": b"host"},
        {"kv_tier": True},
        {"kv_tier": "host", "device_layers": 0},
        {"kv_tier": "host", "device_layers": -(2**70)},
        {"kv_tier": "host", "device_layers": 2**31},
        {"kv_tier": "host", "device_layers": 1.5},
        {"kv_tier": "host", "device_layers": None},
        {"kv_tier": "host", "offload_kqv": False},
    ],
    ids=str,
)
def test_refused(model: kvg.Model, wrong: dict[str, Any]) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match=list(wrong)[-1]):
        kvg.Context(model, n_ctx=N_CELLS, **wrong)
    with pytest.raises(kvg.InvalidArgumentError, match=list(wrong)[-1]):
        kvg.plan_memory(model.path, model.device, n_ctx=N_CELLS, **wrong)


def test_an_engine(model: kvg.Model) -> None:
    """It says what it says with cells on the device: prompts that share a prefix, more than fit at once."""
    shared = random_ids(24, N_VOCAB)
    prompts = [[*shared, *random_ids(6, N_VOCAB, seed)] for seed in range(6)]
    params = kvg.SamplingParams(max_tokens=6, temperature=0)

    def say(kv_tier: str) -> list[list[int]]:
        options: dict[str, Any] = {"n_ctx": N_CELLS, "n_seq_max": 3, "n_threads": 1, "n_threads_batch": 1}
        with kvg.Engine(model, kv_tier=kv_tier, **options) as engine:
            return [list(each.result().tokens) for each in [engine.submit(p, params) for p in prompts]]

    assert say("host") == say("device")
