"""A replica goes on with a text whose worker was killed, with the tokens that the worker would have said."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support import chance, sanitizer
from support.architectures import ArchSpec
from support.engines import decode, open_context, run_of
from support.models import N_VOCAB
from support.recurrent import DELTA_NET
from support.replica_worker import N_TEXT, OPTIONS, PROMPT
from support.streams import beside, pair

import pykvgraph as kvg
from pykvgraph import stream
from pykvgraph.errors import StateError, TransportError
from pykvgraph.stream.header import HEADER_KEY, TABLE_KEY, MessageHeader, MessageKind

LLAMA = ArchSpec("llama", 4, 64, 2, 1, 32, 32)
GEMMA = ArchSpec("gemma3", 4, 64, 2, 1, 32, 32, window=8)
LONG = 60.0  # seconds that a transport waits
N_KILLS = 200 if chance.THOROUGH and not sanitizer.ADDRESS else 6
STATE_EVERY = 64  # tokens


class Served(NamedTuple):
    """A model, and all that it says undisturbed: the prompt and the likeliest tokens."""

    path: Path
    model: kvg.Model
    text: list[int]


@pytest.fixture(scope="module", params=[LLAMA, GEMMA, DELTA_NET], ids=lambda spec: spec.arch)
def served(request: pytest.FixtureRequest, architecture: Callable[[ArchSpec], Path]) -> Iterator[Served]:
    path = architecture(request.param)
    with kvg.Model(path, device="cpu") as model:
        with open_context(model, **OPTIONS) as ctx:
            decode(ctx, run_of(PROMPT))
            text = go_on(ctx, PROMPT, [])
        yield Served(path, model, text)


def go_on(ctx: kvg.Context, text: list[int], undecoded: list[int]) -> list[int]:
    """The whole text: its end that is not in the cache yet, and the likeliest tokens behind it."""
    whole, logits = list(text), ctx.logits()[-1] if not undecoded else None
    for token in undecoded:
        logits = ctx.append(token)
    while len(whole) < N_TEXT:
        assert logits is not None
        whole.append(int(logits.argmax()))
        logits = ctx.append(whole[-1])
    return whole


def killed(served: Served, listener: stream.Listener, rng: random.Random) -> None:
    """A worker dies after a random step, at any moment of the next one."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "support.replica_worker", str(served.path), listener.address],
        cwd=Path(__file__).parents[2],
    )
    n_steps, n_known = rng.randrange(1, N_TEXT - len(PROMPT) - 2), 0
    with listener.accept() as end, open_context(served.model, checkpoint_cells=64, **OPTIONS) as ctx:
        copy = stream.replica(ctx, 0, stream.Layout({end: range(served.model.n_layer)}))
        with pytest.raises(TransportError):
            for n_known in copy:
                if n_known >= len(PROMPT) + n_steps and worker.poll() is None:
                    time.sleep(rng.random() / 500)
                    worker.kill()
                    worker.wait()
        assert worker.returncode == -9
        assert n_known >= len(PROMPT) + n_steps
        assert copy.text == served.text[: len(copy.text)]
        undecoded = copy.go_on()
        has_states = served.model.arch == DELTA_NET.arch
        assert 1 <= len(undecoded) <= (STATE_EVERY + 1 if has_states else 2)
        assert ctx.kv.seq_pos_max(0) + 1 == len(copy.text) - len(undecoded) >= len(PROMPT)
        assert go_on(ctx, copy.text, undecoded) == served.text


