"""Files of saved states: one that is there or isn't, the old or the new one, whatever happens."""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.saved_cells import HERE, TWO_GROUPS_HERE, packed, saved
from support.state_bytes import Part, container, format_1, parts_of, sign_1

from pykvgraph.errors import CacheFullError, InvalidArgumentError, StateError
from pykvgraph.kv_cache.saved.file import read_file, write_file
from pykvgraph.kv_cache.saved.format import unpack
from pykvgraph.kv_cache.saved.source import FileSource


def test_write_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_file(path, b"old")
    write_file(str(path), b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_write_follows_links(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    path, link = tmp_path / "elsewhere" / "state", tmp_path / "link"
    link.symlink_to(path)
    for blob in (b"old", b"new"):  # the first one goes where nothing is yet
        write_file(link, blob)
        assert link.is_symlink()
        assert path.read_bytes() == blob


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o400])
def test_write_keeps_the_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "state"
    before = os.umask(0o027)
    try:
        write_file(path, b"old")
        assert path.stat().st_mode & 0o7777 == 0o600  # a new one is its owner's
        path.chmod(mode)
        write_file(path, b"new")
    finally:
        os.umask(before)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o7777 == mode


def test_a_private_file_is_private_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, modes = tmp_path / "state", []
    write_file(path, b"old")
    path.chmod(0o604)
    monkeypatch.setattr(
        os, "fchmod", lambda fd, mode: modes.append((stat.S_IMODE(os.fstat(fd).st_mode), mode))
    )
    write_file(path, b"new")
    assert modes == [(0o600, 0o604)]


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def make_null(path: Path) -> None:
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("make", [os.mkfifo, make_socket, make_null])
def test_what_is_no_regular_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "special"
    make(path)
    before = os.stat(path)
    with pytest.raises(InvalidArgumentError, match=f"'{path}' is a device, a pipe or a socket"):
        write_file(path, b"new")
    with pytest.raises(StateError, match=f"'{path}' is a device, a pipe or a socket"):
        read_file(path, HERE, None)
    assert os.stat(path) == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each piece that is read of a file from now on."""
    sizes: list[int] = []
    read = FileSource.read

    def counted(source: FileSource, offset: int, n_bytes: int) -> memoryview:
        sizes.append(n_bytes)
        return read(source, offset, n_bytes)

    monkeypatch.setattr(FileSource, "read", counted)
    return sizes


def test_the_cells_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    for blob in (packed(HERE, saved()), bytes(format_1(HERE, saved()))):
        write_file(path, blob)
        for room in (None, (7,)):
            cells = read_file(path, HERE, room).groups[0]
            assert cells.pos.tolist() == saved().groups[0].pos.tolist()
            assert cells.rows.tolist() == saved().groups[0].rows.tolist()


def test_what_does_not_fit_its_header(tmp_path: Path, asked: list[int]) -> None:
    path = tmp_path / "state"
    for blob in (packed(HERE, saved()), bytes(format_1(HERE, saved()))):
        write_file(path, blob)
        os.truncate(path, 2**41)
        with pytest.raises(
            StateError, match=f"'{path}': .* has {2**41} bytes, and its header tells of {len(blob)}"
        ):
            read_file(path, HERE, None)
        os.truncate(path, len(blob) - 1)
        with pytest.raises(StateError, match=f"has {len(blob) - 1} bytes"):
            read_file(path, HERE, None)
        os.truncate(path, 50)
        with pytest.raises(StateError, match="cut off"):
            read_file(path, HERE, None)
        os.truncate(path, 0)
        os.truncate(path, 2**41)
        with pytest.raises(StateError, match="no saved state"):
            read_file(path, HERE, None)
    later = bytearray(packed(HERE, saved()))
    struct.pack_into("<I", later, 8, 3)
    path.write_bytes(later + b"of another length")
    with pytest.raises(StateError, match="version 3"):
        read_file(path, HERE, None)
    assert max(asked) <= 112


def test_what_does_not_fit_the_cache(tmp_path: Path, asked: list[int]) -> None:
    """Another geometry, or more cells than there are: K and V are not read."""
    path = tmp_path / "state"
    n_bytes = saved(1000).groups[0].rows.size
    for blob in (packed(HERE, saved(1000)), bytes(format_1(HERE, saved(1000)))):
        write_file(path, blob)
        with pytest.raises(StateError, match="groups"):
            read_file(path, TWO_GROUPS_HERE, None)
        with pytest.raises(CacheFullError, match="needs 1000 cells in group 0, and this cache has 999"):
            read_file(path, HERE, (999,))
        assert max(asked) <= 112
        read_file(path, HERE, (1000,))
        assert max(asked) == n_bytes
        asked.clear()


@pytest.mark.parametrize("failing", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
def test_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: BaseException
) -> None:
    path = tmp_path / "state"
    write_file(path, b"old")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(type(error)):
        write_file(path, b"new")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("", FileNotFoundError),
        ("/", IsADirectoryError),
        (".", IsADirectoryError),
        ("folder", IsADirectoryError),
        ("folder/", IsADirectoryError),
        ("folder/new/", FileNotFoundError),
        ("missing/state", FileNotFoundError),
        ("missing/..", FileNotFoundError),
        ("file/state", NotADirectoryError),
        ("/proc/state", FileNotFoundError),
    ],
)
def test_write_where_no_file_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, error: type[OSError]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as caught:
        write_file(path, b"new")
    assert caught.value.filename == path
    assert str(caught.value).endswith(f": {path!r}")
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_full_disk_is_told_of_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"No space left on device: .*/state'"):
        write_file(tmp_path / "state", b"new")


def as_nobody(work: Callable[[], None]) -> str:
    """What the work raises, as text, in a process that is no longer root; "" for nothing."""
    reader, writer = os.pipe()

    def child() -> None:
        os.setgid(65534)
        os.setuid(65534)
        try:
            work()
        except Exception as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())

    pid = in_child(child)
    os.close(writer)
    with open(reader, "rb") as told:
        text = told.read().decode()
    assert os.waitpid(pid, 0)[1] == 0
    return text


@pytest.mark.skipif(os.getuid() != 0, reason="becomes somebody else")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_folders_that_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are for their owner alone
        folder = Path(name)
        path = folder / "state"
        write_file(path, b"old")
        path.chmod(0o666)
        folder.chmod(0o755)
        monkeypatch.chdir(folder)
        for refused in (path, folder / "new", Path("state")):
            told = as_nobody(lambda refused=refused: write_file(refused, b"new"))  # type: ignore[misc]
            assert told == f"PermissionError: [Errno 13] Permission denied: '{refused}'"
        assert path.read_bytes() == b"old"
        folder.chmod(0o733)  # to write in, not to look into: so there is no syncing the folder
        assert as_nobody(lambda: write_file(path, b"new")) == ""
        assert path.read_bytes() == b"new"
        assert list(folder.iterdir()) == [path]


def in_child(work: Callable[[], object]) -> int:
    """The id of a process that does the work and ends."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


