"""Pairs of ends, of each kind of transport that needs nothing but this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from pykvgraph import stream

KINDS = ("memory", "device", "file", "unix", "tcp")
_numbers = count()


@contextmanager
def pair(kind: str, folder: Path, **options: Any) -> Iterator[tuple[stream.Transport, stream.Transport]]:
    """Two ends; options: as stream.open has them, for both."""
    if kind in ("memory", "device", "file"):
        address = f"{kind}:{folder}/{next(_numbers)}"
        with stream.open(address, **options) as one, stream.open(address, **options) as other:
            yield one, other
        return
    with stream.listen(f"unix:{folder}/s" if kind == "unix" else "tcp:0", **options) as listener:
        one, other = met(listener, **options)
    with one, other:
        yield one, other


def met(listener: stream.Listener, **options: Any) -> tuple[stream.Transport, stream.Transport]:
    """An end that connects, and the listener's end of it. options: of the first one."""
    accepted: list[stream.Transport] = []
    with meanwhile(lambda: accepted.append(listener.accept())):
        opened = stream.open(listener.address, **options)
    return opened, accepted[0]


@contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Runs `work` in a thread; at the end of the block it must end, too, and what it raised is raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    except BaseException as error:
        thread.join(20)
        if raised:  # it may be why the block failed
            raise error from raised[0]
        raise
    thread.join(20)
    assert not thread.is_alive()
    if raised:
        raise raised[0]
