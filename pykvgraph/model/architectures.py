"""The architectures that run here, and how near each is to libllama."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

TABLE = "architectures.json"  # written by `pytest --write-architectures`, in tests/


@dataclass(frozen=True)
class Architecture:
    """One architecture, and what the tests saw of it.

    name: `general.architecture` in its files. cells: what its layers keep of earlier tokens, as the files of
    the tests have it: "every position", "window", "short_conv", "delta_net" or "mamba2". files: how many
    random models were compared with libllama, by normalized mean squared errors of the logits. exact: the
    largest one with plain attention over an F32 cache, in files of F32 weights. worst: with an F16 cache,
    plain and flash attention, on the file that comes nearest to what is allowed: twice `own`, or 1e-6. own:
    that between libllama's flash and plain attention, on the same file. edited: the largest one after random
    edits of the cache, beside a fresh context that decodes the same tokens; None where the tests of edits
    have a model of another kind.
    """

    name: str
    cells: tuple[str, ...]
    files: int
    exact: float | None
    worst: float
    own: float
    edited: float | None


def architectures() -> list[Architecture]:
    """All of them, by name."""
    text = resources.files("pykvgraph.model").joinpath(TABLE).read_text(encoding="utf-8")
    return [Architecture(**{**row, "cells": tuple(row["cells"])}) for row in json.loads(text)]


def figure_text(figure: float | None) -> str:
    """An error as tables show it: 0, 2.4e-09, or nothing."""
    if figure is None:
        return ""
    return f"{figure:.1e}" if figure else "0"
