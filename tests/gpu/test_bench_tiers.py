"""`pykvgraph bench --cache tiers`: what it says of memory; what is fast is for people to judge."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.faults import fault
from support.models import ModelSpec

from pykvgraph.cli import main

pytestmark = pytest.mark.gpu

A_LAYER = 256 * 2 * 4 * 8 * 2  # rows, padded; K and V; heads and their width; F16
N_LAYER = 3
SPEC = ModelSpec(n_layer=N_LAYER, n_head=8, n_head_kv=4)


def bench(path: Path, device: str, *arguments: str) -> Result:
    sizes = ["-p", "0", "-n", "0", "-d", "64", "-r", "1", "-t", "1", "-ub", "32"]
    command = ["bench", "-m", str(path), "-dev", device, *sizes, "--cache", "tiers", *arguments]
    return CliRunner().invoke(main, command)


@pytest.fixture(scope="module")
def path(model_file: Callable[[ModelSpec], Path]) -> Path:
    return model_file(SPEC)


def test_what_is_on_the_device(path: Path, device: str, tmp_path: Path) -> None:
    plot = tmp_path / "tiers.svg"
    result = bench(path, device, "-o", "json", "--plot", str(plot))
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["tiers"]
    held = {row["tier"]: row["cache_bytes"] for row in rows}
    assert held == {"device": N_LAYER * A_LAYER, "-kvt host": 2 * A_LAYER, "-nkvo": 0}
    for row in rows:
        assert row["depth"] == 64
        assert min(row["prompt"], row["generation"], row["compute_bytes"]) > 0
    assert "layer by layer" in plot.read_text(encoding="utf-8")


@pytest.mark.parametrize("option", [["-kvt", "host"], ["-nkvo"]], ids=" ".join)
def test_other_options_change_no_row(path: Path, device: str, option: list[str]) -> None:
    """And what has no room is left out."""
    with fault("working-alloc"):
        result = bench(path, device, *option)
    assert result.exit_code == 0, result.output
    names = [line.split("  ")[0] for line in result.stdout.splitlines()[1:]]
    assert names == ["K and V", "device", "-nkvo"]
    assert "96.0 KiB" in result.stdout
