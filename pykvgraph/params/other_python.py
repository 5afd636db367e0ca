"""Other processes that run Python with this one's packages."""

from __future__ import annotations

import sys


def python_command(code: str) -> list[str]:
    """The command of another Python that runs `code` with this one's packages, wherever this one was started.

    The folder in which a process is started comes first in Python's own search, and may hold a source tree.
    """
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"]
