"""Regions as files of a directory: what is left there, and what isn't whole."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.ends import meanwhile

from pykvgraph import stream
from pykvgraph.errors import TransportError

PART = 512 * 1024


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_the_other_end_comes_later(tmp_path: Path) -> None:
    """Regions lie there meanwhile, a file each, and go as they are fetched. A later end adds to them."""
    folder = tmp_path / "new"
    for region in (b"first", b"then"):
        with stream.open(f"file:{folder}") as one:
            one.flush("layer0/k", region)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [re.sub("-[0-9a-f]{8}", "-TAG", name) for name in names_in(folder)] == [
        "layer0+k~00000000-TAG.region",
        "layer0+k~00000001-TAG.region",
    ]
    assert all(each.stat().st_mode & 0o777 == 0o600 for each in folder.iterdir())
    with stream.open(f"file:{folder}") as other:
        for region in (b"first", b"then"):
            into = bytearray(len(region))
            other.fetch("layer0/k", into)
            assert into == region
    assert names_in(folder) == []


def test_keys_stay_in_the_directory(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with stream.open(f"file:{folder}") as one:
        for key in ("..", "../x", "/etc/x", "."):
            one.flush(key, b"")
    assert len(names_in(folder)) == 4
    assert names_in(tmp_path) == ["a"]
    assert names_in(tmp_path / "a") == ["b"]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    others = ["k", "k~1.region", "k~00000000-0000000G.region", ".x.tmp"]
    for name in others:
        (tmp_path / name).write_text("mine")
    with stream.open(f"file:{tmp_path}", timeout=0.1) as one:
        with pytest.raises(TransportError, match="region 'k' has not come"):
            one.fetch("k", bytearray(4))
        assert names_in(tmp_path) == sorted(others)


@pytest.mark.parametrize("n_bytes", [0, 5, PART + 5])
def test_files_that_are_not_whole(tmp_path: Path, n_bytes: int) -> None:
    """Cut off anywhere, longer, or with any byte changed: an error, and the file stays to be looked at."""
    with stream.open(f"file:{tmp_path}") as one:
        one.flush("k", bytes(n_bytes))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    ends = {*range(0, len(whole), len(whole) // 50 + 1), 159, 160, len(whole) - 1} - {len(whole)}
    damaged = [whole[:end] for end in sorted(ends)] + [whole + b"\0"]
    for _ in range(50):
        at = random.Random(len(damaged)).randrange(len(whole))
        damaged.append(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    for data in damaged:
        path.write_bytes(data)
        said = re.escape(path.name) + "|has [0-9]+ bytes"
        with (
            stream.open(f"file:{tmp_path}", timeout=10) as other,
            pytest.raises(TransportError, match=said),
        ):
            other.fetch("k", bytearray(n_bytes))
        assert path.exists()
    path.write_bytes(whole)
    with stream.open(f"file:{tmp_path}", timeout=10) as other:
        other.fetch("k", bytearray(n_bytes))


def test_a_file_of_another_region(tmp_path: Path) -> None:
    with stream.open(f"file:{tmp_path}") as one:
        one.flush("j", b"1")
    (path,) = tmp_path.iterdir()
    path.rename(tmp_path / path.name.replace("j~", "k~"))
    said = r"it holds region 'j'; remove the file, and flush"
    with stream.open(f"file:{tmp_path}", timeout=10) as other, pytest.raises(TransportError, match=said):
        other.fetch("k", bytearray(1))


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_names_that_are_no_files(tmp_path: Path, kind: str) -> None:
    """Nothing behind a link is read, and a fifo keeps nobody waiting."""
    folder, path = tmp_path / "folder", tmp_path / "folder" / "k~00000000-00000000.region"
    with stream.open(f"file:{tmp_path}/from") as one:
        one.flush("k", b"1")
    (real,) = (tmp_path / "from").iterdir()
    folder.mkdir()
    if kind == "link":
        path.symlink_to(real)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    start = time.monotonic()
    with stream.open(f"file:{folder}", timeout=10) as other, pytest.raises(TransportError):
        other.fetch("k", bytearray(1))
    assert time.monotonic() - start < 5


def test_directories_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(TransportError, match=r"can't be used \(File exists\); see its directory"):
        stream.open(f"file:{tmp_path}/file")
    with stream.open(f"file:{tmp_path}/gone", timeout=10) as one:
        (tmp_path / "gone").rmdir()
        with pytest.raises(TransportError, match=r"region 'k' can't be written \(No such file"):
            one.flush("k", b"1")


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """A limit on the size of files fails in the same place. Nothing is left of the region."""
    code = (
        "import resource, signal, sys; from pykvgraph import stream, TransportError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000,) * 2)\n"
        "one = stream.open('file:' + sys.argv[1]); one.flush('small', b'1')\n"
        "try: one.flush('k', bytes(300_000))\n"
        "except TransportError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60, check=True
    )
    assert "region 'k' can't be written (File too large); see its directory and its disk" in done.stdout
    assert [name.split("~")[0] for name in names_in(tmp_path)] == ["small"]


def test_a_writer_is_killed(tmp_path: Path) -> None:
    """What it had flushed is there as a whole; half a region is never fetched."""
    code = (
        "import sys; from pykvgraph import stream\n"
        "one = stream.open('file:' + sys.argv[1])\n"
        "for i in range(10**6): one.flush(f'k{i}', bytes([i % 256]) * 300_000)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, tmp_path])
    with stream.open(f"file:{tmp_path}", timeout=30) as other:
        other.fetch("k0", bytearray(300_000))
        writer.send_signal(signal.SIGKILL)
        writer.wait(30)
        whole = [name for name in names_in(tmp_path) if not name.startswith(".")]
        for i in range(1, len(whole) + 1):
            into = bytearray(300_000)
            other.fetch(f"k{i}", into)
            assert into == bytes([i % 256]) * 300_000
        assert not [name for name in names_in(tmp_path) if not name.startswith(".")]


def test_a_fetch_hears_of_close(tmp_path: Path) -> None:
    with stream.open(f"file:{tmp_path}", timeout=30) as one:

        def wait() -> None:
            with pytest.raises(TransportError, match="it was closed here; open it anew"):
                one.fetch("k", bytearray(1))

        start = time.monotonic()
        with meanwhile(wait):
            time.sleep(0.05)
            one.close()
        assert time.monotonic() - start < 10
