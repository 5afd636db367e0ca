"""A sequence goes from one context to another on a device, between two devices, and to or from the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.engines import decode, open_context, random_ids, run_of
from support.faults import fault
from support.models import N_VOCAB, ModelSpec
from support.streams import beside, connect, fill_with_holes, greedy, travel

import pykvgraph as kvg
from pykvgraph import stream

pytestmark = pytest.mark.gpu

HEADS_OF_64 = ModelSpec(n_layer=2, n_head=4, n_head_kv=2, head_dim=64)
WIDE = ModelSpec(n_layer=1, n_head=64, n_head_kv=64, head_dim=64)  # 16 KiB in a row of K in F32
GATHERED = (16 << 20) // (16 << 10)  # rows that a graph gathers at a time (native/src/memory/words.cpp)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize(("begins", "ends"), [("there", "there"), ("there", "here"), ("here", "there")])
def test_the_same_bytes_wherever_it_goes(
    device: str, model_file: Callable[[ModelSpec], Path], kv_type: str, begins: str, ends: str
) -> None:
    path = model_file(HEADS_OF_64)
    options = {"n_ctx": 256, "n_seq_max": 4, "type_k": kv_type, "type_v": kv_type, "defrag_threshold": -1}
    where = {"there": device, "here": "cpu"}
    with (
        kvg.Model(path, device=where[begins]) as one,
        kvg.Model(path, device=where[ends]) as other,
        open_context(one, **options) as source,
        open_context(other, **options) as target,
    ):
        fill_with_holes(source, 60, 1)
        fill_with_holes(target, 30, 2, 3)
        before = target.kv.save(3)
        travel(source, 0, target, 1, connect(2, 2, 1, "device"))
        assert target.kv.save(1) == source.kv.save(0)
        assert target.kv.save(3) == before
        if begins == ends:
            assert greedy(target, 1, 4) == greedy(source, 0, 4)


def test_more_rows_than_a_graph_gathers(device: str, model_file: Callable[[ModelSpec], Path]) -> None:
    options = {
        "n_ctx": 2 * GATHERED,
        "n_batch": 2 * GATHERED,
        "n_seq_max": 2,
        "type_k": "f32",
        "type_v": "f32",
    }
    path = model_file(WIDE)
    with (
        kvg.Model(path, device="cpu") as quick,
        kvg.Model(path, device=device) as model,
        open_context(quick, **options) as first,
        open_context(model, **options) as source,
        open_context(model, **options) as target,
    ):
        decode(first, run_of(random_ids(GATHERED + 100, N_VOCAB)))
        source.kv.load(first.kv.save(0), 0)
        decode(target, run_of(random_ids(3, N_VOCAB), 0, (1,)))
        before = target.kv.save(1)
        travel(source, 0, target, 0, connect(1, kind="device"))
        assert target.kv.save(0) == source.kv.save(0)
        assert target.kv.save(1) == before


@pytest.mark.parametrize("site", ["pack-build", "pack-alloc", "pack-compute"])
def test_a_device_that_fails(device: str, model_file: Callable[[ModelSpec], Path], site: str) -> None:
    """While rows leave: all is as it was. While they come: that cache says that it is broken."""
    options = {"n_ctx": 256, "n_seq_max": 4, "defrag_threshold": -1}
    with (
        kvg.Model(model_file(HEADS_OF_64), device=device) as model,
        open_context(model, **options) as source,
        open_context(model, **options) as target,
    ):
        fill_with_holes(source, 60, 1)
        before = source.kv.save(0)
        for countdown in (1, 2):  # the first layer, and the second
            ends = connect(2, kind="device")
            with fault(site, countdown), pytest.raises(kvg.DeviceError):
                stream.stream_out(source, 0, ends.out[0])
            assert source.kv.save(0) == before
            with pytest.raises(kvg.TransportError):
                stream.stream_in(target, 1, ends.into)
            assert target.kv.n_used == 0
        for countdown in (1, 2):
            ends = connect(2, kind="device")
            sent = beside(lambda ends=ends: stream.stream_out(source, 0, ends.out[0]))  # type: ignore[misc]
            with fault(site, countdown), pytest.raises(kvg.DeviceError):
                stream.stream_in(target, 1, ends.into)
            sent.result(20)
            assert source.kv.save(0) == before
            with pytest.raises(kvg.DeviceError, match="clear"):
                target.kv.save(1)
            target.kv.clear()
        travel(source, 0, target, 1, connect(2, kind="device"))
        assert target.kv.save(1) == before
