"""Sizes for people."""

from __future__ import annotations


def size_text(n_bytes: int) -> str:
    """Bytes for people: `1.1 MiB`."""
    if n_bytes < 1024:
        return f"{n_bytes} B"
    power = min((n_bytes.bit_length() - 1) // 10, 4)
    return f"{n_bytes / 1024**power:.1f} {'KMGT'[power - 1]}iB"


def parameters_text(n_params: int) -> str:
    """A number of parameters for people: `0.3 M parameters`, `8.0 B parameters`."""
    if n_params < 1_000_000_000:
        return f"{n_params / 1e6:.1f} M parameters"
    return f"{n_params / 1e9:.1f} B parameters"
