"""What holds for every transport: the same tests for each."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from support.ends import KINDS, meanwhile, pair

from pykvgraph.errors import InvalidArgumentError, TransportError
from pykvgraph.stream import Transport

Pair = tuple[Transport, Transport]
Open = Callable[..., AbstractContextManager[Pair]]


@pytest.fixture(params=KINDS)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return partial(pair, request.param, tmp_path)


@pytest.fixture
def ends(opened: Open) -> Iterator[Pair]:
    with opened(timeout=10) as both:
        yield both


def fetched(end: Transport, key: str, n_bytes: int) -> bytes:
    into = bytearray(n_bytes)
    end.fetch(key, into)
    return bytes(into)


def test_both_ways(ends: Pair) -> None:
    one, other = ends
    one.flush("there", b"there")
    other.flush("back", b"and back")
    assert fetched(other, "there", 5) == b"there"
    assert fetched(one, "back", 8) == b"and back"
    assert (one.flushes, one.bytes_sent, other.flushes, other.bytes_sent) == (1, 5, 1, 8)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "file"])
def test_each_way_has_its_own_keys(tmp_path: Path, kind: str) -> None:
    with pair(kind, tmp_path, timeout=10) as (one, other):
        one.flush("k", b"there")
        other.flush("k", b"and back")
        assert fetched(one, "k", 8) == b"and back"
        assert fetched(other, "k", 5) == b"there"


def test_regions_of_any_size_in_any_order(ends: Pair) -> None:
    """Those of one key in their own order."""
    one, other = ends
    rng = random.Random(0)
    sizes = [0, 1, 2**16 - 1, 2**20, 2**20 + 1, 3 * 2**20 + 7, *(rng.randrange(5000) for _ in range(30))]
    regions = [(f"layer{rng.randrange(8)}/k", rng.randbytes(n_bytes)) for n_bytes in sizes]
    rng.shuffle(regions)
    wanted = [(key, [each for name, each in regions if name == key]) for key in {key for key, _ in regions}]
    rng.shuffle(wanted)

    def send() -> None:
        for key, region in regions:
            one.flush(key, region)

    with meanwhile(send):
        for key, in_order in wanted:
            for region in in_order:
                assert fetched(other, key, len(region)) == region
    assert (one.flushes, one.bytes_sent) == (len(regions), sum(sizes))


def test_several_at_once(ends: Pair) -> None:
    """In their order, and each one whole, whatever their sizes."""
    one, other = ends
    rng = random.Random(1)
    sizes = [0, 5, 600_000, 0, 7, *(rng.randrange(100) for _ in range(1500)), 2**20]
    regions = [(f"k{i % 3}", rng.randbytes(n_bytes)) for i, n_bytes in enumerate(sizes)]
    with meanwhile(lambda: one.flush_all(regions)):
        for key, region in regions:
            assert fetched(other, key, len(region)) == region
    one.flush_all([])
    assert (one.flushes, one.bytes_sent) == (len(regions), sum(sizes))
    with pytest.raises(InvalidArgumentError, match="key"):
        one.flush_all([("good", b"1"), ("not good", b"2")])
    one.flush("k", b"first")
    assert fetched(other, "k", 5) == b"first"


def test_a_fetch_that_waits(ends: Pair) -> None:
    one, other = ends
    region = random.Random(0).randbytes(2**20)

    def wait() -> None:
        assert fetched(other, "x", 2**20) == region

    with meanwhile(wait):
        time.sleep(0.05)
        one.flush("another", b"")
        one.flush("x", region)
    assert fetched(other, "another", 0) == b""


def test_arrays_of_any_type(ends: Pair) -> None:
    one, other = ends
    rows = np.arange(24, dtype=np.float16).reshape(2, 3, 4)
    one.flush("rows", rows)
    into = np.zeros((4, 6), np.float16)
    other.fetch("rows", into)
    assert (into == rows.reshape(4, 6)).all()
    one.flush("none", np.empty((0, 4), np.float32))
    other.fetch("none", np.empty((3, 0), np.uint8))
    assert (one.flushes, one.bytes_sent) == (2, 48)


def test_the_bytes_may_change_after_flush(ends: Pair) -> None:
    one, other = ends
    rows = bytearray(b"before")
    one.flush("k", rows)
    rows[:] = b"after!"
    assert fetched(other, "k", 6) == b"before"


@pytest.mark.parametrize("key", ["", "a b", "é", "x" * 121, "a\0", "..\\x", "a\n", 7])
def test_keys_that_are_refused(ends: Pair, key: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^key must be 1 to 120 letters"):
        ends[0].flush(key, b"")
    with pytest.raises(InvalidArgumentError, match=r"^key must be 1 to 120 letters"):
        ends[0].fetch(key, bytearray())
    ends[0].flush("right", b"still open")


def test_odd_keys(ends: Pair) -> None:
    keys = ["..", ".", "/", "../../etc", "a/b", "a:b", "A/B", "a=b", "x" * 120]
    for key in keys:
        ends[0].flush(key, key.encode())
    for key in reversed(keys):
        assert fetched(ends[1], key, len(key)) == key.encode()


def test_buffers_that_are_refused(ends: Pair) -> None:
    one, _ = ends
    with pytest.raises(InvalidArgumentError, match=r"^data must be contiguous: copy"):
        one.flush("k", np.zeros((4, 4))[:, 1])
    with pytest.raises(InvalidArgumentError, match=r"^data must be a buffer of bytes, got 'text'$"):
        one.flush("k", "text")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"^into must be contiguous"):
        one.fetch("k", np.zeros((4, 4))[:, 1])
    with pytest.raises(InvalidArgumentError, match=r"^into must be writable"):
        one.fetch("k", b"only read")
    assert one.flushes == 0


def test_another_size_in_the_queue(ends: Pair) -> None:
    one, other = ends
    one.flush("k", b"12345")
    one.flush("later", b"")
    other.fetch("later", bytearray())
    with pytest.raises(TransportError, match="region 'k' has 5 bytes, and 4 were asked for; both ends"):
        other.fetch("k", bytearray(4))


@pytest.mark.parametrize("is_waiting", [False, True])
def test_another_size(opened: Open, is_waiting: bool) -> None:
    """The end that asked is closed; the other one hears of it."""
    with opened(timeout=10) as (one, other):

        def ask() -> None:
            with pytest.raises(
                TransportError, match="region 'k' has 5 bytes, and 6 were asked for; both ends"
            ):
                fetched(other, "k", 6)

        if is_waiting:
            with meanwhile(ask):
                time.sleep(0.02)
                one.flush("k", b"12345")
        else:
            one.flush("k", b"12345")
            ask()
        with pytest.raises(TransportError, match=r"nothing travels any more: region 'k' has 5 bytes"):
            other.flush("k", b"")


def test_nothing_comes(opened: Open) -> None:
    with opened(timeout=0.1) as (one, other):
        other.flush("another", b"")
        start = time.monotonic()
        with pytest.raises(TransportError, match=r"region 'k' has not come for 0\.1 s; see what"):
            one.fetch("k", bytearray(3))
        assert 0.09 < time.monotonic() - start < 5
        with pytest.raises(ConnectionError):
            one.flush("k", b"")


def test_closed_here(opened: Open) -> None:
    """Also while a thread waits: it hears of it at once."""
    with opened(timeout=30) as (one, _):

        def wait() -> None:
            with pytest.raises(TransportError, match="it was closed here"):
                one.fetch("k", bytearray(3))

        start = time.monotonic()
        with meanwhile(wait):
            time.sleep(0.05)
            one.close()
        assert time.monotonic() - start < 10
        with pytest.raises(
            TransportError, match="nothing travels any more: it was closed here; open it anew"
        ):
            one.flush("k", b"")
        one.close()


def test_the_message_names_the_address(ends: Pair) -> None:
    one, _ = ends
    one.close()
    with pytest.raises(TransportError) as caught:
        one.flush("k", b"")
    assert str(caught.value).startswith(f"{one.address}: ")
