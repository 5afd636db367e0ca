"""The format of saved states, as docs/state-format.md has it; damage; a file that is there or isn't."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from pykvgraph import kv_state
from pykvgraph._native.ffi import KvgType
from pykvgraph.errors import InvalidArgumentError, StateError
from pykvgraph.kv_state import Geometry, SavedCells, read_file, unpack, write_file

HERE = Geometry(bytes(range(16)), 2, 4, 8, 16, 1, 0, cell_bytes=2 * 4 * (8 * 2 + 16 * 4))
HEADER, CHECKSUM_AT = 112, 104


def saved(n_cells: int = 7, n_seq: int = 11, whole: bool = True, seed: int = 0) -> SavedCells:
    """Cells in order of position, each of one to three sequences."""
    rng = np.random.default_rng(seed)
    seq = np.zeros((n_cells, n_seq), np.bool_)
    for row in seq:
        row[rng.choice(n_seq, min(n_seq, 1 + int(rng.integers(3))), replace=False)] = True
    pos = np.sort(rng.integers(0, 2**31, n_cells)).astype(np.int32)
    rows = rng.integers(0, 256, n_cells * HERE.cell_bytes).astype(np.uint8)
    rows &= 0xBF  # no exponent is all ones
    return SavedCells(whole, pos, seq, rng.integers(0, 256, n_cells).astype(np.uint8), rows)


def packed(geometry: Geometry, cells: SavedCells) -> bytes:
    return kv_state.pack(
        geometry, cells.whole, cells.pos, cells.seq, cells.turns, lambda rows: np.copyto(rows, cells.rows)
    )


def documented(geometry: Geometry, cells: SavedCells) -> bytearray:
    """A blob written by the table of docs/state-format.md, offset by offset."""
    n_cells, n_seq = cells.seq.shape
    table = b"".join(struct.pack("<i", pos) for pos in cells.pos.tolist())
    table += bytes(cells.turns.tolist())
    for row in cells.seq.tolist():
        members = sum(1 << seq for seq in range(n_seq) if row[seq])
        table += members.to_bytes((n_seq + 7) // 8, "little")
    rows = cells.rows.tobytes()
    blob = bytearray(HEADER)
    blob[0:8] = b"KVGSTATE"
    struct.pack_into("<I", blob, 8, 1)
    struct.pack_into("<I", blob, 12, 112)
    struct.pack_into("<Q", blob, 16, HEADER + len(table) + len(rows))
    blob[24:40] = geometry.model
    struct.pack_into("<I", blob, 40, geometry.n_layer)
    struct.pack_into("<I", blob, 44, geometry.n_head_kv)
    struct.pack_into("<I", blob, 48, geometry.head_dim_k)
    struct.pack_into("<I", blob, 52, geometry.head_dim_v)
    struct.pack_into("<I", blob, 56, geometry.type_k)
    struct.pack_into("<I", blob, 60, geometry.type_v)
    struct.pack_into("<Q", blob, 64, geometry.cell_bytes)
    struct.pack_into("<I", blob, 72, int(cells.whole))
    struct.pack_into("<I", blob, 76, n_seq)
    struct.pack_into("<Q", blob, 80, n_cells)
    struct.pack_into("<Q", blob, 88, xxhash.xxh3_64_intdigest(table, seed=0))
    struct.pack_into("<Q", blob, 96, xxhash.xxh3_64_intdigest(rows, seed=0))
    return sign(blob + table + rows)


def sign(blob: bytearray) -> bytearray:
    """The header's checksum, as somebody would set it who forges one."""
    struct.pack_into("<Q", blob, CHECKSUM_AT, xxhash.xxh3_64_intdigest(bytes(blob[:CHECKSUM_AT])))
    return blob


KINDS = {
    "whole": saved(),
    "whole, many ids": saved(n_seq=65),
    "whole, empty": saved(n_cells=0, n_seq=3),
    "sequence": saved(n_seq=1, whole=False),
    "empty sequence": saved(n_cells=0, n_seq=1, whole=False),
}
by_kind = pytest.mark.parametrize("cells", KINDS.values(), ids=KINDS.keys())


@by_kind
def test_format_is_the_documented_one(cells: SavedCells) -> None:
    assert packed(HERE, cells) == documented(HERE, cells)


@by_kind
def test_back_come_the_same_cells(cells: SavedCells) -> None:
    back = unpack(packed(HERE, cells), HERE)
    assert back.whole == cells.whole
    for name in ("pos", "seq", "rows"):
        ours: npt.NDArray[Any] = getattr(back, name)
        assert np.array_equal(ours, getattr(cells, name))
        assert ours.dtype == getattr(cells, name).dtype


