"""One of two ranks of MPI that do what the name says; rank 1 prints what a test looks at.

mpiexec -n 2 python -m support.mpi_ends NAME
"""

from __future__ import annotations

import random
import sys
import time

from mpi4py import MPI

from pykvgraph import stream
from pykvgraph.errors import TransportError

ME = MPI.COMM_WORLD.Get_rank()
OTHER = f"mpi:{1 - ME}"


def regions() -> list[tuple[str, bytes]]:
    rng = random.Random(0)
    sizes = [0, 1, 2**19 - 1, 2**19, 2**19 + 1, 5 * 2**20 + 7, *(rng.randrange(5000) for _ in range(30))]
    return [(f"layer{rng.randrange(8)}/k", rng.randbytes(n_bytes)) for n_bytes in sizes]


def carry() -> None:
    """Regions in another order than they were flushed, and an answer."""
    with stream.open(OTHER, timeout=20) as end:
        if ME == 0:
            for key, region in regions():
                end.flush(key, region)
            end.fetch("done", bytearray())
            assert (end.flushes, end.bytes_sent) == (36, sum(len(region) for _, region in regions()))
            return
        for wanted in sorted({key for key, _ in regions()}, reverse=True):
            for key, region in regions():
                if key == wanted:
                    into = bytearray(len(region))
                    end.fetch(key, into)
                    assert into == region, key
        end.flush("done", b"")
        print("all carried")


def large() -> None:
    """More than 2 GiB, which a message of MPI couldn't count."""
    n_bytes = 2**31 + 12345
    with stream.open(OTHER, timeout=20) as end:
        if ME == 0:
            data = bytearray(n_bytes)
            data[:4], data[-4:] = b"head", b"tail"
            end.flush("large", data)
            end.fetch("done", bytearray())
            return
        into = bytearray(n_bytes)
        end.fetch("large", into)
        print(bytes(into[:4]), bytes(into[-4:]), into.count(0))
        end.flush("done", b"")


def close() -> None:
    """What was flushed can be fetched after the goodbye; then the other end hears of it."""
    with stream.open(OTHER, timeout=20) as end:
        if ME == 0:
            end.flush("last", b"1234")
            return
        while not MPI.COMM_WORLD.Iprobe(0, end._tag + 1):  # type: ignore[attr-defined]
            pass  # the goodbye is there
        into = bytearray(4)
        end.fetch("last", into)
        said = [bytes(into).decode()]
        start = time.monotonic()
        try:
            end.fetch("k", into)
        except TransportError as error:
            said.append(str(error))
        assert time.monotonic() - start < 5
        print("\n".join(said))


def again() -> None:
    """A second pair between the same ranks: what was left in the first one is not met there."""
    for i in range(3):
        with stream.open(OTHER, timeout=20) as end:
            if ME == 0:
                end.flush("left", b"old")
                end.flush("k", str(i).encode())
                end.fetch("done", bytearray())
            else:
                into = bytearray(1)
                end.fetch("k", into)
                print(into.decode())
                end.flush("done", b"")


def stall() -> None:
    """The other end does nothing: both calls end, and so does the process."""
    for is_fetch in (True, False):
        with stream.open(OTHER, timeout=0.2) as end:
            if ME == 0:
                time.sleep(2)  # the other process may be slow on a busy machine
                continue
            try:
                if is_fetch:
                    end.fetch("k", bytearray(1))
                else:
                    end.flush("k", bytes(2**24))
            except TransportError as error:
                print(error)


def wrong() -> None:
    """Messages that are no frames."""
    for message in (b"short", b"x" * 160, b"x" * 1000):
        with stream.open(OTHER, timeout=20) as end:
            if ME == 0:
                MPI.COMM_WORLD.Send([message, MPI.BYTE], 1, end._tag)  # type: ignore[attr-defined]
                continue
            try:
                end.fetch("k", bytearray(1))
            except TransportError as error:
                print(error)


SCENES = {scene.__name__: scene for scene in (carry, large, close, again, stall, wrong)}

if __name__ == "__main__":
    SCENES[sys.argv[1]]()
