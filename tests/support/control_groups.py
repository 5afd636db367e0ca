"""A control group's folder, written by hand."""

from __future__ import annotations

from pathlib import Path


def write_group(folder: Path, **files: str) -> None:
    """files: their texts, by their names with "__" in place of dots."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
