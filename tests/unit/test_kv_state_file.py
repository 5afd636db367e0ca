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
from pathlib import Path

import pytest
from support.saved_cells import HERE, packed, saved, sign

from pykvgraph.errors import InvalidArgumentError, StateError
from pykvgraph.state.file import read_file, write_file
from pykvgraph.state.format import HEADER_BYTES, unpack


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
        assert path.stat().st_mode & 0o7777 == 0o640  # a new one is the umask's
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
        read_file(path, HERE)
    assert os.stat(path) == before
    assert list(tmp_path.iterdir()) == [path]


def test_only_the_header_is_read_of_what_does_not_fit_it(tmp_path: Path) -> None:
    path = tmp_path / "state"
    blob = packed(HERE, saved())
    write_file(path, blob)
    assert read_file(path, HERE) == blob
    os.truncate(path, 2**41)
    with pytest.raises(StateError, match=f"has {2**41} bytes, and its header tells of {len(blob)}"):
        read_file(path, HERE)
    os.truncate(path, len(blob) - 1)
    with pytest.raises(StateError, match=f"has {len(blob) - 1} bytes"):
        read_file(path, HERE)
    os.truncate(path, 0)
    os.truncate(path, 2**41)
    with pytest.raises(StateError, match="no saved state"):
        read_file(path, HERE)
    later = bytearray(blob)
    struct.pack_into("<I", later, 8, 2)
    path.write_bytes(sign(later) + b"of another length")
    with pytest.raises(StateError, match="version 2"):
        unpack(read_file(path, HERE), HERE)


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
        write_file(path, old)
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
    assert outcomes["in the middle"] >= 10, outcomes


def test_a_sparse_file_is_not_believed(tmp_path: Path) -> None:
    """Of 1 TiB that a header tells of, nothing is read unless the header is whole and fits this cache."""
    path = tmp_path / "state"
    for signed in (False, True):  # a wrong checksum, and a right one
        blob = bytearray(packed(HERE, saved(2)))
        struct.pack_into("<Q", blob, 16, 1 << 40)
        path.write_bytes(sign(blob) if signed else blob)
        os.truncate(path, 1 << 40)
        data = read_file(path, HERE)
        assert len(data) == HEADER_BYTES
        with pytest.raises(StateError):
            unpack(data, HERE)
