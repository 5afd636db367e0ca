"""Two ends in one process; and addresses that are none."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.ends import meanwhile, pair

from pykvgraph import stream
from pykvgraph.errors import InvalidArgumentError, TransportError


def test_what_was_flushed_outlives_its_sender(tmp_path: Path) -> None:
    with pair("memory", tmp_path) as (one, other):
        one.flush("k", b"last")
        one.close()
        into = bytearray(4)
        other.fetch("k", into)
        assert into == b"last"
        with pytest.raises(TransportError, match="the other end is closed, and region 'k' has not come"):
            other.fetch("k", into)


def test_the_other_end_closes_while_one_waits(tmp_path: Path) -> None:
    with pair("memory", tmp_path, timeout=30, queue_bytes=0) as (one, other):

        def flush() -> None:
            with pytest.raises(TransportError, match="the other end is closed; open both anew"):
                one.flush("k", b"123")

        start = time.monotonic()
        with meanwhile(flush):
            time.sleep(0.05)
            other.close()
        assert time.monotonic() - start < 10


def test_a_full_queue_makes_the_sender_wait(tmp_path: Path) -> None:
    with pair("memory", tmp_path, timeout=0.2, queue_bytes=10_000) as (one, other):
        one.flush("a", bytes(5000))
        with meanwhile(lambda: one.flush("b", bytes(5000))):
            time.sleep(0.05)
            assert one.flushes == 1
            other.fetch("a", bytearray(5000))
        assert one.flushes == 2
        with pytest.raises(TransportError, match=r"nobody has fetched region 'c' for 0\.2 s"):
            one.flush("c", bytes(5000))


def test_many_small_regions_fill_the_queue(tmp_path: Path) -> None:
    with (
        pair("memory", tmp_path, timeout=0.01, queue_bytes=100_000) as (one, _),
        pytest.raises(TransportError),
    ):
        for _ in range(1000):
            one.flush("k", b"")


def test_a_region_larger_than_the_queue_needs_a_fetch_that_waits(tmp_path: Path) -> None:
    with pair("memory", tmp_path, timeout=10, queue_bytes=0) as (one, other):
        into = bytearray(1000)
        with meanwhile(lambda: other.fetch("k", into)):
            one.flush("k", b"r" * 1000)
        assert into == b"r" * 1000


def test_a_name_is_free_again(tmp_path: Path) -> None:
    address = f"memory:{tmp_path}"
    stream.open(address).close()
    for _ in range(2):
        with stream.open(address) as one, stream.open(address) as other:
            one.flush("k", b"1")
            other.fetch("k", bytearray(1))


@pytest.mark.parametrize("address", ["", "memory", "memory:", "tcp", "http://here", "memory:a\0b", 7, None])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^address must be "):
        stream.open(address)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, None])
def test_timeouts_that_are_refused(timeout: float) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^timeout must be "):
        stream.open("memory:x", timeout=timeout)
