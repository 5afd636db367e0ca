"""Recurrent states in what is saved: loaded as they were, or refused."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from support.engines import open_context
from support.faults import fault
from support.recurrent import DELTA_NET, OPTIONS, alone, equal, fill, go_on, same, state_bytes
from support.state_bytes import HEAD, HEADER, Part, container

import pykvgraph as kvg

pytestmark = pytest.mark.any_device


@pytest.mark.parametrize("whole", [False, True])
def test_saved_and_loaded(recurrent: kvg.Model, whole: bool) -> None:
    """In another context nothing is decoded again: not where a sequence ends, nor at its checkpoints."""
    options = {**OPTIONS, "checkpoint_cells": 48}
    with open_context(recurrent, **options) as ctx, open_context(recurrent, **options) as other:
        fill(ctx, 25)
        ctx.kv.checkpoint(0)
        fill(ctx, 40)
        ctx.kv.seq_cp(0, 2, 0, -1)
        fill(ctx, 10, seq=1, shift=50)
        fill(other, 15, seq=3, shift=20)  # what is there stays, or goes with the whole cache
        blob = ctx.kv.save(None if whole else 0)
        other.kv.load(blob, None if whole else 1)
        seq = 0 if whole else 1
        assert other.kv.checkpoints(seq) == [25]
        assert equal(go_on(other, seq), go_on(ctx))
        other.kv.rewind(seq, 30)
        ctx.kv.rewind(0, 30)
        assert equal(go_on(other, seq), go_on(ctx))
        if whole:
            assert other.kv.groups[-1].n_used == ctx.kv.groups[-1].n_used
            assert equal(go_on(other, 1), go_on(ctx, 1))
            assert equal(go_on(other, 2), go_on(ctx, 2))
        else:
            with open_context(recurrent, **options) as third:
                fill(third, 15, seq=3, shift=20)
                assert equal(go_on(other, 3), go_on(third, 3))


def test_a_load_that_fails_changes_no_state(recurrent: kvg.Model) -> None:
    with open_context(recurrent, **OPTIONS) as ctx:
        fill(ctx, 25)
        blob = ctx.kv.save(0)
        fill(ctx, 40)
        used = ctx.kv.groups[-1].n_used
        with fault("load-state"), pytest.raises(kvg.KVGraphError):
            ctx.kv.load(blob, 0)
        assert ctx.kv.groups[-1].n_used <= used
        assert same(go_on(ctx), alone(recurrent, 40))


def test_damaged_states_are_refused(delta_net: kvg.Model) -> None:
    with open_context(delta_net, **OPTIONS) as ctx:
        fill(ctx, 20)
        ctx.kv.checkpoint(0)
        fill(ctx, 30)
        blob = ctx.kv.save(0)
        begin = blob.index(b"STAT", HEADER)
        rng = np.random.default_rng(3)
        for _ in range(300):
            damaged = bytearray(blob)
            damaged[begin + int(rng.integers(len(blob) - begin))] ^= 1 << int(rng.integers(8))
            with pytest.raises(kvg.StateError):
                ctx.kv.load(bytes(damaged), 1)
        assert ctx.kv.seq_pos_max(1) == -1
        assert same(go_on(ctx), alone(delta_net, 30))


def test_an_empty_cache_is_saved_and_loaded(delta_net: kvg.Model) -> None:
    with open_context(delta_net, **OPTIONS) as ctx:
        blob = ctx.kv.save()
        fill(ctx, 30)
        ctx.kv.load(blob)
        assert ctx.kv.groups[-1].n_used == 0
        assert same(go_on(ctx), alone(delta_net, 0))


@pytest.mark.parametrize("whole", [False, True])
def test_a_state_of_a_sequence_without_cells_is_refused(
    delta_net: kvg.Model, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a sequence begins with zeros, whatever a file says."""

    def owners(*_: Any) -> tuple[Any, list[int]]:
        return np.array([[0, -1, 0], [1, -1, 0]][: 1 + whole], np.int32), [0]

    with open_context(delta_net, **OPTIONS) as ctx:
        fill(ctx, 20 * whole)
        fill(ctx, 20, seq=2)
        with monkeypatch.context() as patch:
            patch.setattr("pykvgraph.kv_cache.saved.transfer._state_owners", owners)
            blob = ctx.kv.save(None if whole else 0)
        with pytest.raises(kvg.StateError, match="that aren't there"):
            ctx.kv.load(blob, None if whole else 1)
        assert same(go_on(ctx, 1), alone(delta_net, 0))


def forged(blob: bytes, contents: bytes) -> bytes:
    """The saved state with another section STAT, and checksums that fit."""
    at, n = HEADER, struct.unpack_from("<I", blob, 24)[0]
    parts: list[Part] = []
    for _ in range(n):
        tag, flags, index, _, n_bytes = struct.unpack_from("<4sIIIQ", blob, at)
        old = blob[at + HEAD : at + HEAD + n_bytes]
        parts.append(Part(tag, contents if tag == b"STAT" else old, index, flags))
        at += HEAD + n_bytes + (8 - n_bytes % 8) % 8
    return container(parts)


def test_forged_states_are_refused(delta_net: kvg.Model) -> None:
    with open_context(delta_net, **OPTIONS) as ctx:
        fill(ctx, 20)
        ctx.kv.checkpoint(0)
        fill(ctx, 30)
        blob, row = ctx.kv.save(), state_bytes(DELTA_NET)
        begin = blob.index(b"STAT", HEADER) + HEAD
        rows = blob[begin + 16 :][: 2 * row]
        owners = list(struct.iter_unpack("<3i", blob[begin + 16 + 2 * row :][:24]))
        (live,) = (index for _, p, index in owners if p == -1)
        kept = rows[(1 - live) * row :][:row]

        def state(*owners: tuple[int, int, int], rows: bytes = rows) -> bytes:
            front = struct.pack("<IIQ", len(owners), len(rows) // row, row)
            return forged(blob, front + rows + b"".join(struct.pack("<3i", *owner) for owner in owners))

        assert state(*owners) == blob
        wrong = {
            "of a sequence without cells": state(*owners, (1, -1, 1)),
            "that nobody has": state(*owners, rows=rows + rows[:row]),
            "isn't finite": state(*owners, rows=b"\0\0\xc0\x7f" + rows[4:]),
            "sequences or checkpoints that aren't there": state((0, -1, live), (0, 21, 1 - live)),
        }
        wrong |= {
            f"aren't there{' ' * i}": state(*owners, who)
            for i, who in enumerate([(4, -1, 0), (-1, -1, 0), (0, -2, 0), (0, -1, 0), (0, 30, 0), (1, 20, 0)])
        }
        used = ctx.kv.groups[-1].n_used
        for message, one in wrong.items():
            with pytest.raises(kvg.StateError, match=message.strip()):
                ctx.kv.load(one)
        assert ctx.kv.groups[-1].n_used == used
        ctx.kv.load(state((0, 20, 0), rows=kept))  # as where a resume point was not attached yet
        with pytest.raises(kvg.InvalidArgumentError, match="can't go on at position 30"):
            go_on(ctx)
        ctx.kv.rewind(0, 29)
        assert same(go_on(ctx), alone(delta_net, 20))
