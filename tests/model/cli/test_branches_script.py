"""benchmarks/branches.py: prompts that share a beginning, over HTTP, beside llama-server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import scripts
from support.architectures import ArchSpec

import pykvgraph as kvg


@pytest.fixture(scope="module")
def script() -> Any:
    return scripts.imported("branches")


def test_a_shared_beginning_is_decoded_twice_at_most(
    script: Any, architecture: Callable[[ArchSpec], Path], tmp_path: Path
) -> None:
    """Nobody knows before the second prompt where the prompts part. llama-server decodes it for each."""
    if not script.SERVER.exists():
        pytest.skip(f"there is no llama-server at {script.SERVER}")
    path = script.with_tokenizer(
        architecture(ArchSpec("qwen35", n_layer=4, period=4, state_heads=4)), tmp_path / "model.gguf"
    )
    script.N_THREADS = 1
    with kvg.Model(path, device="cpu") as model:
        costs = {
            name: script.measure("short", model, command, tmp_path / "log")
            for name, command in script.commands(path, ["default"], script.SERVER)
        }
    ours, theirs = costs.values()
    n_shared, own = script.CASES["short"]
    assert ours.n_prompt == theirs.n_prompt == (n_shared + 60) * len(own)
    assert ours.n_decoded <= 2 * n_shared + sum(own)
    assert ours.n_decoded <= 0.45 * theirs.n_decoded
    assert ours.seconds > 0 and theirs.seconds > 0
