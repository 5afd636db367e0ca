"""`pykvgraph cluster simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pykvgraph.bench.cluster_simulation import simulation
from pykvgraph.cli import main


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["cluster", "simulate", *arguments])
    return result.exit_code, result.output


def test_what_is_told(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "people_for", lambda _: 3)
    monkeypatch.setattr(simulation, "LEAST_REQUESTS", 200)
    picture = tmp_path / "a.png"
    code, output = run(str(stories), "--workers", "1,3", "--json", "--plot", str(picture))
    assert code == 0, output
    rows = json.loads(output)["runs"]
    assert [(row["n_workers"], row["policy"]) for row in rows] == [
        (n, policy)
        for n in (1, 3)
        for policy in simulation.POLICIES
        if (n, policy) != (1, "roles")  # one worker does both
    ]
    assert all((row["n_readers"] > 0) == (row["policy"] == "roles") for row in rows)
    assert all(row["of_index"] == 1.0 for row in rows if row["policy"] == "index")
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, output = run(str(stories), "--workers", "2")
    assert code == 0 and "central index" in output and "stories260K, workers: 2" in output


@pytest.mark.parametrize("workers", ["0", "10001", "a", ""])
def test_no_such_number(stories: Path, workers: str) -> None:
    code, output = run(str(stories), "--workers", workers)
    assert code == 2 and "workers" in output


def test_no_model(tmp_path: Path) -> None:
    assert run(str(tmp_path / "none.gguf"))[0] == 1
    path = tmp_path / "no.gguf"
    path.write_bytes(b"no model")
    code, _ = run(str(path))
    assert code == 1
