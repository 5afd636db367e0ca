"""What can't be taken changes nothing where it would have gone, and is a typed error that says why."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import chance
from support.engines import decode, open_context, random_ids, run_of
from support.models import N_VOCAB, SMALL, ModelSpec
from support.streams import TIMEOUT, Ends, beside, connect, fill_with_holes, greedy, pair, travel

import pykvgraph as kvg
from pykvgraph import stream
from pykvgraph.errors import TransportError

OPTIONS: dict[str, Any] = {"n_ctx": 96, "n_batch": 16, "n_seq_max": 4, "defrag_threshold": -1}


def refused(
    source: kvg.Context, target: kvg.Context, error: type[Exception], match: str, ends: Ends | None = None
) -> None:
    """Sequence 0 of the source goes nowhere, and all is as it was at both ends."""
    ends = ends or connect(2, 1, 2)
    before, theirs = target.kv.save(), source.kv.save()
    used = [group.n_used for group in target.kv.groups]
    sent = beside(lambda: stream.stream_out(source, 0, ends.out[0], 1))
    with pytest.raises(error, match=match):
        stream.stream_in(target, 1, ends.into)
    sent.exception(TIMEOUT)  # it may have been done before
    assert target.kv.save() == before
    assert [group.n_used for group in target.kv.groups] == used
    assert source.kv.save() == theirs
    with pytest.raises(TransportError):  # nothing that is left over is taken for the next stream
        stream.stream_in(target, 1, ends.into)
    greedy(target, 3, 3)


def test_of_another_model(small: kvg.Model, model_file: Callable[[ModelSpec], Path]) -> None:
    with (
        kvg.Model(model_file(ModelSpec(seed=SMALL.seed + 1))) as other,
        open_context(other, **OPTIONS) as source,
        open_context(small, **OPTIONS) as target,
    ):
        fill_with_holes(source, 20, 1)
        fill_with_holes(target, 20, 2, 3, (0, 2))
        refused(source, target, kvg.StateError, "another model")


@pytest.mark.parametrize("name, kind", [("type_k", "f32"), ("type_v", "bf16")])
def test_of_another_type(small: kvg.Model, name: str, kind: str) -> None:
    with (
        open_context(small, **{**OPTIONS, name: kind}) as source,
        open_context(small, **OPTIONS) as target,
    ):
        fill_with_holes(source, 20, 1)
        refused(source, target, kvg.StateError, f"{name} = {kind}")


def test_layers_over_other_transports(small: kvg.Model) -> None:
    with open_context(small, **OPTIONS) as source, open_context(small, **OPTIONS) as target:
        fill_with_holes(source, 20, 1)
        (a, b), (c, d) = pair(), pair()
        crossed = Ends([stream.Layout({a: [0], c: [1]})], stream.Layout({b: [1], d: [0]}))
        refused(source, target, kvg.StateError, r"layers = \(0,\)", crossed)


def test_two_senders_with_other_texts(small: kvg.Model) -> None:
    with (
        open_context(small, **OPTIONS) as one,
        open_context(small, **OPTIONS) as other,
        open_context(small, **OPTIONS) as target,
    ):
        fill_with_holes(one, 20, 1)
        fill_with_holes(other, 21, 1)
        ends = connect(2, 2)
        for ctx, layout in zip((one, other), ends.out, strict=True):
            stream.stream_out(ctx, 0, layout)
        with pytest.raises(kvg.StateError, match="different sequences"):
            stream.stream_in(target, 0, ends.into)
        assert target.kv.n_used == 0


def test_too_few_cells(small: kvg.Model) -> None:
    with open_context(small, **OPTIONS) as source, open_context(small, **OPTIONS) as target:
        fill_with_holes(source, 30, 1)
        fill_with_holes(target, 30, 2, 3, (0, 2))
        while target.kv.n_free >= 20:
            decode(target, run_of(random_ids(4, N_VOCAB, 5), target.kv.seq_pos_max(3) + 1, (3,)))
        refused(source, target, kvg.CacheFullError, "cells")


def test_into_a_sequence_that_has_cells(small: kvg.Model) -> None:
    """Nothing is fetched, so that it can still be."""
    with open_context(small, **OPTIONS) as source, open_context(small, **OPTIONS) as target:
        fill_with_holes(source, 20, 1)
        fill_with_holes(target, 20, 2)
        ends = connect(2)
        with pytest.raises(kvg.InvalidArgumentError, match="sequence 0 has cells"):
            stream.stream_in(target, 0, ends.into)
        travel(source, 0, target, 3, ends)
        assert target.kv.save(3) == source.kv.save(0)


def test_layouts_that_do_not_fit(small: kvg.Model) -> None:
    with open_context(small, **OPTIONS) as ctx:
        with pytest.raises(kvg.InvalidArgumentError, match="no transport for layer 1"):
            stream.stream_in(ctx, 0, stream.Layout({pair()[0]: [0]}))
        with pytest.raises(kvg.InvalidArgumentError, match="layer 2"):
            stream.stream_out(ctx, 0, stream.Layout({pair()[0]: [0, 2]}))
        with pytest.raises(kvg.InvalidArgumentError, match="level"):
            stream.stream_out(ctx, 0, stream.Layout({pair()[0]: [0]}), 4)
        with pytest.raises(kvg.InvalidArgumentError, match="Layout"):
            stream.stream_out(ctx, 0, {pair()[0]: [0]})  # type: ignore[arg-type]


class Changing(stream.Transport):
    """Another transport's end that changes what is flushed, or ends after so many regions."""

    def __init__(self, inner: stream.Transport, change: Callable[[str, bytearray], bool]) -> None:
        super().__init__(inner.address, inner.timeout)
        self._inner, self._change = inner, change

    def _send(self, key: str, data: memoryview) -> None:
        region = bytearray(data)
        if not self._change(key, region):
            self._inner.close()
        self._inner.flush(key, region)

    def _receive(self, key: str, into: memoryview) -> None:
        self._inner.fetch(key, into)

    def _shut(self) -> None:
        self._inner.close()


