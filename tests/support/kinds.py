"""Models of each kind that prefixes are kept in another way for: full attention, windows, states."""

from __future__ import annotations

from support.architectures import ArchSpec
from support.recurrent import DELTA_NET

KINDS = [
    ArchSpec("llama", 2, 32, 2, 1, 16, 32),
    ArchSpec("gemma3", 3, 32, 2, 1, 16, 32, window=8),
    DELTA_NET,
]