# the child only writes a file: it takes no lock that another thread may have held
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_killed_while_writing(tmp_path: Path) -> None:
    """kill -9 at two hundred moments: the old file or the new one, whole."""
    path = tmp_path / "state"
    blobs = [packed(HERE, saved(n_cells=1500, seed=seed)) for seed in range(2)]
    usual = 0.001  # seconds until half of them are done, found as we go: the machine may have other work
    outcomes = {"old": 0, "new": 0, "in the middle": 0}
    for turn in range(200):
        old, new = blobs[turn % 2], blobs[1 - turn % 2]
        path.write_bytes(old)  # without a wait for the disk
        pid = in_child(lambda new=new: write_file(path, new))  # type: ignore[misc]
        time.sleep(usual * (turn % 20) / 10)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        now = path.read_bytes()
        assert now in (old, new)
        assert unpack(now, HERE).whole
        outcomes["new" if now == new else "old"] += 1
        usual *= 0.95 if now == new else 1 / 0.95
        for aside in tmp_path.glob(".kvgstate-*.tmp"):
            outcomes["in the middle"] += 1
            aside.unlink()
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    assert outcomes["in the middle"] >= 3, outcomes  # 9 of 200 on a fast machine


def test_a_sparse_file_is_not_believed(tmp_path: Path, asked: list[int]) -> None:
    """Of 1 TiB that headers tell of, nothing large is read unless all else is right and fits this cache."""
    path, huge = tmp_path / "state", 1 << 40
    parts = parts_of(HERE, saved(2))

    def refused(blob: bytes | bytearray) -> None:
        path.write_bytes(blob)
        os.truncate(path, huge)
        with pytest.raises((StateError, CacheFullError)):
            read_file(path, HERE, (2,))

    for signed in (False, True):  # a wrong checksum, and a right one
        blob = format_1(HERE, saved(2))
        struct.pack_into("<Q", blob, 16, huge)
        refused(sign_1(blob) if signed else blob)
    refused(container(parts, total=huge))
    n_cells = (huge - 1000) // (HERE.groups[0].cell_bytes + 7)
    for place in range(len(parts)):  # each section in its turn is what is huge
        n_before = len(container(parts[:place])) + 40
        large = replace(parts[place], n_bytes=huge - n_before)
        refused(container([*parts[:place], large], n_sections=3, total=huge))
    counts = struct.pack("<IIQ", 1, 11, n_cells)
    n_bytes = 16 + n_cells * 7
    large = Part(b"CELL", counts, n_bytes=n_bytes)
    refused(container([parts[0], large], n_sections=3, total=huge))
    assert max(asked) <= 112


def test_what_is_skipped_is_not_read(tmp_path: Path, asked: list[int]) -> None:
    """A section that this pykvgraph needn't know may be as large as it likes."""
    path = tmp_path / "state"
    parts, huge = parts_of(HERE, saved(2)), 1 << 40
    n_before = len(container(parts)) + 40
    other = Part(b"TOKN", b"", flags=0, n_bytes=huge - n_before)
    path.write_bytes(container([*parts, other], total=huge))
    os.truncate(path, huge)
    assert len(read_file(path, HERE, (2,)).groups[0].pos) == 2
    assert max(asked) <= saved(2).groups[0].rows.size
