"""Models whose vocabulary has marks of thoughts."""

from __future__ import annotations

from pathlib import Path

from support.gguf_parts import take_apart


def with_marks(model: Path, path: Path) -> Path:
    """The same model; its last two tokens are marks of thoughts."""
    parts = take_apart(model.read_bytes())
    for name, values in (("tokens", [b"<think>", b"</think>"]), ("token_type", [4, 4])):
        key = parts.find(f"tokenizer.ggml.{name}")
        assert key is not None
        assert isinstance(key.value, list)
        key.value[-2:] = values
    parts.raw().write(path)
    return path