def damage(rng: random.Random, blob: bytes) -> bytes:
    """One change: bits, bytes, fields, pieces, lengths."""
    changed = bytearray(blob)
    begin = rng.choice([rng.randrange(len(blob)), rng.randrange(HEADER)])
    end = min(begin + rng.choice([1, 2, 4, 8, 112, len(blob)]), len(blob))
    kind = rng.randrange(9)
    if kind == 0:
        changed[begin] ^= 1 << rng.randrange(8)
    elif kind == 1:
        changed[begin] = rng.randrange(256)
    elif kind == 2:
        changed[begin:end] = rng.randbytes(end - begin)
    elif kind == 3:
        changed[begin:end] = bytes(end - begin)
    elif kind == 4:
        del changed[begin:end]
    elif kind == 5:
        del changed[begin:]
    elif kind == 6:
        changed += rng.randbytes(rng.choice([1, 8, 1000]))
    elif kind == 7:
        changed[begin:begin] = changed[begin:end]
    else:
        other = rng.randrange(len(blob))
        changed[begin], changed[other] = changed[other], changed[begin]
    return bytes(changed)


def test_ten_thousand_damaged_blobs() -> None:
    """None is accepted unless nothing was changed."""
    rng = random.Random(4)
    n_refused = 0
    for cells in KINDS.values():
        blob = packed(HERE, cells)
        for _ in range(2500):
            changed = damage(rng, blob)
            if changed != blob:
                with pytest.raises(StateError):
                    unpack(changed, HERE)
                n_refused += 1
    assert n_refused >= 10_000


