"""Sockets: peers that die, stall, or send more than there is room for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.ends import meanwhile, met, pair

from pykvgraph import stream
from pykvgraph.errors import TransportError
from pykvgraph.stream import Transport

MANY = 64 << 20  # bytes; more than a socket's buffers hold

sockets = pytest.mark.parametrize("kind", ["unix", "tcp"])


@sockets
@pytest.mark.parametrize("waiting", ["flush", "fetch"])
def test_the_other_end_closes_while_one_waits(tmp_path: Path, kind: str, waiting: str) -> None:
    with pair(kind, tmp_path, timeout=30) as (one, other):

        def wait() -> None:
            with pytest.raises(TransportError, match="the other end is closed"):
                one.flush("k", bytes(MANY)) if waiting == "flush" else one.fetch("k", bytearray(3))

        start = time.monotonic()
        with meanwhile(wait):
            time.sleep(0.1)
            other.close()
        assert time.monotonic() - start < 10


@sockets
def test_the_other_end_takes_nothing(tmp_path: Path, kind: str) -> None:
    with pair(kind, tmp_path, timeout=0.2) as (one, other):
        start = time.monotonic()
        with pytest.raises(TransportError, match=r"the other end has taken nothing for 0\.2 s"):
            one.flush("k", bytes(MANY))
        assert time.monotonic() - start < 5
        assert (one.flushes, one.bytes_sent) == (0, 0)
        with pytest.raises(TransportError, match="the other end is closed, and region 'k' came in part only"):
            other.fetch("k", bytearray(MANY))


@sockets
def test_the_other_end_stops_in_the_middle(tmp_path: Path, kind: str) -> None:
    """As a machine does that hangs; and one that sends a byte now and then is no better."""
    with pair(kind, tmp_path, timeout=0.3) as (one, other):

        def trickle() -> None:
            try:
                for byte in b"kvgs\1" + bytes(75):
                    one._socket.send(bytes([byte]))  # type: ignore[attr-defined]
                    time.sleep(0.05)
            except OSError:
                pass

        start = time.monotonic()
        with meanwhile(trickle):
            with pytest.raises(TransportError, match=r"region 'k' has not come for 0\.3 s"):
                other.fetch("k", bytearray(3))
            assert time.monotonic() - start < 2


@sockets
def test_what_was_flushed_outlives_its_sender(tmp_path: Path, kind: str) -> None:
    with pair(kind, tmp_path, timeout=10) as (one, other):
        one.flush("k", b"last")
        one.close()
        into = bytearray(4)
        other.fetch("k", into)
        assert into == b"last"
        with pytest.raises(TransportError, match="the other end is closed, and region 'k' has not come"):
            other.fetch("k", into)


@sockets
def test_what_waits_is_bounded(tmp_path: Path, kind: str) -> None:
    with pair(kind, tmp_path, timeout=10, queue_bytes=10_000) as (one, other):
        for key in ("a", "b", "c"):
            one.flush(key, bytes(4000))
        with pytest.raises(TransportError, match=r"region 'c' came before 'd'; 9024 of 10000 bytes are"):
            other.fetch("d", bytearray(1))


@sockets
def test_a_region_larger_than_the_queue(tmp_path: Path, kind: str) -> None:
    with pair(kind, tmp_path, timeout=10, queue_bytes=0) as (one, other):
        into = bytearray(3 << 20)
        with meanwhile(lambda: one.flush("k", b"r" * len(into))):
            other.fetch("k", into)
        assert into == b"r" * len(into)


def test_both_ends_send_at_the_same_time(tmp_path: Path) -> None:
    """As prefill and decode do: acknowledgements one way, rows the other."""
    rows = bytes(100_000)

    def send(end: Transport) -> None:
        for i in range(100):
            end.flush(f"k{i}", rows)

    def take(end: Transport) -> None:
        for i in range(100):
            end.fetch(f"k{i}", bytearray(rows))

    with pair("unix", tmp_path, timeout=10) as (one, other):
        with meanwhile(lambda: send(one)), meanwhile(lambda: send(other)), meanwhile(lambda: take(one)):
            take(other)
        assert one.flushes == other.flushes == 100


def test_one_connection_dies_and_the_others_stay() -> None:
    with stream.listen("tcp:0", timeout=10) as listener:
        pairs = [met(listener, timeout=10) for _ in range(3)]
    pairs[1][0]._socket.send(b"nonsense" * 100)  # type: ignore[attr-defined]
    with pytest.raises(TransportError, match="what came is no frame; see what the other end is"):
        pairs[1][1].fetch("k", bytearray(1))
    for one, other in (pairs[0], pairs[2]):
        one.flush("k", b"1")
        other.fetch("k", bytearray(1))
    for ends in pairs:
        for end in ends:
            end.close()
