"""What contexts are made with, whoever makes them."""

from __future__ import annotations

from typing import Any

import pytest

import pykvgraph as kvg


def of_made_contexts(monkeypatch: pytest.MonkeyPatch, attribute: str) -> list[Any]:
    """That attribute of every context that is made from now on; the list grows with each."""
    found: list[Any] = []
    make = kvg.Context.__init__

    def spy(ctx: kvg.Context, *arguments: Any, **named: Any) -> None:
        make(ctx, *arguments, **named)
        found.append(getattr(ctx, attribute))

    monkeypatch.setattr(kvg.Context, "__init__", spy)
    return found
