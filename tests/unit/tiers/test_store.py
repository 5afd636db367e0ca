"""Both tiers together: bytes never above what was given, and disks that fail."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from support import chance

import pykvgraph as kvg
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.prefix import block
from pykvgraph.tiers.record import MissError
from pykvgraph.tiers.store import Store
from unit.tiers.test_disk import SIZE, name_of, record_of, sizes_in


def save(store: Store, number: int, n_bytes: int = 1000, kind: bytes = block.TOKENS) -> None:
    record = record_of(number, n_bytes, kind)
    store.save(name_of(number, kind), record.n_bytes, lambda: record)


def load(store: Store, number: int) -> bytes:
    with store.load(name_of(number)) as record:
        return bytes(record.rows)


def test_memory_then_disk_then_memory(tmp_path: Path) -> None:
    store = Store(kvg.Tiers(3 * SIZE, 100 * SIZE, tmp_path))
    for number in range(10):
        save(store, number)
        assert store.flush(10)
    assert store.n_bytes == (3 * SIZE, 10 * SIZE)
    for number in range(10):
        assert load(store, number) == record_of(number).rows
    assert store.n_bytes == (3 * SIZE, 10 * SIZE)
    store.forget(name_of(9).key)
    assert not store.has(name_of(9).key)
    assert store.n_bytes == (2 * SIZE, 9 * SIZE)
    store.close(10)


def test_bytes_are_never_above_what_was_given(tmp_path: Path) -> None:
    """By four threads; what is in use stays, and counts."""
    ram, disk = 8 * SIZE, 20 * SIZE
    store = Store(kvg.Tiers(ram, disk, tmp_path))
    wrong: list[Any] = []

    def work(seed: int) -> None:
        rng = random.Random(chance.seed(seed))
        for _ in range(150):
            number = rng.randrange(40)
            try:
                if rng.random() < 0.5:
                    save(store, number, rng.choice((10, 1000, 4000)))
                elif rng.random() < 0.1:
                    store.forget(name_of(number).key)
                else:
                    with store.load(name_of(number)) as record:
                        if bytes(record.rows) != record_of(number, len(record.rows)).rows:
                            wrong.append(number)
            except MissError as miss:
                if miss.reason not in ("gone", "no-room"):
                    wrong.append(miss)
            in_memory, on_disk = store.n_bytes
            if not (0 <= in_memory <= ram and 0 <= on_disk <= disk):
                wrong.append(store.n_bytes)
            with (tmp_path / "pykvgraph.lock").open("rb") as lock:  # nothing is renamed meanwhile
                fcntl.flock(lock, fcntl.LOCK_EX)
                if sizes_in(tmp_path) > disk:
                    wrong.append(sizes_in(tmp_path))

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
    assert store.flush(10)
    assert sum(kept.record.n_bytes for kept in store._memory._kept.values()) == store.n_bytes[0]
    assert store.counts["written"] > 0  # as many as there was time for
    store.close(10)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    store = Store(kvg.Tiers(30 * SIZE, 100 * SIZE, tmp_path))

    def fails(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fails)
        for number in range(5):
            save(store, number)
        assert store.flush(10)
    assert store.counts["unwritten"] == 5
    assert [os.strerror(code) in each.message for each in caplog.records] == [True]  # one line
    assert load(store, 3) == record_of(3).rows
    save(store, 7)
    assert store.flush(10)
    assert store.counts["written"] == 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fails)
        save(store, 8)
        assert store.flush(10)
    assert len(caplog.records) == 1  # a disk that is nearly full fails now and then
    store.close(10)


def test_a_directory_that_has_gone(tmp_path: Path) -> None:
    store = Store(kvg.Tiers(2 * SIZE, 100 * SIZE, tmp_path / "tier"))
    for number in range(4):
        save(store, number)
        assert store.flush(10)
    shutil.rmtree(tmp_path / "tier")
    assert load(store, 3) == record_of(3).rows
    with pytest.raises(MissError) as miss:
        load(store, 0)
    assert miss.value.reason == "gone"
    save(store, 9)
    assert store.flush(10)
    assert store.counts["unwritten"] == 1
    assert load(store, 9) == record_of(9).rows
    store.close(10)


def test_reading_that_fails_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(kvg.Tiers(2 * SIZE, 100 * SIZE, tmp_path))
    for number in range(4):
        save(store, number)
        assert store.flush(10)

    def fails(*_: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", fails)
        with pytest.raises(MissError) as miss:
            load(store, 0)
    assert miss.value.reason == "unreadable"
    assert store.n_bytes[0] <= 2 * SIZE
    assert load(store, 0) == record_of(0).rows
    store.close(10)


def test_what_is_in_use_stays_and_others_find_no_room(tmp_path: Path) -> None:
    store = Store(kvg.Tiers(SIZE))
    save(store, 1)
    with store.load(name_of(1)) as record:
        save(store, 2)
        store.forget(name_of(1).key)
        assert not store.has(name_of(2).key)
        assert record.rows == record_of(1).rows
        assert store.n_bytes == (SIZE, 0)
    assert store.counts["dropped"] == 1
    save(store, 2)
    assert store.has(name_of(2).key)
    store.close()


def test_ends_are_known_by_their_block(tmp_path: Path) -> None:
    store = Store(kvg.Tiers(10 * SIZE, 10 * SIZE, tmp_path))
    save(store, 1, kind=block.END)
    assert store.ends(bytes(32)) == [name_of(1, block.END).tokens]
    assert store.flush(10)
    store.close(10)
    again = Store(kvg.Tiers(10 * SIZE, 10 * SIZE, tmp_path))
    assert again.ends(bytes(32)) == [name_of(1, block.END).tokens]
    again.forget(name_of(1, block.END).key)
    assert again.ends(bytes(32)) == []
    again.close(10)


@pytest.mark.parametrize("text", ["", "4X", "-1", "1.5G", "G", 1.5, None, True, 2**61, "9" * 30])
def test_sizes_that_are_none(text: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="ram must be bytes"):
        kvg.Tiers(text)


def test_a_size_that_python_cannot_print() -> None:
    with pytest.raises(InvalidArgumentError, match="ram must be bytes"):
        kvg.Tiers(10**5000)


def test_sizes_with_units(tmp_path: Path) -> None:
    tiers = kvg.Tiers("4G", "512m", tmp_path)
    assert (tiers.ram, tiers.disk, tiers.path) == (4 << 30, 512 << 20, tmp_path)
    with pytest.raises(InvalidArgumentError, match="give ram"):
        kvg.Tiers(0, 100, tmp_path)
    with pytest.raises(InvalidArgumentError, match="without disk"):
        kvg.Tiers(100, 0, tmp_path)
    with pytest.raises(InvalidArgumentError, match="must be a path"):
        kvg.Tiers(100, 100, 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["", "a\0b", b"", 5])
def test_paths_that_are_none(path: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a path"):
        kvg.Tiers(100, 100, path)


def test_a_record_that_never_fits_pushes_nothing_out() -> None:
    store = Store(kvg.Tiers(3 * SIZE))
    for number in range(3):
        save(store, number)
    save(store, 9, 3 * SIZE)
    assert [store.has(name_of(number).key) for number in (0, 1, 2, 9)] == [True, True, True, False]
    with store.load(name_of(0)):
        save(store, 8, 2 * SIZE + 500)  # more than can make way
    assert [store.has(name_of(number).key) for number in (0, 1, 2, 8)] == [True, True, True, False]
    assert store.n_bytes == (3 * SIZE, 0)
    assert store.counts["dropped"] == 2
