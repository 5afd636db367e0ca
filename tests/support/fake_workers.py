"""Workers' processes that are other programs."""

from __future__ import annotations

import pytest

from pykvgraph.cluster import workers as processes


def starts(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Workers are this program, which has read its order."""
    code = (
        "import json, os, sys, time; path = sys.stdin.readline().strip();"
        "order = json.loads(sys.stdin.readline())\n" + code
    )
    monkeypatch.setattr(processes, "_START", code)
