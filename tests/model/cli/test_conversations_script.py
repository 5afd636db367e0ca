"""benchmarks/conversations.py: conversations with cells for few of them, over HTTP."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
from support import scripts

import pykvgraph as kvg
from pykvgraph.bench.servers import Client, started


@pytest.fixture(scope="module")
def script() -> Any:
    return scripts.imported("conversations")


@pytest.mark.slow
def test_what_fits_is_not_decoded_again(script: Any, stories: Path, tmp_path: Path) -> None:
    """Of 4 conversations all fit; of 12 with cells for one, old tokens are counted as they are."""
    sizes = {"turns": 3, "new": 20, "say": 4, "threads": 1, "cache_ram": 0, "server": script.SERVER}
    again = []
    for talks, fit in ((4, 8), (12, 1)):
        args = argparse.Namespace(talks=talks, fit=fit, **sizes)
        name, command = next(script.commands(stories, args))
        assert name == script.OURS
        with (
            kvg.Model(stories, device="cpu") as model,
            (tmp_path / "log").open("ab") as log,
            started(command, log) as port,
        ):
            found = script.converse(Client(port, model.tokenizer), model.n_vocab, args)
        assert found["old"] == talks * ((24 - 1) + (48 - 1))
        assert found["kept_share"] == pytest.approx(1 - found["again"] / found["old"], abs=1e-4)
        again.append(found["again"])
    assert again[0] == 0
    assert again[1] > 0.5 * found["old"]
