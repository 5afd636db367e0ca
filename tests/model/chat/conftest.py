"""Models to talk to, with a chat template: one that knows stories, random ones with states and windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.architectures import ArchSpec
from support.talk import CHATML, with_template

import pykvgraph as kvg

STATES = ArchSpec("qwen35", n_layer=4, period=4, state_heads=4)
WINDOWS = ArchSpec("gemma3", n_layer=4, window=24, period=2)


@pytest.fixture(scope="module")
def stories_model(stories: Path) -> Iterator[kvg.Model]:
    with kvg.Model(stories, device="cpu") as model:
        yield with_template(model, CHATML)


@pytest.fixture(scope="module")
def states_model(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(STATES), device="cpu") as model:
        yield with_template(model, CHATML)


@pytest.fixture(scope="module")
def windows_model(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(WINDOWS), device="cpu") as model:
        yield with_template(model, CHATML)


@pytest.fixture(scope="module", params=["stories_model", "states_model", "windows_model"])
def model(request: pytest.FixtureRequest) -> kvg.Model:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, kvg.Model)
    return found
