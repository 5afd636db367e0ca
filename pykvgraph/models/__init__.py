"""The model that comes with the package, trained by this project."""

from __future__ import annotations

from pathlib import Path


def embedded_model() -> Path:
    """Where the embedded GGUF file is."""
    return Path(__file__).parent / "passkey.gguf"
