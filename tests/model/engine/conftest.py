"""For tests of tiers: models, and decoding that takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import where
from support.architectures import ArchSpec
from support.kinds import KINDS

import pykvgraph as kvg
from pykvgraph.engine import fetches


@pytest.fixture(scope="module", params=KINDS, ids=str)
def model(request: Any, architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(request.param), device=where.device) as model:
        yield model


@pytest.fixture
def decoding_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that loading pays, whatever the model's size."""
    monkeypatch.setattr(fetches, "decode_seconds", lambda ctx: lambda first, end: 60.0)
