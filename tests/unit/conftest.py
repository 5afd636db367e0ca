"""These tests need no native library: without one, the package's modules are imported but not the package."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

try:
    import pykvgraph  # noqa: F401
except ImportError:
    package = ModuleType("pykvgraph")
    package.__path__ = [str(Path(__file__).parents[2] / "pykvgraph")]
    sys.modules["pykvgraph"] = package
