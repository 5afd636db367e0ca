"""Pipelines whose stages are threads of this process, each with a model of its own layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import pykvgraph as kvg
from pykvgraph import stream
from support.engines import open_context
from support.streams import TIMEOUT, beside, pair

Logits = npt.NDArray[np.float32]


class Stages:
    """A pipeline, its contexts from the first stage on, and the ends over which each one sends."""

    def __init__(
        self, pipe: stream.Pipeline, contexts: list[kvg.Context], senders: list[stream.Transport]
    ) -> None:
        self.pipe = pipe
        self.contexts = contexts
        self.senders = senders


@contextmanager
def stage_contexts(path: Path, cuts: Sequence[range], **options: Any) -> Iterator[list[kvg.Context]]:
    with ExitStack() as stack:
        models = [stack.enter_context(kvg.Model(path, device="cpu", layers=layers)) for layers in cuts]
        yield [stack.enter_context(open_context(model, **options)) for model in models]


@contextmanager
def pipeline(
    path: Path, cuts: Sequence[range], folder: Path | None = None, **options: Any
) -> Iterator[Stages]:
    """kind: of the transports between the stages."""
    with stage_contexts(path, cuts, **options) as contexts, ExitStack() as stack:
        if len(cuts) == 1:
            yield Stages(stack.enter_context(stream.Pipeline(contexts[0], folder=folder)), contexts, [])
            return
        ends = [pair() for _ in cuts]  # the last pair leads from the last stage to the first
        workers: list[Future[object]] = [
            beside(lambda ctx=ctx, a=ends[i][1], b=ends[i + 1][0]: stream.run_stage(ctx, a, b, folder))  # type: ignore[misc]
            for i, ctx in enumerate(contexts[1:])
        ]
        with stream.Pipeline(contexts[0], ends[0][0], ends[-1][1], folder) as pipe:
            yield Stages(pipe, contexts, [own for own, _ in ends])
        for worker in workers:
            worker.result(TIMEOUT)


def batch_of(tokens: Sequence[int], pos: int = 0, seq: int = 0, logits: Any = "last") -> kvg.Batch:
    batch = kvg.Batch()
    batch.extend(tokens, pos, (seq,), logits)
    return batch


def greedy(pipe: stream.Pipeline, logits: Logits, n: int, seq: int = 0) -> tuple[list[int], list[Logits]]:
    """n tokens, each the likeliest, and the logits behind each."""
    tokens, rows = [], []
    for _ in range(n):
        tokens.append(int(logits.argmax()))
        logits = pipe.append(tokens[-1], seq)
        rows.append(logits)
    return tokens, rows
