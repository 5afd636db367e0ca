from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.served import N_SLOTS, served

import pykvgraph as kvg

STORIES = Path(__file__).parents[2] / "data" / "stories260K.gguf"


def load() -> kvg.Engine:
    """As `pykvgraph serve -c 2048 -np 4` does."""
    return kvg.Engine(kvg.Model(STORIES, device="cpu"), n_ctx=2048, n_seq_max=N_SLOTS, overcommit=True)


@pytest.fixture(scope="package")
def address() -> Iterator[str]:
    """A server of stories260K."""
    with served(load, model_path=str(STORIES), n_ctx_slot=512, metrics=True, max_body=1 << 16) as (url, _):
        yield url


@pytest.fixture
def client(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=30) as client:
        yield client
