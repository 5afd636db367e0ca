"""Regions as files of a directory: what is left there, and what isn't whole."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.ends import meanwhile

from pykvgraph import stream
from pykvgraph.errors import TransportError
from pykvgraph.stream.transports import frame, region_file

PART = 512 * 1024


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def fetched(folder: Path, key: str, n_bytes: int, timeout: float = 10) -> bytes:
    """By an end of its own."""
    into = bytearray(n_bytes)
    with stream.open(f"file:{folder}", timeout=timeout) as end:
        end.fetch(key, into)
    return bytes(into)


def test_the_other_end_comes_later(tmp_path: Path) -> None:
    """Regions lie there meanwhile, a file for each end, which goes when all were fetched."""
    folder = tmp_path / "new"
    for regions in ((b"first", b"second"), (b"then",)):
        with stream.open(f"file:{folder}") as one:
            for region in regions:
                one.flush("layer0/k", region)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [re.sub("-[0-9a-f]{8}", "-TAG", name) for name in names_in(folder)] == [
        "00000000-TAG.regions",
        "00000001-TAG.regions",
    ]
    assert all(each.stat().st_mode & 0o777 == 0o600 for each in folder.iterdir())
    assert fetched(folder, "layer0/k", 5) == b"first"
    assert len(names_in(folder)) == 2
    with stream.open(f"file:{folder}") as other:  # another end fetches what is left
        for region in (b"second", b"then"):
            into = bytearray(len(region))
            other.fetch("layer0/k", into)
            assert into == region
    assert names_in(folder) == []


def test_no_end_leaves_what_was_fetched(tmp_path: Path) -> None:
    """Whichever of them closes last."""
    for is_first in (True, False):
        ends = [stream.open(f"file:{tmp_path}", timeout=10) for _ in range(2)]
        for end in ends:
            end.flush("k", b"1")
        for _ in ends:
            ends[0].fetch("k", bytearray(1))
        assert len(names_in(tmp_path)) == 2  # they may be appended to
        for end in ends if is_first else reversed(ends):
            end.close()
        assert names_in(tmp_path) == []


def test_long_files_go_while_the_stream_goes_on(tmp_path: Path) -> None:
    """So that a disk has no more than what waits, and a last file."""
    most, region = 0, random.Random(0).randbytes(4 << 20)
    into = bytearray(region)
    with stream.open(f"file:{tmp_path}", timeout=10) as one, stream.open(f"file:{tmp_path}") as other:
        for _ in range(16):
            for _ in range(2):
                one.flush("k", region)
            for _ in range(2):
                into[:] = bytes(len(into))
                other.fetch("k", into)
                assert into == region
            most = max(most, sum(each.stat().st_size for each in tmp_path.iterdir()))
    assert most < 64 << 20  # of 128 in all
    assert names_in(tmp_path) == []


def test_a_reader_that_lags(tmp_path: Path) -> None:
    """Files that are whole wait; their regions come in order."""
    with stream.open(f"file:{tmp_path}", timeout=10) as one:
        for i in range(40):
            one.flush(f"k{i % 2}", bytes([i]) * (1 << 20))
        assert len(names_in(tmp_path)) == 3
        assert [fetched(tmp_path, "k1", 1 << 20)[0] for _ in range(20)] == list(range(1, 40, 2))
        assert [fetched(tmp_path, "k0", 1 << 20)[0] for _ in range(20)] == list(range(0, 40, 2))
    assert names_in(tmp_path) == []


def test_two_ends_do_not_fetch_the_same_region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one waits while the first one reads, and takes the next region then."""
    reads, may_go_on = threading.Event(), threading.Event()

    def slowly(*arguments: Any) -> None:
        reads.set()
        assert may_go_on.wait(10)
        frame.read_region(*arguments)

    monkeypatch.setattr(region_file, "read_region", slowly)
    with stream.open(f"file:{tmp_path}") as writer:
        writer.flush("k", b"1")
        writer.flush("k", b"2")
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(fetched, tmp_path, "k", 1)
            assert reads.wait(10)
            reads.clear()
            second = pool.submit(fetched, tmp_path, "k", 1)
            assert not reads.wait(0.2)
            may_go_on.set()
            assert (first.result(10), second.result(10)) == (b"1", b"2")


