"""Models with recurrent layers, for the tests of states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import where
from support.architectures import ArchSpec
from support.recurrent import DELTA_NET, LIKE_LARGE, SPECS, WINDOWED

import pykvgraph as kvg


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Not as the fixture's params: when this file is imported the device is not chosen yet."""
    if "recurrent" in metafunc.fixturenames:
        specs = SPECS if where.is_cpu() else [*LIKE_LARGE, WINDOWED]
        metafunc.parametrize("recurrent", specs, ids=str, indirect=True, scope="module")


@pytest.fixture(scope="module")
def recurrent(
    request: pytest.FixtureRequest, architecture: Callable[[ArchSpec], Path]
) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(request.param), device=where.device) as model:
        yield model


@pytest.fixture(scope="module")
def delta_net(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(DELTA_NET), device=where.device) as model:
        yield model
