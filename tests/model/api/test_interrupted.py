"""Ctrl-C in the middle of a call: KeyboardInterrupt after it, the cache whole, and the next call right."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support import chance
from support.ctrl_c import heard as ctrl_c_heard
from support.engines import Token, batch_of, decode, open_context, random_ids, run_of
from support.judge import nmse
from support.kv_rows import contents
from support.models import N_VOCAB, ModelSpec
from support.storm import Storm, seconds

import pykvgraph as kvg
from pykvgraph.kv_cache.saved.file import write_file

# Ctrl-C may come in a finalizer, in a callback of the garbage collector, or between open() and `with`, when
# nobody but the garbage collector holds the file: Python only tells of it
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

# so large that a call takes longer than the way to it
SPEC = ModelSpec(n_layer=3, n_embd=256, n_ff=512, n_head=4, n_head_kv=2)
N = 512
DELAYS = np.linspace(0.001, 0.05, 8).tolist()  # seconds


@pytest.fixture(scope="module", autouse=True)
def ctrl_c() -> Iterator[None]:
    with ctrl_c_heard():
        yield


@pytest.fixture(scope="module")
def slow(model_file: Callable[[ModelSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(model_file(SPEC), device="cpu") as model:
        yield model


@pytest.fixture
def ctx(slow: kvg.Model) -> Iterator[kvg.Context]:
    options = {"n_ctx": 2 * N, "n_batch": N, "n_ubatch": 64, "n_seq_max": 2}
    with open_context(slow, **options, defrag_threshold=-1, flash_attn="off") as ctx:
        yield ctx


def interrupt(work: Callable[[], object], delay: float) -> None:
    """Does the work over and over until Ctrl-C, which comes after the delay.

    It comes again after a second if it was lost, as it is in a finalizer.
    """
    noticed = threading.Event()

    def strike() -> None:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGINT)
        while not noticed.wait(1):
            os.kill(os.getpid(), signal.SIGINT)

    striker = threading.Thread(target=strike)
    with pytest.raises(KeyboardInterrupt):
        striker.start()
        while True:
            work()
    noticed.set()
    striker.join()


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """A Ctrl-C in a finalizer of other tests' garbage is only told of, and pytest keeps its traceback.

    The frames in that keep alive what the interrupted call was making.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("how", ["hold", "reserve"])
def test_nothing_stays_held_or_reserved(small: kvg.Model, how: str) -> None:
    """What nobody got to see is let go, or its cells would stay until clear()."""

    def reserve() -> None:
        if ctx.kv.n_free > 0:  # on a busy machine, Ctrl-C may come after all of them
            kept.append(ctx.kv.reserve([kvg.Place([0])]))

    kept: list[object] = []  # so that no finalizer runs meanwhile, in which Ctrl-C would go nowhere
    with open_context(small, n_ctx=8192) as ctx:
        decode(ctx, run_of(random_ids(20, N_VOCAB)))
        calls: dict[str, Callable[[], object]] = {
            "hold": lambda: kept.append(ctx.kv.hold(0, 0, 20)),
            "reserve": reserve,
        }
        for delay in np.linspace(0.001, 0.004, 20 if chance.THOROUGH else 6):
            interrupt(calls[how], delay)
            kept.clear()
            gc.collect()
            assert not ctx.kv.cells().held.any()
            assert ctx.kv.n_used == 20


@pytest.fixture(params=[1, 2, 5])
def storm(request: pytest.FixtureRequest) -> Iterator[Storm]:
    storm = Storm(request.param)
    yield storm
    storm.end()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="3.10 looks for signals when a function has returned")
