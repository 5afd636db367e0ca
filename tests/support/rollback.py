"""What an engine has at one moment: for comparing two runs, and what a step that failed has changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import pykvgraph as kvg
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.prefix.node import Node
from support.soak import nodes_of


def accounts(engine: kvg.Engine) -> dict[str, Any]:
    """Free cells and sequences, who runs with which tokens, what is held of which text, who sees cells."""
    texts = engine._loop.stepper._running_set
    kv, scheduler, index = engine.context.kv, texts.scheduler, texts.index
    return {
        "free": kv.n_free,
        "used": [group.n_used for group in kv.groups],
        "sequences": scheduler.n_free_seqs,
        "running": [_text(each) for each in scheduler.running],
        "waiting": [_text(each) for each in scheduler.waiting],
        "nodes": sorted(_node(each) for each in nodes_of(index)),
        "roots": sorted((salt, root.n_pins) for salt, root in index._roots.items()),
        "cells": [_cells(engine, number) for number in range(len(kv.groups))],
    }


def bytes_seen(engine: kvg.Engine) -> dict[int, tuple[int, bytes]]:
    """Of every running text, its order and what kv.save() makes of its sequence: all K, V and states."""
    kv, running = engine.context.kv, engine._loop.stepper._running_set.scheduler.running
    return {each.order: (each.n_decoded, kv.save(each.seq)) for each in running if each.n_decoded}


class Watched:
    """In place of a method: counts what it raises, and compares what the cache has before and behind that."""

    def __init__(self, engine: kvg.Engine, owner: Any, name: str) -> None:
        self.n_raised = 0
        self._engine, self._owner, self._name = engine, owner, name
        self._method = getattr(owner, name)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        before = accounts(self._engine), bytes_seen(self._engine)
        try:
            return self._method(*args, **options)
        except (kvg.KVGraphError, MemoryError):
            self.n_raised += 1
            assert (accounts(self._engine), bytes_seen(self._engine)) == before, "a part was done"
            raise


class KnowingDrafter:
    """Drafts of what a text said in another run, none to three tokens of it, and a wrong one behind them."""

    def __init__(self) -> None:
        self.n_drafts = 0
        self._sequences: list[RequestSequence] = []
        self._said: dict[tuple[int, int], list[int]] = {}

    def be_in(self, engine: kvg.Engine) -> None:
        """In place of the engine's own drafter, which was to be there."""
        speculation = engine._loop.stepper._speculation
        assert speculation is not None
        speculation._drafter = self

    def know(self) -> None:
        """The texts of the run that it was in have ended."""
        self._said = {(each.order, each._sample): each._tokens for each in self._sequences}

    def drafts(self, asked: Sequence[tuple[RequestSequence, int]], *_: Any) -> list[list[int]]:
        """As Drafter.drafts()."""
        self._sequences += [sequence for sequence, _ in asked]
        found = [self._draft(sequence)[:most] for sequence, most in asked]
        self.n_drafts += sum(map(bool, found))
        return found

    def learn(self, sequence: RequestSequence, n_before: int) -> None:
        """As Drafter.learn()."""

    def close(self) -> None:
        """As Drafter.close()."""

    def _draft(self, sequence: RequestSequence) -> list[int]:
        said = self._said.get((sequence.order, sequence._sample), [])
        n = sequence._n_said
        return [*said[n : n + n % 4], sequence.ids[-1] ^ 1] if said else []


def _text(sequence: RequestSequence) -> tuple[Any, ...]:
    return sequence.order, sequence._sample, sequence.n_decoded, tuple(sequence.ids), sequence.n_beyond


def _node(node: Node) -> tuple[Any, ...]:
    """By its tokens from the text's begin on: pins, and the places to go on from."""
    tokens, at = b"", node
    while at.parent is not None:
        tokens, at = at.tokens + tokens, at.parent
    return getattr(at, "salt", b""), tokens, node.n_pins, tuple(sorted(node.points))


def _cells(engine: kvg.Engine, number: int) -> list[tuple[int, int, int]]:
    """Position, holds, and how many see it, of every cell that is in use; in no order."""
    view = engine.context.kv.cells(number)
    used = np.flatnonzero(view.pos >= 0)
    return sorted((int(view.pos[i]), int(view.held[i]), int(view.seq[i].sum())) for i in used)
