"""Records in a directory: what is there after kills, full disks, other processes and other people's files."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support import chance

from pykvgraph.prefix import block
from pykvgraph.tiers.disk import DiskTier
from pykvgraph.tiers.record import MissError, Name, Record, pack


def name_of(number: int, kind: bytes = block.TOKENS) -> Name:
    return Name(kind, bytes(32), number.to_bytes(4, "little") * (32 if kind == block.TOKENS else 5), 0)


def record_of(number: int, n_bytes: int = 1000, kind: bytes = block.TOKENS) -> Record:
    """The same for the same number: its rows are told by it."""
    rows = hashlib.shake_128(number.to_bytes(4, "little")).digest(n_bytes)
    return pack(name_of(number, kind), rows)


def put(disk: DiskTier, number: int, n_bytes: int = 1000, kind: bytes = block.TOKENS) -> bool:
    return disk.put(name_of(number, kind).key, record_of(number, n_bytes, kind))


def read(disk: DiskTier, number: int, kind: bytes = block.TOKENS) -> tuple[bytes, bytes]:
    record = disk.read(name_of(number, kind).key)
    return record.header, bytes(record.rows)


def sizes_in(folder: Path) -> int:
    """Bytes of what is ours, half-written files too; not the lock's."""
    return sum(each.stat().st_size for each in folder.iterdir() if each.suffix in (".block", ".end", ".tmp"))


SIZE = record_of(0).n_bytes


