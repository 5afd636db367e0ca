"""The ways to other engines: those that nobody uses any more are closed."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pykvgraph.errors import TransportError
from pykvgraph.prefix import block
from pykvgraph.stream.transports.connection import SocketTransport
from pykvgraph.stream.transports.listener import Listener
from pykvgraph.tiers import peer as peer_module
from pykvgraph.tiers import peer_receiver as taker_module
from pykvgraph.tiers import peers as peers_module
from pykvgraph.tiers.peer import Peer
from pykvgraph.tiers.peer_receiver import PeerReceiver
from pykvgraph.tiers.peers import Peers
from pykvgraph.tiers.record import Name, Record, pack


def n_threads() -> int:
    return sum(thread.name == "pykvgraph peer" for thread in threading.enumerate())


def test_peers_that_get_nothing_any_more_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has ended has another address in its next life."""
    before, peers = n_threads(), Peers("token")
    first = peers.at(f"unix:{tmp_path}/0")
    for i in range(1, 10):
        peers.at(f"unix:{tmp_path}/{i}")
    assert n_threads() == before + 10
    monkeypatch.setattr(peers_module, "_IDLE_SECONDS", 0.2)
    time.sleep(0.25)
    assert peers.at(f"unix:{tmp_path}/0") is first
    peers.at(f"unix:{tmp_path}/new")
    end = time.monotonic() + 10
    while n_threads() > before + 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert n_threads() == before + 2
    assert peers.at(f"unix:{tmp_path}/0") is first
    peers.close()


class Wire:
    """Counts the records that it takes; a broken one takes nothing."""

    def __init__(self) -> None:
        self.n_records = 0
        self.breaks = False

    def flush(self, key: str, data: Any) -> None:
        if self.breaks:
            raise TransportError("broken")
        self.n_records += key == "rows"

    def fetch(self, key: str, into: Any) -> None: ...

    def close(self) -> None: ...


def save(peer: Peer, number: int) -> None:
    record = Record(b"front", bytes(95))
    peer.save(Name(b"", b"", bytes([number] * 4), 0), record.n_bytes, lambda: record)


def test_what_was_sent_a_moment_ago_is_sent_again_only_over_a_new_transport() -> None:
    wire = Wire()
    peer = Peer(lambda: wire)  # type: ignore[arg-type, return-value]
    for _ in range(3):
        save(peer, 1)
        assert peer.flush(10)
    assert wire.n_records == 1
    wire.breaks = True
    save(peer, 2)
    assert not peer.flush(10)
    wire.breaks = False
    save(peer, 1)
    save(peer, 2)
    assert peer.flush(10)
    assert wire.n_records == 3
    peer.close()


def test_room_for_what_waits_is_bounded_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "MOST_BYTES", 250)
    wire, goes_on = Wire(), threading.Event()

    def connect() -> Any:
        goes_on.wait(10)
        return wire

    peer = Peer(connect)
    save(peer, 0)  # it is about to be sent, and waits no more
    end = time.monotonic() + 10
    while peer._queue and time.monotonic() < end:
        time.sleep(0.01)
    for number in range(1, 6):
        save(peer, number)
    assert peer.n_left_out == 3
    goes_on.set()
    assert peer.flush(10)
    for number in (3, 4):
        save(peer, number)
        assert peer.flush(10)
    assert wire.n_records == 5
    peer.close()


def test_a_record_that_comes_after_a_long_pause_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause is longer than transports wait by themselves, and shorter than the receiver does."""
    connection = SocketTransport.__init__

    def hasty(self: SocketTransport, connected: Any, address: str, timeout: float, queue_bytes: int) -> None:
        connection(self, connected, address, timeout / 100, queue_bytes)

    monkeypatch.setattr(SocketTransport, "__init__", hasty)  # 30 seconds are 0.3
    taken: list[Record] = []
    receiver, peers = PeerReceiver(f"unix:{tmp_path}/copies", "token", 1000, taken.append), Peers("token")
    peer = peers.at(receiver.address)
    for number in range(2):
        tokens = bytes([number] * 4)
        name = Name(block.TOKENS, bytes(32), tokens, 0)
        record = pack(name, b"rows")
        peer.save(name, record.n_bytes, lambda record=record: record)  # type: ignore[misc]
        assert peer.flush(10)
        time.sleep(0.6)
    assert len(taken) == 2
    peers.close()
    receiver.close()


def test_a_taker_that_has_no_file_for_a_connection_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It doesn't ask again and again, and takes the next one when there are files again."""
    n_asked, is_short = 0, True
    accept = Listener.accept

    def short(self: Listener) -> SocketTransport:
        nonlocal n_asked
        n_asked += 1
        if is_short:
            raise TransportError("a connection can't be taken")
        return accept(self)

    monkeypatch.setattr(Listener, "accept", short)
    monkeypatch.setattr(taker_module, "_PAUSE", 0.05)
    taken: list[Record] = []
    receiver, peers = PeerReceiver(f"unix:{tmp_path}/copies", "token", 1000, taken.append), Peers("token")
    time.sleep(0.5)
    assert 1 < n_asked < 20
    is_short = False
    record = pack(Name(block.TOKENS, bytes(32), bytes(4), 0), b"rows")
    peer = peers.at(receiver.address)
    peer.save(Name(block.TOKENS, bytes(32), bytes(4), 0), record.n_bytes, lambda: record)
    assert peer.flush(10) and len(taken) == 1
    peers.close()
    receiver.close()


def test_a_thread_that_sends_outlives_any_error() -> None:
    """It had no file for a connection, say; later it has."""
    wire, errors = Wire(), [OSError(24, "Too many open files"), MemoryError()]

    def connect() -> Any:
        if errors:
            raise errors.pop()
        return wire

    peer = Peer(connect)
    for number in range(3):
        save(peer, number)
        peer.flush(10)
    assert not errors and peer.n_left_out >= 1
    save(peer, 3)
    assert peer.flush(10) and wire.n_records >= 1
    peer.close()
