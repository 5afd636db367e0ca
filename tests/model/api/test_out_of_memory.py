"""A machine with too little memory: a typed error, nothing changed, and the next call right."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines import batch_of, decode, open_context, random_ids, run_of
from support.models import N_VOCAB, SMALL, WIDE, ModelSpec

import pykvgraph as kvg
from pykvgraph.context import native_batch

TESTS = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(
    "LD_PRELOAD" in os.environ, reason="AddressSanitizer ends a process that is short of memory"
)
def test_short_of_memory(model_file: Callable[[ModelSpec], Path]) -> None:
    """In a process of its own, so that the tests have memory."""
    child = subprocess.run(
        [sys.executable, "-m", "support.short_of_memory", str(model_file(WIDE))],
        cwd=TESTS,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    told = child.stdout.split()
    assert told[:5] == ["DeviceError"] * 5  # what the device was short of
    assert len(told) == 6


@pytest.mark.slow
@pytest.mark.skipif(
    "LD_PRELOAD" in os.environ, reason="AddressSanitizer ends a process that is short of memory"
)
@pytest.mark.parametrize("operation", ["context", "plan", "encode", "encode_word", "encode_short"])
def test_every_limit(model_file: Callable[[ModelSpec], Path], operation: str) -> None:
    """120 of them: it works, or there is a typed error."""
    child = subprocess.run(
        [sys.executable, "-m", "support.limits", str(model_file(SMALL)), operation],
        cwd=TESTS,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert int(child.stdout) > 5


def test_output_buffers_grow_both_or_neither(small: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory ends between the logits' buffer and the embeddings': the next decode must not write past one."""
    tokens = run_of(random_ids(20, N_VOCAB))
    with open_context(small, n_ctx=64) as ctx:
        expected = decode(ctx, tokens), ctx.embeddings()
    with open_context(small, n_ctx=64) as ctx:
        batch = batch_of(tokens)
        empty = np.empty

        def short(shape: Any, *arguments: Any) -> Any:
            if shape == (len(tokens), small.n_embd):
                raise MemoryError
            return empty(shape, *arguments)

        monkeypatch.setattr(np, "empty", short)
        with pytest.raises(MemoryError):
            ctx.decode(batch)
        monkeypatch.undo()
        assert ctx.kv.n_used == 0
        ctx.decode(batch)
        assert np.array_equal(ctx.logits(), expected[0])
        assert np.array_equal(ctx.embeddings(), expected[1])


@pytest.mark.parametrize("n_made", range(7))
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_batchs_arrays_grow_all_or_none(
    small: kvg.Model, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], n_made: int
) -> None:
    """Memory ends, or Ctrl-C comes, when some of the arrays are made, or all and not the struct of them."""
    tokens = run_of(random_ids(20, N_VOCAB))
    with open_context(small, n_ctx=64) as ctx:
        expected = decode(ctx, tokens)
    with open_context(small, n_ctx=64) as ctx:
        batch = batch_of(tokens)
        left = iter(range(n_made))

        def short(make: Any) -> Any:
            def made(*arguments: Any, **fields: Any) -> Any:
                if next(left, None) is None:
                    raise error
                return make(*arguments, **fields)

            return made

        with monkeypatch.context() as patch, pytest.raises(error):
            for name in ("_array", "sized"):
                patch.setattr(native_batch, name, short(getattr(native_batch, name)))
            ctx.decode(batch)
        assert ctx.kv.n_used == 0
        ctx.decode(batch)
        assert np.array_equal(ctx.logits(), expected)


def test_too_large_a_batch_takes_no_buffers(small: kvg.Model) -> None:
    """Two million outputs for 16 cells: too few cells is what is said, and not after taking 2 GB for them."""
    batch = kvg.Batch()
    batch.extend(np.full(2_000_000, 5, np.int32), 0, logits="all")
    with open_context(small, n_ctx=16, n_batch=2_000_000) as ctx:
        with pytest.raises(kvg.CacheFullError):
            ctx.decode(batch)
        assert len(ctx._outputs.logits) == 1
        assert len(ctx._batch._token) == 1
