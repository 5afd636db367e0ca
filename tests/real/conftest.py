"""The models and the text that `make real` fetches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support import real
from support.real import Libllama

import pykvgraph as kvg

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips all tests of this folder where they are not."""
    wanted = (real.SMOLLM2, real.GEMMA3, real.NEWS, real.MINILM)
    missing = [path.name for path in wanted if not path.exists()]
    if missing:
        reason = f"build/real has no {', '.join(missing)}: `make real` fetches what these tests need"
        for item in items:
            if item.path.is_relative_to(HERE):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def smollm2() -> Iterator[kvg.Model]:
    """30 layers, trained for 8,192 positions, to chat."""
    with kvg.Model(real.SMOLLM2, device="cpu") as model:
        yield model


@pytest.fixture(scope="session")
def gemma3() -> Iterator[kvg.Model]:
    """18 layers, of which 15 see 512 positions; a base model."""
    with kvg.Model(real.GEMMA3, device="cpu") as model:
        yield model


@pytest.fixture(scope="session")
def smollm2_f32() -> Iterator[kvg.Model]:
    """The same weights in F32, where two ways to the same sums are as one: no activation is rounded."""
    with kvg.Model(real.in_f32(real.SMOLLM2), device="cpu") as model:
        yield model


@pytest.fixture(scope="session")
def gemma3_f32() -> Iterator[kvg.Model]:
    """Gemma's weights in F32."""
    with kvg.Model(real.in_f32(real.GEMMA3), device="cpu") as model:
        yield model


@pytest.fixture(scope="session")
def libllama() -> Iterator[Libllama]:
    """SmolLM2 in libllama."""
    with Libllama(real.SMOLLM2) as referee:
        yield referee


@pytest.fixture(scope="session")
def libllama_f32() -> Iterator[Libllama]:
    """SmolLM2 in libllama, with the weights in F32."""
    with Libllama(real.in_f32(real.SMOLLM2)) as referee:
        yield referee
