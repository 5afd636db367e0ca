"""Packed rows between two ends, without a library: what they say of their size is enough."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.ends import meanwhile, pair

from pykvgraph.errors import TransportError
from pykvgraph.kv_cache.saved.device_rows import PackedRows
from pykvgraph.stream.transports.device import DeviceTransport


class Rows(PackedRows):
    """So many bytes."""

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes


def test_what_is_fetched_is_what_was_flushed(tmp_path: Path) -> None:
    with pair("device", tmp_path, timeout=10) as (one, other):
        assert isinstance(one, DeviceTransport) and isinstance(other, DeviceTransport)
        rows = [Rows(5), Rows(5)]
        for each in rows:
            one.flush_rows("k", each)
        one.flush("other", b"bytes")
        assert [other.fetch_rows("k", 5) for _ in rows] == rows
        assert (one.flushes, one.bytes_sent) == (3, 15)


def test_a_fetch_that_waits_takes_more_than_the_queue(tmp_path: Path) -> None:
    with pair("device", tmp_path, timeout=10, queue_bytes=0) as (one, other):
        assert isinstance(one, DeviceTransport) and isinstance(other, DeviceTransport)
        with meanwhile(lambda: one.flush_rows("k", Rows(1000))):
            time.sleep(0.05)
            assert one.flushes == 0
            assert len(other.fetch_rows("k", 1000)) == 1000


def test_a_full_queue_and_an_end_that_is_closed(tmp_path: Path) -> None:
    with pair("device", tmp_path, timeout=0.1, queue_bytes=0) as (one, other):
        assert isinstance(one, DeviceTransport) and isinstance(other, DeviceTransport)
        with pytest.raises(TransportError, match=r"nobody has fetched region 'k' for 0\.1 s"):
            one.flush_rows("k", Rows(10))
        with pytest.raises(TransportError, match="the other end is closed, and region 'k' has not come"):
            other.fetch_rows("k", 10)


@pytest.mark.parametrize(
    ("n_bytes", "match"), [(4, "has 5 bytes, and 4 were asked for"), (5, "has bytes, no packed rows")]
)
def test_another_region_than_was_asked_for(tmp_path: Path, n_bytes: int, match: str) -> None:
    with pair("device", tmp_path, timeout=10) as (one, other):
        assert isinstance(other, DeviceTransport)
        one.flush("k", b"bytes")
        with pytest.raises(TransportError, match=match):
            other.fetch_rows("k", n_bytes)


def test_packed_rows_are_no_bytes(tmp_path: Path) -> None:
    with pair("device", tmp_path, timeout=10) as (one, other):
        assert isinstance(one, DeviceTransport)
        one.flush_rows("k", Rows(5))
        with pytest.raises(TransportError, match="has packed rows, no bytes"):
            other.fetch("k", bytearray(5))
