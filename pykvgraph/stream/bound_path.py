"""A path that a socket listens at: for its owner alone, and gone when nobody listens any more."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator

_EVERYONE_WAITS = 0.01  # seconds between two tries for the folder


class BoundPath:
    """Binds a socket, and listens. What is left of a listener that died makes way. Raises OSError."""

    def __init__(self, listening: socket.socket, path: str, timeout: float) -> None:
        self.path = path
        os.fchmod(listening.fileno(), 0o600)  # what bind() makes has this mode from the start
        with _folder_locked(path, timeout):
            if _is_left_over(path):
                os.unlink(path)
            listening.bind(path)
            self._made = os.lstat(path)
            listening.listen()

    def remove(self) -> None:
        """Unless somebody else has put something there."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(self.path), self._made):
                os.unlink(self.path)


@contextlib.contextmanager
def _folder_locked(path: str, timeout: float) -> Iterator[None]:
    """So that of two that find the same leftover, one doesn't remove what the other one has just made."""
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + timeout
    try:
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_EVERYONE_WAITS)
        yield
    finally:
        os.close(folder)


def _is_left_over(path: str) -> bool:
    """Whether a socket is there at which nobody listens. Anything else is an OSError when it is bound."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(path)
    except OSError as error:
        return error.errno == errno.ECONNREFUSED
    return False