def test_another_process_reads_what_one_wrote(tmp_path: Path) -> None:
    one = DiskTier(tmp_path, 10 * SIZE)
    assert put(one, 1)
    assert put(one, 2, kind=block.END)
    two = DiskTier(tmp_path, 10 * SIZE)
    for disk in (one, two):
        assert read(disk, 1) == tuple(record_of(1))
        assert disk.ends(bytes(32)) == [name_of(2, block.END).tokens]
        assert disk.n_bytes == sizes_in(tmp_path)
    names = {each.name for each in tmp_path.iterdir()} - {"pykvgraph.lock"}
    assert names == {f"{name_of(1).key.hex()}.block", f"{name_of(2, block.END).key.hex()}.end"}
    put(one, 3)
    assert name_of(3).key not in two
    two.refresh()
    assert read(two, 3) == tuple(record_of(3))


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, 3 * SIZE)
    for number in (1, 2, 3):
        put(disk, number)
    read(disk, 1)
    put(disk, 4)
    assert [name_of(number).key in disk for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert not put(disk, 5, 3 * SIZE)
    smaller = DiskTier(tmp_path, SIZE)
    assert len(smaller) == 1
    # files that are written within a tick of the clock are equally old
    gone = next(number for number in (1, 3, 4) if name_of(number).key not in smaller)
    with pytest.raises(MissError) as miss:
        read(disk, gone)
    assert miss.value.reason == "gone"


def test_bytes_are_never_above_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two views of a directory, at every step, also while a file is written, and after failures."""
    rng, limit = random.Random(1), 20 * SIZE
    disks = [DiskTier(tmp_path, limit), DiskTier(tmp_path, limit)]
    most, write, fsync = 0, os.write, os.fsync

    def watched(file: int, data: Any) -> int:
        nonlocal most
        most = max(most, sizes_in(tmp_path))
        if rng.random() < 0.05:
            raise OSError(errno.ENOSPC, "full")
        return write(file, data[: rng.randrange(1, len(data) + 1)])

    def synced(file: int) -> None:
        if rng.random() < 0.05:
            raise OSError(errno.EIO, "broken")
        fsync(file)

    monkeypatch.setattr(os, "write", watched)
    monkeypatch.setattr(os, "fsync", synced)
    n_failed = 0
    for _ in range(400):
        disk, number = rng.choice(disks), rng.randrange(60)
        try:
            what = rng.random()
            if what < 0.7:
                put(disk, number, rng.choice((10, 1000, 4000)))
            elif what < 0.8:
                disk.remove(name_of(number).key)
            elif what < 0.85:
                disks[disks.index(disk)] = DiskTier(tmp_path, limit)
            else:
                read(disk, number)
        except OSError:
            n_failed += 1
        except MissError as miss:
            assert miss.reason == "gone"
        most = max(most, sizes_in(tmp_path))
        assert not list(tmp_path.glob("*.tmp"))
    assert n_failed > 20
    assert limit // 2 < most <= limit
    for disk in disks:
        disk.refresh()
        assert disk.n_bytes == sizes_in(tmp_path)


@pytest.mark.parametrize("call", ["open", "write", "pwrite", "fsync", "rename", "ftruncate"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_failure_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    disk = DiskTier(tmp_path, 10 * SIZE)
    put(disk, 1)
    real, n_open = getattr(os, call), len(os.listdir("/proc/self/fd"))

    def fails(*args: Any, **options: Any) -> Any:
        if call == "open" and not str(args[0]).endswith(".tmp"):
            return real(*args, **options)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fails)
        with pytest.raises(OSError, match=os.strerror(code)):
            put(disk, 2)
    assert name_of(2).key not in disk
    assert len(os.listdir("/proc/self/fd")) == n_open
    assert put(disk, 2)
    assert read(disk, 1) == tuple(record_of(1))
    assert disk.n_bytes == sizes_in(tmp_path) == 2 * SIZE


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    """And what only looks like ours is not followed, opened for ever, or counted."""
    hexed = [name_of(number).key.hex() for number in range(10)]
    foreign = ["notes.txt", f"{hexed[0]}.bak", "x.tmp", f"{hexed[1][:-1]}.block", f"{hexed[1].upper()}.block"]
    for name in foreign:
        (tmp_path / name).write_bytes(b"mine" * 1000)
    os.mkfifo(tmp_path / f"{hexed[2]}.block")
    os.mkfifo(tmp_path / f"{hexed[2]}.end")
    (tmp_path / f"{hexed[3]}.block").mkdir()
    (tmp_path / f"{hexed[4]}.block").symlink_to("/etc/passwd")
    before = sorted(each.name for each in tmp_path.iterdir())
    disk = DiskTier(tmp_path, 2 * SIZE)
    assert len(disk) == 0
    assert disk.n_bytes == 0
    for number in range(5, 9):
        put(disk, number)
    assert set(before) <= {each.name for each in tmp_path.iterdir()}
    assert all((tmp_path / name).read_bytes() == b"mine" * 1000 for name in foreign)


def test_what_a_dead_process_was_writing_goes(tmp_path: Path) -> None:
    """And what a living one writes, by its lock, stays and counts."""
    stale, live = (tmp_path / f"{name_of(number).key.hex()}.{'0' * 16}.tmp" for number in (1, 2))
    stale.write_bytes(bytes(500))
    live.write_bytes(bytes(700))
    with live.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        disk = DiskTier(tmp_path, 10 * SIZE)
        assert not stale.exists()
        assert live.exists()
        assert disk.n_bytes == 700
    disk = DiskTier(tmp_path, 10 * SIZE)
    assert not live.exists()
    assert disk.n_bytes == 0


def test_a_lock_that_somebody_keeps_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pykvgraph.tiers.disk._LOCK_SECONDS", 0.05)
    disk = DiskTier(tmp_path, 10 * SIZE)
    put(disk, 1)
    with (tmp_path / "pykvgraph.lock").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="unavailable"):
            put(disk, 2)
        assert read(disk, 1) == tuple(record_of(1))  # reading needs no lock
    put(disk, 2)


@pytest.mark.parametrize("data", [b"", b"kvgtier\1", bytes(200), b"kvgtier\1" + bytes(300)])
def test_a_file_that_is_no_record(tmp_path: Path, data: bytes) -> None:
    for suffix in (".block", ".end"):
        (tmp_path / f"{name_of(1).key.hex()}{suffix}").write_bytes(data)
    disk = DiskTier(tmp_path, 10 * SIZE)
    assert disk.ends(bytes(32)) == []
    with pytest.raises(MissError) as miss:
        disk.read(name_of(1).key)
    assert miss.value.reason in ("foreign", "damaged")


def write_until_killed(folder: Path, seed: int, ready: int) -> None:
    """In a child process."""
    rng = random.Random(chance.seed(seed))
    disk = DiskTier(folder, 30 * SIZE)
    os.write(ready, b"!")
    while True:
        put(disk, rng.randrange(200), rng.choice((10, 1000, 2000)))


def kill_writers(folder: Path, n: int) -> None:
    """Each killed at a random moment; the next one, and this process, find the directory in order."""
    rng = random.Random(chance.seed(n))
    for each in range(n):
        begun, ready = os.pipe()
        if (writer := os.fork()) == 0:
            try:
                write_until_killed(folder, each, ready)
            finally:
                os._exit(1)
        assert os.read(begun, 1) == b"!"
        time.sleep(rng.random() * 0.02)
        os.kill(writer, signal.SIGKILL)
        assert os.waitpid(writer, 0)[1] == signal.SIGKILL
        os.close(begun)
        os.close(ready)
        disk = DiskTier(folder, 30 * SIZE)
        assert not list(folder.glob("*.tmp"))
        assert disk.n_bytes == sizes_in(folder) <= 30 * SIZE
        for number in range(200):
            if (size := disk.n_bytes_of(name_of(number).key)) > 0:
                assert read(disk, number) == tuple(record_of(number, size - SIZE + 1000))
    assert len(disk) > 5


def test_killed_writers(tmp_path: Path) -> None:
    kill_writers(tmp_path / "tier", 20)


@pytest.mark.slow
def test_many_killed_writers(tmp_path: Path) -> None:
    kill_writers(tmp_path / "tier", 500 // chance.SHARE)


def test_an_end_that_cannot_be_read_takes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of another user, perhaps: the others are found, and it goes when room is needed."""
    real, name = os.open, f"{name_of(1, block.END).key.hex()}.end"
    first = DiskTier(tmp_path, 2 * SIZE)
    put(first, 1, kind=block.END)
    put(first, 2)
    os.utime(tmp_path / name, (1, 1))

    def refuses(path: Any, flags: int, *mode: int) -> int:
        if Path(path).name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuses)
    disk = DiskTier(tmp_path, 2 * SIZE)
    assert disk.ends(bytes(32)) == []
    assert disk.n_bytes == sizes_in(tmp_path)
    assert read(disk, 2) == tuple(record_of(2))
    assert put(disk, 3)
    assert not (tmp_path / name).exists()


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(FileExistsError, match=r"no directory of prefixes .*name another.*loop"):
        DiskTier(tmp_path / "loop", SIZE)


def test_two_files_with_one_key(tmp_path: Path) -> None:
    """Somebody has copied one: every byte is counted, and goes when room is needed."""
    put(DiskTier(tmp_path, 4 * SIZE), 1, kind=block.END)
    name = name_of(1, block.END).key.hex()
    (tmp_path / f"{name}.block").write_bytes((tmp_path / f"{name}.end").read_bytes())
    disk = DiskTier(tmp_path, 4 * SIZE)
    assert disk.n_bytes == sizes_in(tmp_path)
    disk.remove(name_of(1, block.END).key)
    assert disk.n_bytes == sizes_in(tmp_path) == 0
