"""Two ranks of MPI, in processes of their own: what they do is in support/mpi_ends.py."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from support import sanitizer

from pykvgraph import stream
from pykvgraph.errors import InvalidArgumentError

MPIEXEC = Path(sys.executable).parent / "mpiexec"
has_mpi = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or not MPIEXEC.exists(), reason="mpi4py or mpich is missing"
)


def lines_of(scene: str) -> list[str]:
    """What rank 1 has printed."""
    command = [str(MPIEXEC), "-n", "2", sys.executable, "-m", "support.mpi_ends", scene]
    folder = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@has_mpi
def test_regions_of_any_size_in_any_order() -> None:
    assert lines_of("carry") == ["all carried"]


@has_mpi
@pytest.mark.slow
@pytest.mark.skipif(sanitizer.ADDRESS, reason="takes 4 GiB of memory without its shadow")
def test_more_than_a_message_can_count() -> None:
    assert lines_of("large") == [f"b'head' b'tail' {2**31 + 12345 - 8}"]


@has_mpi
def test_the_other_end_closes() -> None:
    assert lines_of("close") == [
        "1234",
        "mpi:0: the other end is closed, and region 'k' has not come; see why it ended, and open both anew",
    ]


@has_mpi
def test_a_pair_behind_another_one() -> None:
    assert lines_of("again") == ["0", "1", "2"]


@has_mpi
def test_the_other_end_does_nothing() -> None:
    fetched, flushed, *_ = lines_of("stall")
    assert fetched.startswith("mpi:0: region 'k' has not come for 0.2 s; see what")
    assert flushed.startswith("mpi:0: the other end has taken nothing for 0.2 s; see what")


@has_mpi
def test_messages_that_are_no_frames() -> None:
    short, nonsense, long, *_ = lines_of("wrong")
    assert "a message of 5 bytes came, and one of 160 was expected" in short
    assert "what came is no frame" in nonsense
    assert "a message of 1000 bytes came, and one of 160 was expected" in long


@has_mpi
@pytest.mark.parametrize("address", ["mpi:1", "mpi:-1", "mpi:x", "mpi:99999999999"])
def test_ranks_that_are_none(address: str) -> None:
    """This process is a world of its own."""
    code = f"from pykvgraph import stream; stream.open({address!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "InvalidArgumentError: address must be mpi:RANK with a rank below 1" in done.stderr


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r"pip install 'pykvgraph\[mpi\]'"):
        stream.open("mpi:0")
    with pytest.raises(InvalidArgumentError, match="takes no token"):
        stream.open("mpi:0", "secret")
