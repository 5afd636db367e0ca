"""Regions that travel together: one append a token, and many tokens in one where the other end lags."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines import decode, open_context, random_ids, run_of
from support.models import N_VOCAB, SMALL
from support.streams import TIMEOUT, beside, greedy, pair

import pykvgraph as kvg
from pykvgraph import stream

OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_batch": 32, "n_ubatch": 16, "n_seq_max": 2}
N_TOKENS = 12
OF_A_TOKEN = 3  # regions: header, K, V
LAYERS = range(SMALL.n_layer)


class Held(stream.Transport):
    """Another transport's end, which takes nothing until it is released. calls: regions of each call."""

    def __init__(self, inner: stream.Transport) -> None:
        super().__init__(inner.address, inner.timeout)
        self._inner = inner
        self.calls: list[int] = []
        self.is_at_work, self.released = threading.Event(), threading.Event()
        self.released.set()

    def _send_all(self, regions: Sequence[tuple[str, memoryview]]) -> None:
        self.is_at_work.set()
        assert self.released.wait(TIMEOUT)
        self.calls.append(len(regions))
        self._inner.flush_all(regions)

    def _send(self, key: str, data: memoryview) -> None:
        raise AssertionError("_send_all is all that is called")

    def _receive(self, key: str, into: memoryview) -> None:
        self._inner.fetch(key, into)

    def _shut(self) -> None:
        self._inner.close()


def rows_of(ctx: kvg.Context, seq: int) -> bytes:
    view = ctx.kv.cells()
    cells = np.flatnonzero(view.seq[:, seq])
    return ctx.kv.read_rows(cells[np.argsort(view.pos[cells])].tolist()).data.tobytes()


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_one_append_a_token(
    small: kvg.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    """Level 0 is what it is compared with: each run of cells by itself."""
    appended, real = [0], os.writev

    def counted(file: int, pieces: Any) -> int:
        appended[0] += 1
        return real(file, pieces)

    ours, theirs = (stream.open(f"file:{tmp_path}", timeout=TIMEOUT) for _ in range(2))
    with open_context(small, **OPTIONS) as source, open_context(small, **OPTIONS) as target, ours, theirs:
        came = beside(lambda: stream.stream_in(target, 0, stream.Layout({theirs: LAYERS})))
        with stream.following(source, 0, stream.Layout({ours: LAYERS}), level) as out:
            monkeypatch.setattr(os, "writev", counted)
            for token in range(N_TOKENS):
                begun = ours.flushes
                source.append(3 + token)
                out.send()
                while level == 3 and ours.flushes < begun + OF_A_TOKEN:
                    pass
            n_regions = 2 + 2 * len(LAYERS) if level == 0 else 1
            assert appended[0] == n_regions * N_TOKENS
        came.result(TIMEOUT)
        assert rows_of(source, 0) == rows_of(target, 0)
    assert not list(tmp_path.iterdir())


def test_all_that_waits_goes_together(small: kvg.Model) -> None:
    inner, theirs = pair()
    held = Held(inner)
    with open_context(small, **OPTIONS) as source, open_context(small, **OPTIONS) as target:
        came = beside(lambda: stream.stream_in(target, 1, stream.Layout({theirs: LAYERS})))
        with stream.following(source, 0, stream.Layout({held: LAYERS}), 3) as out:
            held.calls.clear()
            held.is_at_work.clear()
            held.released.clear()
            for token in range(N_TOKENS):
                source.append(3 + token)
                out.send()
                assert held.is_at_work.wait(TIMEOUT)  # it is at the first one
            held.released.set()
        came.result(TIMEOUT)
        assert held.calls[0] == OF_A_TOKEN
        assert held.calls[1] >= OF_A_TOKEN * (N_TOKENS - 1)  # and perhaps that nothing follows
        assert rows_of(source, 0) == rows_of(target, 1)
        assert greedy(target, 1, 5) == greedy(source, 0, 5)


def test_a_prompt_between_tokens_that_wait(small: kvg.Model) -> None:
    """Its layers leave while it is computed: they go behind the tokens before it, whoever lags."""
    inner, theirs = pair()
    held = Held(inner)
    with open_context(small, **OPTIONS) as source, open_context(small, **OPTIONS) as target:
        came = beside(lambda: stream.stream_in(target, 1, stream.Layout({theirs: LAYERS})))
        with stream.following(source, 0, stream.Layout({held: LAYERS}), 3) as out:
            held.calls.clear()
            held.released.clear()
            for token in range(3):
                source.append(3 + token)
                out.send()
            decode(source, run_of(random_ids(20, N_VOCAB, 1), 3))
            out.send()
            for token in range(3):
                source.append(3 + token)
                out.send()
            held.released.set()
        came.result(TIMEOUT)
        assert sum(held.calls) == 6 * OF_A_TOKEN + 2 * (2 + 2 * len(LAYERS)) + 1
        assert len(held.calls) <= 8  # the first token, two, four layers, three tokens, and that it is over
        assert rows_of(source, 0) == rows_of(target, 1)