def test_any_bit_of_a_forged_header() -> None:
    """Its checksum is right, and what it says is not: in a header of 104 bytes no bit is idle."""
    cells = saved(n_seq=8)  # all bits in use: neither more nor fewer sequences fit
    cells.seq[:] = True
    for bit in range(8 * CHECKSUM_AT):
        blob = documented(HERE, cells)
        blob[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(StateError):
            unpack(bytes(sign(blob)), HERE)


def forge(blob: bytearray, **fields: tuple[int, str, int]) -> bytes:
    """Fields as (offset, format, value), and all checksums right."""
    for offset, form, value in fields.values():
        struct.pack_into(form, blob, offset, value)
    n_seq, n_cells = struct.unpack_from("<I", blob, 76)[0], struct.unpack_from("<Q", blob, 80)[0]
    table = bytes(blob[HEADER : HEADER + n_cells * (5 + (n_seq + 7) // 8)])
    struct.pack_into("<Q", blob, 88, xxhash.xxh3_64_intdigest(table))
    return bytes(sign(blob))


@pytest.mark.parametrize(
    "forged",
    [
        pytest.param(forge(documented(HERE, saved()), pos=(HEADER + 8, "<i", -1)), id="negative position"),
        pytest.param(
            forge(documented(HERE, saved()), seq=(HEADER + 5 * 7, "<H", 0)), id="cell without a sequence"
        ),
        pytest.param(
            forge(documented(HERE, saved()), seq=(HEADER + 5 * 7, "<H", 1 << 11)), id="sequence beyond n_seq"
        ),
        pytest.param(
            forge(documented(HERE, KINDS["whole, empty"]), n_seq=(76, "<I", 0)), id="no sequences at all"
        ),
        pytest.param(
            forge(documented(HERE, KINDS["whole, empty"]), n_seq=(76, "<I", 2**32 - 1)),
            id="gigabytes of sequences",
        ),
        pytest.param(forge(documented(HERE, KINDS["whole, empty"]), whole=(72, "<I", 2)), id="neither kind"),
        pytest.param(
            forge(documented(HERE, KINDS["whole, empty"]), whole=(72, "<I", 0)), id="a sequence of three"
        ),
    ],
)
def test_forged(forged: bytes) -> None:
    with pytest.raises(StateError):
        unpack(forged, HERE)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("name", "dtype"), [("K", "<f2"), ("V", "<f4")])
@pytest.mark.parametrize("place", [0, 300_000, -1])
def test_what_is_not_finite(value: float, layer: int, name: str, dtype: str, place: int) -> None:
    """Wherever it stands, and checksums and all."""
    cells = saved(n_cells=10_000)
    widths = {"K": 4 * 8 * 2, "V": 4 * 16 * 4}
    begin = len(cells.pos) * (layer * sum(widths.values()) + (widths["K"] if name == "V" else 0))
    part = cells.rows[begin : begin + len(cells.pos) * widths[name]].view(dtype)
    part[place] = np.finfo(dtype).max
    assert np.array_equal(unpack(packed(HERE, cells), HERE).rows, cells.rows)
    part[place] = value
    with pytest.raises(StateError, match=f"{name} in layer {layer} that is not finite"):
        unpack(packed(HERE, cells), HERE)


@pytest.mark.parametrize(
    ("kind", "block_bytes", "n_floats", "infinity"),
    [
        pytest.param(KvgType.KVG_TYPE_BF16, 2 * 32, 32, 0x7F80, id="bf16"),
        pytest.param(KvgType.KVG_TYPE_Q8_0, 34, 1, 0x7C00, id="q8_0"),
        pytest.param(KvgType.KVG_TYPE_Q5_1, 24, 2, 0x7C00, id="q5_1"),
        pytest.param(KvgType.KVG_TYPE_Q5_0, 22, 1, 0x7C00, id="q5_0"),
        pytest.param(KvgType.KVG_TYPE_Q4_1, 20, 2, 0x7C00, id="q4_1"),
        pytest.param(KvgType.KVG_TYPE_Q4_0, 18, 1, 0x7C00, id="q4_0"),
    ],
)
def test_floats_of_a_block(kind: KvgType, block_bytes: int, n_floats: int, infinity: int) -> None:
    """Scales and offsets are looked at, in every block; what a block holds beside them may be anything."""
    here = replace(HERE, head_dim_k=32, head_dim_v=32, type_k=kind, cell_bytes=2 * 4 * (block_bytes + 128))
    for place in (-1, *range(n_floats)):
        for block in (0, 13, 27):
            rows = np.full(7 * here.cell_bytes, 0xFF, np.uint8)
            k_bytes = 7 * 4 * block_bytes
            for layer in range(2):
                begin = layer * 7 * 4 * (block_bytes + 128)
                rows[begin + k_bytes : begin + k_bytes + 7 * 4 * 128] = 0
                floats = rows[begin : begin + k_bytes].view("<u2").reshape(28, -1)[:, :n_floats]
                floats[:] = infinity - 1  # the largest
                if layer == 1 and place >= 0:
                    floats[block, place] = infinity
            blob = packed(here, replace(saved(), rows=rows))
            if place < 0:
                unpack(blob, here)
            else:
                with pytest.raises(StateError, match="K in layer 1 that is not finite"):
                    unpack(blob, here)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("model", bytes(16), "another model"),
        ("n_layer", 3, "n_layer"),
        ("n_head_kv", 2, "n_head_kv"),
        ("head_dim_k", 16, "head_dim_k"),
        ("head_dim_v", 8, "head_dim_v"),
        ("type_k", 0, "type_k"),
        ("type_v", 1, "type_v"),
        ("cell_bytes", 1, "cell_bytes"),
    ],
)
def test_another_geometry(field: str, value: object, told: str) -> None:
    changes: dict[str, Any] = {field: value}
    with pytest.raises(StateError, match=told):
        unpack(packed(HERE, saved()), replace(HERE, **changes))


@pytest.mark.parametrize(
    "junk", [b"", b"KVGSTATE", b"GGUF" + bytes(200), bytes(112), b"KVGSTATE" + bytes(104)]
)
def test_what_is_no_state(junk: bytes) -> None:
    with pytest.raises(StateError):
        unpack(junk, HERE)


def test_later_version() -> None:
    blob = documented(HERE, saved())
    struct.pack_into("<I", blob, 8, 2)
    with pytest.raises(StateError, match="version 2"):
        unpack(bytes(sign(blob)), HERE)


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
        read_file(path)
    assert os.stat(path) == before
    assert list(tmp_path.iterdir()) == [path]


def test_only_the_header_is_read_of_what_does_not_fit_it(tmp_path: Path) -> None:
    path = tmp_path / "state"
    blob = packed(HERE, saved())
    write_file(path, blob)
    assert read_file(path) == blob
    os.truncate(path, 2**41)
    with pytest.raises(StateError, match=f"has {2**41} bytes, and its header tells of {len(blob)}"):
        read_file(path)
    os.truncate(path, len(blob) - 1)
    with pytest.raises(StateError, match=f"has {len(blob) - 1} bytes"):
        read_file(path)
    os.truncate(path, 0)
    os.truncate(path, 2**41)
    with pytest.raises(StateError, match="no saved state"):
        read_file(path)
    later = bytearray(blob)
    struct.pack_into("<I", later, 8, 2)
    path.write_bytes(sign(later) + b"of another length")
    with pytest.raises(StateError, match="version 2"):
        unpack(read_file(path), HERE)


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
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_killed_while_writing(tmp_path: Path) -> None:
    """kill -9 at two hundred moments: the old file or the new one, whole."""
    path = tmp_path / "state"
    blobs = [packed(HERE, saved(n_cells=1500, seed=seed)) for seed in range(2)]
    begin = time.perf_counter()
    for _ in range(5):
        write_file(path, blobs[0])
    usual = (time.perf_counter() - begin) / 5
    outcomes = {"old": 0, "new": 0, "in the middle": 0}
    for turn in range(200):
        old, new = blobs[turn % 2], blobs[1 - turn % 2]
        write_file(path, old)
        pid = in_child(lambda new=new: write_file(path, new))  # type: ignore[misc]
        time.sleep(usual * 2 * turn / 200)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        now = path.read_bytes()
        assert now in (old, new)
        assert unpack(now, HERE).whole
        outcomes["new" if now == new else "old"] += 1
        for aside in tmp_path.glob(".kvgstate-*.tmp"):
            outcomes["in the middle"] += 1
            aside.unlink()
    assert [entry.name for entry in tmp_path.iterdir()] == ["state"]
    assert outcomes["in the middle"] >= 10, outcomes
