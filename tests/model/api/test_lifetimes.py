"""Threads on one context, closed handles, children outliving parents: an error, or the right answer."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.engines import (
    Logits,
    OurEngine,
    Token,
    batch_of,
    decode,
    open_context,
    prompt_then_singles,
    random_ids,
    run_of,
)
from support.judge import nmse
from support.models import N_VOCAB, SMALL, ModelSpec

import pykvgraph as kvg

ModelFile = Callable[[ModelSpec], Path]


def test_two_threads_on_one_context(small: kvg.Model) -> None:
    """Each has a sequence of its own; calls wait for one another, and logits are those of a context alone."""
    n = 60
    ids = [random_ids(n, N_VOCAB, seq) for seq in range(2)]

    def alone(seq: int) -> Logits:
        with open_context(small, n_ctx=256) as ctx:
            return prompt_then_singles(OurEngine(ctx), ids[seq], 1)[-1:]

    with open_context(small, n_ctx=256, n_seq_max=2) as ctx:

        def speak(seq: int) -> Logits:
            for i, token in enumerate(ids[seq]):
                last = ctx.decode_last(batch_of([Token(token, i, (seq,))]))
                ctx.kv.cells()
                assert ctx.kv.seq_pos_max(seq) == i
            return last[np.newaxis]

        with ThreadPoolExecutor(2) as pool:
            rows = list(pool.map(speak, range(2)))
        assert ctx.kv.n_used == 2 * n
    for seq in range(2):
        assert nmse(rows[seq], alone(seq)) <= 1e-6


def test_two_threads_that_collide(small: kvg.Model) -> None:
    """Both append to one sequence: whoever comes second is refused, and the cache holds what was accepted."""
    with open_context(small, n_ctx=256) as ctx:

        def push(thread: int) -> int:
            accepted = 0
            for pos in range(100):
                try:
                    ctx.decode(batch_of([Token(3 + thread, pos)]))
                    accepted += 1
                except kvg.InvalidArgumentError:
                    pass
            return accepted

        with ThreadPoolExecutor(2) as pool:
            accepted = sum(pool.map(push, range(2)))
        cells = ctx.kv.cells()
        # whoever is ahead is accepted: each position once
        assert accepted == 100
        assert sorted(cells.pos[cells.pos >= 0].tolist()) == list(range(100))


def test_close_during_a_decode(model_file: ModelFile) -> None:
    """close() waits for the decode that is under way; the next call is refused."""
    spec = ModelSpec(n_layer=3, n_embd=256, n_ff=512, n_head=4, n_head_kv=2)
    with kvg.Model(model_file(spec), device="cpu") as model:
        ctx = open_context(model, n_ctx=2048, n_batch=1024, n_ubatch=64)
        batch = batch_of(run_of(random_ids(1024, N_VOCAB)))
        outcomes: list[str] = []
        started = threading.Event()

        def work() -> None:
            try:
                while True:
                    ctx.decode(batch)
                    outcomes.append("decoded")
                    ctx.kv.clear()
                    started.set()
            except kvg.InvalidArgumentError as error:
                outcomes.append(str(error))
            finally:
                started.set()

        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        time.sleep(0.01)  # well within the next one
        ctx.close()
        thread.join()
    assert len(outcomes) >= 2
    assert set(outcomes[:-1]) == {"decoded"}
    assert "closed" in outcomes[-1]


def test_closed_context(small: kvg.Model) -> None:
    ctx = open_context(small, n_ctx=64, n_seq_max=2)
    decode(ctx, [Token(5, 0)])
    view, kv = ctx.logits_view(), ctx.kv
    held = view.copy()
    ctx.close()
    ctx.close()
    calls: list[Callable[[], object]] = [
        lambda: decode(ctx, [Token(5, 1)]),
        ctx.logits,
        ctx.logits_view,
        ctx.embeddings,
        ctx.reset,
        kv.update,
        kv.defrag,
        kv.clear,
        kv.cells,
        kv.take_stats,
        lambda: kv.n_used,
        lambda: kv.can_shift,
        lambda: kv.read_k(0),
        lambda: kv.read_v(0),
        lambda: kv.seq_rm(0, 0, -1),
        lambda: kv.seq_cp(0, 1, 0, -1),
        lambda: kv.seq_keep(0),
        lambda: kv.seq_add(0, 0, -1, 1),
        lambda: kv.seq_div(0, 0, -1, 2),
        lambda: kv.seq_pos_min(0),
        lambda: kv.seq_pos_max(0),
        lambda: list(kvg.generate(ctx, [5], max_tokens=1)),
    ]
    for call in calls:
        with pytest.raises(kvg.InvalidArgumentError, match="closed"):
            call()
    assert np.array_equal(view, held)


def test_closed_model(model_file: ModelFile) -> None:
    model = kvg.Model(model_file(SMALL), device="cpu")
    model.close()
    model.close()
    with pytest.raises(kvg.InvalidArgumentError, match="closed"):
        open_context(model)


def test_context_outlives_its_model(model_file: ModelFile) -> None:
    ids = random_ids(30, N_VOCAB)
    model = kvg.Model(model_file(SMALL), device="cpu")
    closed, deleted = open_context(model, n_ctx=64), open_context(model, n_ctx=64)
    expected = decode(closed, run_of(ids))
    closed.reset()
    model.close()
    assert np.array_equal(decode(closed, run_of(ids)), expected)
    del model
    gc.collect()
    assert np.array_equal(decode(deleted, run_of(ids)), expected)
    closed.close()
    deleted.close()


def test_cache_outlives_its_context_object(small: kvg.Model) -> None:
    kv = open_context(small, n_ctx=64).kv  # nothing but the cache is held
    gc.collect()
    assert kv.n_cells == 64
    assert kv.read_k(1).shape == (64, small.n_head_kv, small.head_dim)


def test_views_outlive_everything(model_file: ModelFile) -> None:
    model = kvg.Model(model_file(SMALL), device="cpu")
    ctx = open_context(model, n_ctx=128)
    decode(ctx, run_of(random_ids(3, N_VOCAB)))
    view, copy = ctx.logits_view(), ctx.logits()
    assert np.array_equal(view, copy)
    decode(ctx, run_of(random_ids(50, N_VOCAB), 3))  # a larger output buffer: the old one is still the view's
    assert view.shape == (3, N_VOCAB)
    assert np.isfinite(view).all()
    del model, ctx
    gc.collect()
    assert np.isfinite(view).all()
    assert np.array_equal(copy.shape, view.shape)


def test_views_are_read_only(small: kvg.Model) -> None:
    with open_context(small, n_ctx=64) as ctx:
        decode(ctx, run_of(random_ids(3, N_VOCAB)))
        view = ctx.logits_view()
        with pytest.raises(ValueError, match="read-only"):
            view[0, 0] = 1
        copy = ctx.logits()
        copy[:] = 0  # a copy is the caller's own
        assert view.any()


def test_many_contexts_come_and_go(model_file: ModelFile) -> None:
    """Made in several threads, dropped without close(), in any order."""
    model = kvg.Model(model_file(SMALL), device="cpu")
    expected = decode(open_context(model, n_ctx=64), [Token(5, 0)])

    def once(_: int) -> bool:
        ctx = open_context(model, n_ctx=64)
        return np.array_equal(decode(ctx, [Token(5, 0)]), expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(once, range(40)))