def test_keys_stay_in_the_directory(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with stream.open(f"file:{folder}") as one:
        for key in ("..", "../x", "/etc/x", "."):
            one.flush(key, b"")
    assert len(names_in(folder)) == 1
    assert names_in(tmp_path) == ["a"]
    assert names_in(tmp_path / "a") == ["b"]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    others = ["k", "0-00000000.regions", "00000000-0000000G.regions", ".00000000-00000000.regions"]
    for name in others:
        (tmp_path / name).write_text("mine")
    with stream.open(f"file:{tmp_path}", timeout=0.1) as one:
        with pytest.raises(TransportError, match=r"region 'k' has not come for 0\.1 s; see"):
            one.fetch("k", bytearray(4))
        assert names_in(tmp_path) == sorted(others)


@pytest.mark.parametrize("n_bytes", [0, 5, PART + 5])
def test_files_that_are_not_whole(tmp_path: Path, n_bytes: int) -> None:
    """Cut off anywhere, longer, or with any byte changed: an error, and the file stays to be looked at."""
    region = random.Random(n_bytes).randbytes(n_bytes)
    with stream.open(f"file:{tmp_path}") as one:
        one.flush("k", region)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    rng, path_said = random.Random(len(whole)), re.escape(path.name)
    for end in sorted({*range(0, len(whole), len(whole) // 20 + 1), 160, 161, len(whole) - 1} - {len(whole)}):
        path.write_bytes(whole[:end])
        said = f"has not come.*{path_said} ends in the middle" if end else "has not come"
        with pytest.raises(TransportError, match=said):
            fetched(tmp_path, "k", n_bytes, timeout=0.01)
        assert path.exists()
    for at in (*range(161), *(rng.randrange(161, len(whole)) for _ in range(50) if n_bytes)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
        with pytest.raises(TransportError, match=f"{path_said}|has [0-9]+ bytes|has not come"):
            fetched(tmp_path, "k", n_bytes, timeout=0.01)
        assert path.exists()
    path.write_bytes(whole + b"\0")
    assert fetched(tmp_path, "k", n_bytes) == region
    assert path.exists()


def test_what_follows_damage(tmp_path: Path) -> None:
    """Nobody can tell where it begins; what is in front of it is whole."""
    with stream.open(f"file:{tmp_path}") as one:
        for key in ("a", "b", "c"):
            one.flush(key, key.encode() * 9)
    (path,) = tmp_path.iterdir()
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 3 + 1] ^= 1  # of the magic in front of b
    path.write_bytes(whole)
    assert fetched(tmp_path, "a", 9) == b"a" * 9
    for key in ("b", "c"):
        with pytest.raises(TransportError, match=rf"{path.name}: what came is no frame; remove the file"):
            fetched(tmp_path, key, 9)
    assert path.exists()


@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_names_that_are_no_files(tmp_path: Path, kind: str) -> None:
    """Nothing behind a link is read, and a fifo keeps nobody waiting."""
    folder, path = tmp_path / "folder", tmp_path / "folder" / "00000000-00000000.regions"
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
    with pytest.raises(TransportError):
        fetched(folder, "k", 1)
    assert time.monotonic() - start < 5
    assert real.exists() and os.path.lexists(path)


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
        "one = stream.open('file:' + sys.argv[1])\n"
        "if len(sys.argv) > 2: one.flush('small', b'1')\n"
        "try: one.flush('k', bytes(300_000))\n"
        "except TransportError as error: print(error)\n"
        "one.close()"
    )
    for more in ([], ["small"]):
        command = [sys.executable, "-c", code, str(tmp_path), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert "region 'k' can't be written (File too large); see its directory and its disk" in done.stdout
        assert len(names_in(tmp_path)) == len(more)
    assert fetched(tmp_path, "small", 1) == b"1"
    assert names_in(tmp_path) == []


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
        n_bytes = sum(each.stat().st_size for each in tmp_path.iterdir())
        for i in range(1, n_bytes // (300_000 + 161)):
            into = bytearray(300_000)
            other.fetch(f"k{i}", into)
            assert into == bytes([i % 256]) * 300_000
    left = [path.stat().st_size % (300_000 + 161) for path in tmp_path.iterdir()]
    assert all(left) and len(left) <= 1  # half a region, to be looked at
    with stream.open(f"file:{tmp_path}") as again:  # another writer goes on behind it
        again.flush("k", b"1")
    assert fetched(tmp_path, "k", 1) == b"1"


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
