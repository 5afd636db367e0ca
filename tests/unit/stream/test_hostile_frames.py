"""What strangers and broken peers send: an error that says so, in bounded memory, and no harm to others.

10,000 damaged exchanges over a socket and 1,000 damaged files; a tenth of them by default.
"""

from __future__ import annotations

import hmac
import random
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash
from support import chance
from support.damage import damage
from support.ends import meanwhile, met

from pykvgraph import stream
from pykvgraph.errors import TransportError
from pykvgraph.stream.transports.connection import SocketTransport
from pykvgraph.stream.transports.frame import HEADER_BYTES, frames

N_MUTANTS = 10_000 // chance.SHARE
QUEUE_BYTES = 100_000
MEMORY = 1 << 20  # bytes that an end may take beside its queue
NUMBERS = (0, 1, 2**19, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
REGIONS = [("b", b"second" * 100), ("none", b""), ("a", bytes(range(256)))]
FETCHED = ["a", "b", "none"]  # in this order, so that others wait in the queue


def bytes_of(regions: list[tuple[str, bytes]]) -> list[bytearray]:
    """The frames, header and part together."""
    return [
        bytearray(header) + part
        for key, region in regions
        for header, part in frames(key, memoryview(region))
    ]


def with_right_checksum(frame: bytearray) -> bytearray:
    fields, part = frame[: HEADER_BYTES - 16], frame[HEADER_BYTES:]
    return fields + xxhash.xxh3_128_digest(fields + part) + part


def mutant(rng: random.Random) -> tuple[bytes, bool]:
    """A damaged exchange; whether its checksums were made right again, as an enemy would."""
    sent = bytes_of(REGIONS)
    is_forged = rng.random() < 0.5
    for _ in range(rng.randint(1, 3)):
        i = rng.choice([i for i, frame in enumerate(sent) if frame])
        sent[i] = changed(sent[i], rng)
        if is_forged and len(sent[i]) >= HEADER_BYTES:
            sent[i] = with_right_checksum(sent[i])
    if rng.random() < 0.2:
        rng.shuffle(sent)
    if rng.random() < 0.1:
        sent.insert(rng.randrange(len(sent)), rng.choice(sent))
    return b"".join(sent), is_forged


def changed(frame: bytearray, rng: random.Random) -> bytearray:
    if rng.random() < 0.2:  # a size, or where the part begins
        where = rng.choice((8, 16))
        return frame[:where] + struct.pack("<Q", rng.choice(NUMBERS)) + frame[where + 8 :]
    return bytearray(damage(rng, bytes(frame), HEADER_BYTES))


def fetch_all(end: stream.Transport) -> dict[str, bytes]:
    """What was fetched until it failed; nothing but TransportError may come, and then the end is closed."""
    found = {}
    try:
        for key in FETCHED:
            into = bytearray(len(dict(REGIONS)[key]))
            end.fetch(key, into)
            found[key] = bytes(into)
    except TransportError as error:
        assert str(error).startswith(f"{end.address}: ")
        with pytest.raises(TransportError, match="nothing travels any more"):
            end.flush("k", b"")
    return found


@contextmanager
def bounded_memory(n_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield
        _, most = tracemalloc.get_traced_memory()
        assert most - before < n_bytes
    finally:
        tracemalloc.stop()


def received(sent: bytes) -> dict[str, bytes]:
    """By an end whose peer sends this and closes."""
    ours, theirs = socket.socketpair()
    with theirs, SocketTransport(ours, "unix:x", 20, QUEUE_BYTES) as end:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        return fetch_all(end)


def test_what_is_not_damaged() -> None:
    """So that the tests below are about damage."""
    assert received(b"".join(bytes_of(REGIONS))) == dict(REGIONS)


def test_mutants_on_a_socket() -> None:
    """Each region is right or it is an error; a forger may choose its bytes, and nothing else."""
    rng, n_failed = random.Random(chance.seed(0)), 0
    with bounded_memory(QUEUE_BYTES + MEMORY):
        for _ in range(N_MUTANTS):
            sent, is_forged = mutant(rng)
            found = received(sent)
            n_failed += len(found) < len(REGIONS)
            for key, region in found.items():
                assert region == dict(REGIONS)[key] or (is_forged and region in sent), key
    assert n_failed > N_MUTANTS / 2


def test_mutants_in_files(tmp_path: Path) -> None:
    """As on a socket; what a file ends in the middle of doesn't come."""
    rng, n_failed = random.Random(chance.seed(1)), 0
    path = tmp_path / "00000000-00000000.regions"
    regions = [(key, region) for key, region in REGIONS if key != "none"]
    with bounded_memory(QUEUE_BYTES + MEMORY):
        for _ in range(N_MUTANTS // 10):
            sent = [b"\0" + frame for frame in bytes_of(regions)]
            is_forged = rng.random() < 0.5
            i = rng.randrange(len(sent))
            bad = changed(bytearray(sent[i][1:]), rng)
            is_right = is_forged and len(bad) >= HEADER_BYTES
            sent[i] = bytes([rng.choice((0, 0, 0, 255, 2))]) + (with_right_checksum(bad) if is_right else bad)
            path.write_bytes(b"".join(sent))
            found = {}
            for key, region in regions:
                into = bytearray(len(region))
                try:
                    with stream.open(f"file:{tmp_path}", timeout=0.001) as end:
                        end.fetch(key, into)
                except TransportError as error:
                    assert str(error).startswith(f"file:{tmp_path}: ")
                    continue
                found[key] = bytes(into)
                assert into == region or (is_forged and into in b"".join(sent)), key
            n_failed += len(found) < len(regions)
    assert n_failed > N_MUTANTS // 10 / 2


@pytest.mark.parametrize("n_bytes", [QUEUE_BYTES, 2**40, 2**64 - 1])
def test_oversize_in_a_file(tmp_path: Path, n_bytes: int) -> None:
    (frame,) = bytes_of([("a", b"")])
    frame[8:16] = struct.pack("<Q", n_bytes)
    (tmp_path / "00000000-00000000.regions").write_bytes(b"\0" + with_right_checksum(frame) + bytes(1000))
    with (
        bounded_memory(MEMORY),
        stream.open(f"file:{tmp_path}", timeout=0.1) as end,
        pytest.raises(TransportError, match="ends in the middle of a region"),
    ):
        end.fetch("a", bytearray(256))


def test_cut_at_every_byte() -> None:
    whole = b"".join(bytes_of(REGIONS))
    ends = [sum(map(len, bytes_of(REGIONS)[: i + 1])) for i in range(3)]
    for n_bytes in range(len(whole)):
        found = received(whole[:n_bytes])
        assert len(found) <= sum(n_bytes >= end for end in ends)
        assert "a" not in found


@pytest.mark.parametrize("key", ["a", "another"])
@pytest.mark.parametrize("n_bytes", [QUEUE_BYTES + 1, 2**40, 2**64 - 1])
def test_oversize(key: str, n_bytes: int) -> None:
    """The size is refused before anything is allocated by it."""
    (frame,) = bytes_of([(key, b"")])
    frame[8:16] = struct.pack("<Q", n_bytes)
    with bounded_memory(MEMORY):
        assert received(bytes(with_right_checksum(frame)) + bytes(1000)) == {}


def test_a_flood_of_regions_that_nobody_wants() -> None:
    """It fills the queue, and no more; also with regions that have no bytes."""
    for region in (b"", bytes(1000)):
        ours, theirs = socket.socketpair()
        (frame,) = bytes_of([("flood", region)])
        with (
            theirs,
            SocketTransport(ours, "unix:x", 20, QUEUE_BYTES) as end,
            bounded_memory(QUEUE_BYTES + MEMORY),
        ):

            def flood(peer: socket.socket = theirs, frame: bytes = bytes(frame)) -> None:
                with pytest.raises(OSError):  # it is closed in the end
                    while True:
                        peer.sendall(frame * 100)

            with (
                meanwhile(flood),
                pytest.raises(TransportError, match=f"of {QUEUE_BYTES} bytes are taken by others"),
            ):
                end.fetch("a", bytearray(256))


def answer(challenge: bytes, token: bytes = b"secret") -> bytes:
    own = bytes(32)
    return challenge[:8] + own + hmac.digest(token, b"kvgs 1 connector" + challenge[8:] + own, "sha256")


def test_hellos_that_are_damaged(tmp_path: Path) -> None:
    """Cut at every byte, or any byte changed: refused. Who came before and who comes after is unharmed."""
    rng, path = random.Random(chance.seed(2)), tmp_path / "s"
    with stream.listen(f"unix:{path}", "secret", timeout=20) as listener:
        one, other = met(listener, token="secret", timeout=20)
        accepted: list[stream.Transport] = []

        def harm() -> None:
            for i in range(2 * 72):
                with socket.socket(socket.AF_UNIX) as enemy:
                    enemy.settimeout(20)
                    enemy.connect(str(path))
                    right = answer(enemy.recv(40, socket.MSG_WAITALL))
                    at = i % 72
                    if i < 72:
                        enemy.sendall(right[:i])
                        enemy.shutdown(socket.SHUT_WR)
                    else:
                        enemy.sendall(
                            right[:at] + bytes([right[at] ^ 1 << rng.randrange(8)]) + right[at + 1 :]
                        )
                    assert enemy.recv(1) == b"", i
            accepted.append(stream.open(f"unix:{path}", "secret", timeout=20))

        with meanwhile(harm):
            accepted.append(listener.accept())
        for here, there in ((one, other), tuple(accepted)):
            with here, there:
                here.flush("k", b"unharmed")
                into = bytearray(8)
                there.fetch("k", into)
                assert into == b"unharmed"


def test_one_that_is_let_in_and_turns_bad(tmp_path: Path) -> None:
    """It knows the token, and then sends what it likes: its own connection ends, the others go on."""
    rng, path = random.Random(chance.seed(3)), tmp_path / "s"
    with stream.listen(f"unix:{path}", "secret", timeout=20) as listener:
        one, other = met(listener, token="secret", timeout=20)
        with one, other:
            for _ in range(N_MUTANTS // 100):
                bad, end = met(listener, token="secret", timeout=20)
                with bad, end:
                    bad._socket.sendall(rng.randbytes(300))  # type: ignore[attr-defined]
                    assert fetch_all(end) == {}
                one.flush("k", b"unharmed")
                other.fetch("k", bytearray(8))
