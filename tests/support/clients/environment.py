"""Environments that `make clients` makes, with packages that ask the server."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "build" / "clients"


def python_of(name: str) -> Path:
    """The Python of an environment. Skips where it isn't."""
    found = FOLDER / name / "bin" / "python"
    if not (FOLDER / name / "installed").exists():
        pytest.skip(f"{found} is not there: `make clients` makes it")
    return found