def test_kill_at_random_steps(served: Served, tmp_path: Path) -> None:
    """No prompt is decoded again; of what has states, at most 64 tokens."""
    rng = random.Random(chance.seed(served.model.arch))
    with stream.listen(f"unix:{tmp_path}/s", timeout=LONG) as listener:
        for _ in range(N_KILLS // 3 + 1 if N_KILLS > 6 else 2):
            killed(served, listener, rng)


def test_a_text_to_its_end(served: Served) -> None:
    """Each step is acknowledged; then the copy is over, without an error."""
    ours, theirs = pair(timeout=LONG)
    n_layer = served.model.n_layer
    with (
        open_context(served.model, **OPTIONS) as source,
        open_context(served.model, checkpoint_cells=64, **OPTIONS) as target,
    ):
        copy = stream.replica(target, 2, stream.Layout({theirs: range(n_layer)}))
        taken = beside(lambda: list(copy))
        with stream.replicated(source, 0, stream.Layout({ours: range(n_layer)}), PROMPT) as out:
            decode(source, run_of(PROMPT[:20]))
            out.send()
            decode(source, run_of(PROMPT[20:], 20))
            text = list(PROMPT)
            while len(text) < N_TEXT:
                text.append(int(source.logits()[-1].argmax()))
                out.send(text[-1:])
                source.append(text[-1])
        assert out.error is None
        assert out.n_acknowledged == N_TEXT
        assert copy.text == text == served.text
        seen = taken.result(20)
        assert isinstance(seen, list) and seen == sorted(seen) and seen[-1] == N_TEXT


@pytest.mark.parametrize("is_gone", [False, True], ids=["stalled", "gone"])
def test_a_peer_that_fails(served: Served, is_gone: bool) -> None:
    """Within the time-out the text goes on alone, and is the same."""
    ours, theirs = pair(timeout=LONG)
    layout = stream.Layout({ours: range(served.model.n_layer)})
    with open_context(served.model, **OPTIONS) as source:
        text = list(PROMPT)
        with stream.replicated(source, 0, layout, text, 30 if is_gone else 0.2) as out:
            decode(source, run_of(PROMPT))
            slowest = 0.0
            while len(text) < N_TEXT:
                text.append(int(source.logits()[-1].argmax()))
                begin = time.monotonic()
                out.send(text[-1:])
                slowest = max(slowest, time.monotonic() - begin)
                source.append(text[-1])
                if len(text) == 60:
                    theirs.close() if is_gone else time.sleep(0.3)
        assert text == served.text
        assert slowest < 5  # of 60
        assert isinstance(out.error, TransportError)
        assert ("closed" if is_gone else "acknowledged nothing for 0.2 s") in str(out.error)
        assert out.n_acknowledged == 0


def test_transports_that_give_up_earlier(served: Served) -> None:
    ours, _theirs = pair(timeout=5)
    with (
        open_context(served.model, **OPTIONS) as source,
        pytest.raises(kvg.InvalidArgumentError, match=r"longer timeout than the replica's 10 s"),
    ):
        stream.replicated(source, 0, stream.Layout({ours: range(served.model.n_layer)}))


def test_a_worker_that_says_nothing(served: Served) -> None:
    """Gone before its first step: nothing is known, and nothing is to be decoded."""
    ours, theirs = pair(timeout=LONG)
    with open_context(served.model, **OPTIONS) as ctx:
        copy = stream.replica(ctx, 0, stream.Layout({theirs: range(served.model.n_layer)}))
        ours.close()
        with pytest.raises(TransportError):
            list(copy)
        assert copy.go_on() == [] == copy.text


@pytest.mark.parametrize(
    "first, n_bytes, tokens, match",
    [
        (5, 4, [3], "a text with a gap"),
        (2, 4, [N_VOCAB], "the model doesn't know"),
        (2, 4, [-1], "the model doesn't know"),
        (2, 3, [3], "says what can't be"),
        (2, 1 << 30, [3], "more than this cache can take"),
    ],
)
def test_texts_that_cannot_be(
    served: Served, first: int, n_bytes: int, tokens: list[int], match: str
) -> None:
    """The text before them is what there is to go on with."""
    ours, theirs = pair(timeout=20)
    layout = stream.Layout({ours: range(served.model.n_layer)})
    with (
        open_context(served.model, **OPTIONS) as source,
        open_context(served.model, **OPTIONS) as target,
        stream.following(source, 0, layout, text=[3, 4]) as out,
    ):
        ours.flush(HEADER_KEY, MessageHeader(MessageKind.TEXT, first=first, n_bytes=n_bytes).pack())
        ours.flush(TABLE_KEY, np.array(tokens, "<i4"))
        copy = stream.replica(target, 0, stream.Layout({theirs: range(served.model.n_layer)}))
        with pytest.raises(StateError, match=match):
            list(copy)
        assert copy.text == [3, 4] == copy.go_on()
        out.abandon()