def changed(change: Callable[[str, bytearray], bool]) -> Ends:
    ours, theirs = pair()
    return Ends([stream.Layout({Changing(ours, change): range(2)})], stream.Layout({theirs: range(2)}))


def test_a_sender_that_dies(small: kvg.Model) -> None:
    """After any of its regions."""
    with open_context(small, **OPTIONS) as source, open_context(small, **OPTIONS) as target:
        fill_with_holes(source, 20, 1)
        for last in range(7):
            seen: list[str] = []

            def dies(key: str, _: bytearray, seen: list[str] = seen, last: int = last) -> bool:
                seen.append(key)
                return len(seen) <= last

            refused(source, target, TransportError, "closed", changed(dies))


def test_rows_that_are_not_finite(small: kvg.Model) -> None:
    def spoil(key: str, region: bytearray) -> bool:
        if key == "1:v":
            region[-2:] = struct.pack("<e", float("nan"))
        return True

    with open_context(small, **OPTIONS) as source, open_context(small, **OPTIONS) as target:
        fill_with_holes(source, 20, 1)
        refused(source, target, kvg.StateError, "V in layer 1", changed(spoil))


def test_bits_of_headers_and_tables(small: kvg.Model) -> None:
    """Each is refused, or is another sequence that can be; no table is larger than the cache allows."""
    rng = np.random.default_rng(chance.number(4))
    with open_context(small, **OPTIONS) as source, open_context(small, **OPTIONS) as target:
        fill_with_holes(source, 20, 1)
        for level in (0, 1):
            for _ in range(60):
                wanted = "front" if rng.integers(2) else "table"
                spot, bit = float(rng.random()), 1 << int(rng.integers(8))

                def flip(
                    key: str, region: bytearray, wanted: str = wanted, spot: float = spot, bit: int = bit
                ) -> bool:
                    if key == wanted and region:
                        region[int(spot * len(region))] ^= bit
                    return True

                ends = changed(flip)
                sent = beside(lambda ends=ends, level=level: stream.stream_out(source, 0, ends.out[0], level))  # type: ignore[misc]
                with pytest.raises((kvg.StateError, TransportError, kvg.CacheFullError)):
                    stream.stream_in(target, 1, ends.into)
                sent.exception(TIMEOUT)
                assert target.kv.n_used == 0


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("n_tokens", [1, 4], ids=["a token", "several"])
def test_bits_of_what_follows(small: kvg.Model, n_tokens: int, level: int) -> None:
    """As above, of the message behind the first one. It may still be one that can be."""
    rng = np.random.default_rng(chance.number(5))
    n_refused = 0
    with open_context(small, **OPTIONS) as source, open_context(small, **OPTIONS) as target:
        fill_with_holes(source, 20, 1)
        end = source.kv.seq_pos_max(0) + 1
        for _ in range(40):
            wanted = "table" if n_tokens > 1 and rng.integers(2) else "front"
            spot, bit = float(rng.random()), 1 << int(rng.integers(8))
            seen: list[str] = []

            def flip(
                key: str,
                region: bytearray,
                seen: list[str] = seen,
                what: tuple[str, float, int] = (wanted, spot, bit),
            ) -> bool:
                seen.append(key)
                if key == what[0] and seen.count(key) == 2:
                    region[int(what[1] * len(region))] ^= what[2]
                return True

            ends = changed(flip)
            came = beside(lambda ends=ends: list(stream.arrivals(target, 1, ends.into)))  # type: ignore[misc]
            with contextlib.suppress(TransportError), stream.following(source, 0, ends.out[0], level) as out:
                decode(source, run_of([5] * n_tokens, end))
                out.send()
            error = came.exception(TIMEOUT)
            assert error is None or isinstance(error, (kvg.StateError, TransportError, kvg.CacheFullError))
            n_refused += error is not None
            source.kv.seq_rm(0, end, -1)
            target.reset()
    assert n_refused >= 20
