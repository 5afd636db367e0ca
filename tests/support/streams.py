"""Pairs of ends, layers that two depths of a pipeline split, and sequences with holes around them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

import pykvgraph as kvg
from pykvgraph import stream
from pykvgraph.errors import TransportError
from support import chance
from support.engines import decode, random_ids, run_of
from support.models import N_VOCAB

_names = itertools.count()
TIMEOUT = 20.0


class Ends(NamedTuple):
    """Layouts whose transports are pairs: of each sender, and the receiver's."""

    out: list[stream.Layout]
    into: stream.Layout


def pair(kind: str = "memory", **options: Any) -> tuple[stream.Transport, stream.Transport]:
    name = f"{kind}:test-{next(_names)}"
    options = {"timeout": TIMEOUT, **options}
    return stream.open(name, **options), stream.open(name, **options)


def split(n_layer: int, depth: int) -> list[range]:
    """Layers of each worker; the last ones have one more where it doesn't divide."""
    ends = [n_layer * i // depth for i in range(depth + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


def connect(n_layer: int, p: int = 1, q: int = 1, kind: str = "memory") -> Ends:
    """p workers send, and their layers are q workers' at the other end: a transport for each that meet."""
    out: list[dict[stream.Transport, range]] = [{} for _ in range(p)]
    into: dict[stream.Transport, range] = {}
    for (i, _), layers in stream.crossings(split(n_layer, p), split(n_layer, q)).items():
        ours, theirs = pair(kind)
        out[i][ours] = layers
        into[theirs] = layers
    return Ends([stream.Layout(parts) for parts in out], stream.Layout(into))


def beside(work: Callable[[], object]) -> Future[object]:
    """The work, in a thread of its own."""
    with_thread = ThreadPoolExecutor(1)
    future = with_thread.submit(work)
    with_thread.shutdown(wait=False)
    return future


@contextmanager
def all_of(sent: Sequence[Future[object]]) -> Iterator[None]:
    """The senders have ended, too. Where one has failed, the receiver only says that it is gone."""
    try:
        yield
    except TransportError:
        for each in sent:
            each.result(TIMEOUT)
        raise
    for each in sent:
        each.result(TIMEOUT)


def travel(source: kvg.Context, seq: int, target: kvg.Context, to: int, ends: Ends, level: int = 1) -> None:
    """The sequence, from one context into another one."""
    sent = [beside(lambda each=each: stream.stream_out(source, seq, each, level)) for each in ends.out]  # type: ignore[misc]
    with all_of(sent):
        stream.stream_in(target, to, ends.into)


def fill_with_holes(
    ctx: kvg.Context, n: int, seed: int, seq: int = 0, others: Sequence[int] = (1, 2)
) -> None:
    """n tokens of a sequence between those of others, of which some go again: its cells are in many runs."""
    rng = np.random.default_rng(chance.number(seed))
    ids = random_ids(n, N_VOCAB, 7)
    pos = 0
    while pos < n:
        end = min(n, pos + int(rng.integers(1, 7)))
        decode(ctx, run_of(ids[pos:end], pos, (seq,)))
        pos = end
        other = others[int(rng.integers(len(others)))]
        begin = ctx.kv.seq_pos_max(other) + 1
        decode(ctx, run_of(random_ids(int(rng.integers(1, 4)), N_VOCAB, pos), begin, (other,)))
    ctx.kv.seq_rm(others[0], -1, -1)


def greedy(ctx: kvg.Context, seq: int, n: int, first: int = 5) -> list[int]:
    """n tokens, each the likeliest after the one before."""
    tokens = [first]
    for _ in range(n):
        tokens.append(int(ctx.append(tokens[-1], seq).argmax()))
    return tokens


def alive() -> set[str]:
    """Names of the threads that run."""
    return {thread.name for thread in threading.enumerate()}
