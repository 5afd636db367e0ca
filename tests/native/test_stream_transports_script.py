"""benchmarks/stream_transports.py, with few bytes."""

from __future__ import annotations

from typing import Any

import pytest
from support import scripts


@pytest.fixture(scope="module")
def script() -> Any:
    return scripts.imported("stream_transports")


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_turn_of_each(script: Any, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(script, "SIZES", {"small": (100_000, 3)})
    row = script.measure(kind, "small", 3)
    assert row["transport"] == kind
    assert row["bare"] > 0
    assert row["share"] > 0


def test_threads(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "SIZES", {"small": (100_000, 3)})
    assert set(script.measure("memory", "small", 3)) == {"transport", "regions", "flush"}


def test_turns_change_places(script: Any) -> None:
    assert script.turns(3) == ["bare", "flush", "flush", "bare", "bare", "flush"]