@pytest.mark.parametrize("how", ["append", "decode", "decode_last"])
def test_storm(small: kvg.Model, storm: Storm, how: str) -> None:
    """The tokens are there if and only if the call returned, wherever in it Ctrl-C comes, however often."""
    batch = batch_of([Token(5 + i, i // 2, (i % 2,)) for i in range(6)])
    with open_context(small, n_ctx=64, n_seq_max=2) as ctx:
        calls = {
            "append": (1, lambda: ctx.append(7)),
            "decode": (6, lambda: ctx.decode(batch)),
            "decode_last": (6, lambda: ctx.decode_last(batch)),
        }
        n, work = calls[how]
        for _ in range(20):  # until it is as fast as it gets
            longest = seconds(work)
            ctx.reset()
        n_returned = 0
        rng = random.Random(chance.seed(1))
        for _ in range(400):
            done = storm.returned(work, rng.uniform(1e-6, 2 * longest + 40e-6))
            assert ctx.kv.n_used == (n if done else 0)
            assert [ctx.kv.seq_pos_max(seq) for seq in range(2)] == (
                [-1, -1] if not done else [0, -1] if how == "append" else [2, 2]
            )
            if not done:
                with pytest.raises(kvg.InvalidArgumentError, match="no outputs"):
                    ctx.logits()
            n_returned += done
            longest *= 0.95 if done else 1.05  # about half of them return, however busy the machine is
            ctx.reset()
        assert 0 < n_returned < 400  # both happen, however busy the machine is


@pytest.mark.slow
def test_storm_of_save_file(storm: Storm, tmp_path: Path) -> None:
    """No file is left aside, wherever Ctrl-C comes."""
    path = tmp_path / "state"
    longest = max(seconds(lambda: write_file(path, b"old")) for _ in range(5))
    rng = random.Random(chance.seed(1))
    for _ in range(300):
        storm.returned(lambda: write_file(path, b"new"), rng.uniform(1e-6, longest + 40e-6))
        assert list(tmp_path.iterdir()) == [path]


def test_decode(ctx: kvg.Context) -> None:
    """The tokens of the batch that was under way are gone again."""
    tokens = run_of(random_ids(N, N_VOCAB))
    batch = batch_of([token._replace(logits=False) for token in tokens])
    ctx.decode(batch)
    following = [Token(7, N)]
    expected = decode(ctx, following)

    def work() -> None:
        ctx.kv.clear()
        ctx.decode(batch)

    n_gone = 0
    for delay in DELAYS:
        ctx.kv.seq_rm(0, N, -1)
        interrupt(work, delay)
        assert ctx.kv.n_used in (0, N)  # all of it, when Ctrl-C comes between two calls
        n_gone += ctx.kv.n_used == 0
        if ctx.kv.n_used == 0:
            ctx.decode(batch)
        assert nmse(decode(ctx, following), expected) <= 1e-6
    assert n_gone > len(DELAYS) / 2


def test_append(ctx: kvg.Context) -> None:
    """Where a token loop is interrupted, its token isn't in the cache: the text can go on with it."""
    ids = random_ids(N, N_VOCAB)
    decode(ctx, run_of(ids[: N // 2]))
    told = 0

    def work() -> None:
        nonlocal told
        ctx.append(ids[told])
        told += 1

    n_gone = 0
    for _ in range(8):
        ctx.kv.seq_rm(0, N // 2, -1)
        told = N // 2
        interrupt(work, 0.02)
        n_more = ctx.kv.seq_pos_max(0) + 1 - told
        assert n_more in (0, 1)  # 1: Ctrl-C came between the call and the count of it
        n_gone += n_more == 0
    assert n_gone > 4


@pytest.mark.parametrize("delay", DELAYS)
def test_update(ctx: kvg.Context, delay: float) -> None:
    """Rows are moved and rotated back and forth; wherever it is cut, each position has its own."""
    decode(ctx, [Token(5 + i % 200, i // 2, (i % 2,), logits=False) for i in range(N)])
    held = [contents(ctx.kv, seq) for seq in range(2)]
    ctx.kv.seq_cp(0, 1, 0, 100)
    blob = ctx.kv.save()

    def work() -> None:
        ctx.kv.load(blob)
        ctx.kv.seq_add(0, 0, 100, 1000)  # copies
        ctx.kv.seq_rm(1, 0, 100)
        ctx.kv.seq_add(0, 1000, 1100, -1000)
        ctx.kv.defrag("sort")
        ctx.kv.update()

    interrupt(work, delay)
    ctx.kv.load(blob)  # whatever was left undone
    ctx.kv.update()
    for seq in range(2):
        assert held[seq] <= contents(ctx.kv, seq)
    work()
    assert contents(ctx.kv, 0) == held[0]
    assert ctx.kv.n_kv == ctx.kv.n_used


def test_generate(slow: kvg.Model) -> None:
    """The tokens that were told are in the cache, and the text goes on."""
    with open_context(slow, n_ctx=256) as ctx:
        pieces: list[kvg.Piece] = []
        shift = kvg.ContextShift(n_keep=8)

        def work() -> None:
            pieces.extend(kvg.generate(ctx, [5], max_tokens=300, temperature=0.0, on_full=shift))

        interrupt(work, 0.2)
        n_used = ctx.kv.n_used
        assert n_used == len(set(ctx.kv.cells().pos.tolist()) - {-1})
        assert ctx.kv.seq_pos_max(0) == n_used - 1
        list(kvg.generate(ctx, [6], max_tokens=5, on_full=shift))
        assert ctx.kv.seq_pos_max(0) >= 0


@pytest.mark.parametrize("delay", DELAYS)
def test_save_file(ctx: kvg.Context, tmp_path: Path, delay: float) -> None:
    decode(ctx, [token._replace(logits=False) for token in run_of(random_ids(N, N_VOCAB))])
    path = tmp_path / "state"
    ctx.kv.save_file(path, seq=0)
    blob = path.read_bytes()
    interrupt(lambda: ctx.kv.save_file(path, seq=0), delay)
    assert path.read_bytes() == blob
    assert list(tmp_path.iterdir()) == [path]
