"""`pykvgraph cells` on the 260K model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.architectures import ArchSpec
from support.recurrent import DELTA_NET

from pykvgraph.cli import main

SCRIPT = "decode 0 12\nseq_rm 0 4 8 # a hole\nseq_add 0 8 -1 -4\ndefrag fill\nupdate\n"


def run(stories: Path, *arguments: str, script: str = SCRIPT) -> Result:
    options = ["cells", "-m", str(stories), *arguments]
    return CliRunner().invoke(main, options, input=script, prog_name="pykvgraph")


def steps(stories: Path, *arguments: str, script: str = SCRIPT) -> list[dict[str, Any]]:
    result = run(stories, "-", "--json", *arguments, script=script)
    assert result.exit_code == 0
    found: list[dict[str, Any]] = json.loads(result.stdout)["steps"]
    return found


def test_json_follows_the_cells(stories: Path) -> None:
    found = steps(stories, "-c", "16")
    assert [step["line"] for step in found] == [0, 1, 2, 3, 4, 5]
    assert [len(step["groups"]) for step in found] == [1] * 6
    groups = [step["groups"][0] for step in found]
    assert [(step["n_used"], step["n_kv"]) for step in groups] == [(0, 0), (12, 12), *[(8, 12)] * 3, (8, 8)]
    positions = [[cell["pos"] for cell in step["cells"]] for step in groups]
    assert positions[2] == [0, 1, 2, 3, 8, 9, 10, 11]
    assert positions[3] == positions[4] == list(range(8))
    assert sorted(positions[5]) == list(range(8))
    assert [cell["shift"] for cell in groups[3]["cells"]] == [0] * 4 + [-4] * 4
    assert (found[5]["stats"]["shifted_cells"], found[5]["stats"]["moved_cells"]) == (4, 4)
    assert [step["attended"] for step in groups] == [None, [0, 12], *[[0, 12]] * 3, [0, 8]]


def test_json_has_all_groups(architecture: Callable[[ArchSpec], Path]) -> None:
    """A window of 8 has lost what came before it; its checkpoint keeps a window's cells."""
    path = architecture(ArchSpec("gemma3", 2, window=8, period=2))
    script = "decode 0 10\ncheckpoint 0\ndecode 0 20\n"
    last = steps(path, "-c", "32", "-np", "2", script=script)[-1]
    window, full = sorted(last["groups"], key=lambda group: group["window"], reverse=True)
    assert (window["kind"], window["window"], full["kind"], full["window"]) == ("window", 8, "full", 0)
    assert [cell["pos"] for cell in full["cells"]] == list(range(30))
    assert {0} == {seq for cell in full["cells"] for seq in cell["seq"]}
    seen = {cell["pos"] for cell in window["cells"] if cell["seq"]}
    kept = {cell["pos"] for cell in window["cells"] if cell["kept"]}
    assert set(range(22, 30)) <= seen and set(range(3, 10)) <= kept
    assert last["checkpoints"][0] == [10]


def test_the_map_after_each_line(stories: Path) -> None:
    result = run(stories, "-", "-c", "16")
    blocks = result.stdout.split("\n\n")
    assert [block.splitlines()[0] for block in blocks[1:]] == [
        "at the start",
        "line 1: decode 0 12",
        "line 2: seq_rm 0 4 8",
        "line 3: seq_add 0 8 -1 -4",
        "line 4: defrag fill",
        "line 5: update  [4 cells shifted, 4 moved, 2.5 KiB]",
    ]
    assert blocks[3].splitlines()[1:4] == [
        "a hole",
        "16 cells: 8 used, n_kv 12, 4 holes",
        " 0 aaaa....aaaa....",
    ]
    assert blocks[4].splitlines()[3] == " " * 11 + "<<<<"
    assert "\x1b" not in result.stdout
    quiet = run(stories, "-", "-c", "16", "-q").stdout
    assert quiet.strip() == blocks[-1].strip()


def test_a_file_and_a_picture(stories: Path, tmp_path: Path) -> None:
    script, picture = tmp_path / "script.txt", tmp_path / "cells.png"
    script.write_text(SCRIPT)
    result = run(stories, str(script), "--plot", str(picture))
    assert (result.exit_code, result.stdout) == (0, run(stories, "-").stdout)
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_demonstration_ends_sorted(stories: Path) -> None:
    result = run(stories, "--json")
    last = json.loads(result.stdout)["steps"][-1]
    sets = [tuple(cell["seq"]) for cell in last["groups"][0]["cells"]]
    runs = [seqs for i, seqs in enumerate(sets) if i == 0 or seqs != sets[i - 1]]
    assert len(runs) == len(set(sets)) > 1
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("line", "words"), [("decode 0 8", "8 tokens"), ("seq_rm 7 0 1", "seq"), ("seq_div 0 0 1 0", "0")]
)
def test_a_failing_operation_is_named(stories: Path, line: str, words: str) -> None:
    result = run(stories, "-", "-c", "16", script=f"decode 0 12\n{line}\nupdate\n")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: line 2, {line}: ")
    assert words in result.stderr
    assert "line 1: decode 0 12" in result.stdout
    assert "line 3" not in result.stdout
    report = json.loads(run(stories, "-", "-c", "16", "--json", script=f"decode 0 12\n{line}\n").stdout)
    assert report["error"].startswith(f"line 2, {line}: ")
    assert len(report["steps"]) == 2


def test_a_bad_line_stops_it_before_anything_runs(stories: Path) -> None:
    result = run(stories, "-", script="decode 0 12\nseq_rm 0 4\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "Error: line 2: seq_rm takes 3 arguments, got 2: expected `seq_rm SEQ P0 P1`\n"


def test_a_script_that_is_no_text(stories: Path, tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_bytes(b"\xff\xfe")
    result = run(stories, str(path))
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1


def test_states_and_checkpoints(architecture: Callable[[ArchSpec], Path]) -> None:
    path = architecture(DELTA_NET)
    script = "decode 0 6\ncheckpoint 0\ndecode 0 4\nseq_cp 0 1 0 -1\nrewind 0 9\nseq_rm 1 5 -1\n"
    result = run(path, "-", "-c", "16", "-np", "2", script=script)
    blocks = [block.splitlines() for block in result.stdout.split("\n\n")[1:]]
    assert blocks[0][-2:] == ["12 states: 0 used", "  ............"]
    assert blocks[2][-3:] == ["12 states: 1 used", "  a...........", "a checkpoints of sequence 0: 6"]
    assert blocks[4][-3:-1] == ["12 states: 2 used", "  +*.........."]
    assert blocks[5][0] == "line 5: rewind 0 9"
    assert blocks[5][-3:-1] == ["12 states: 2 used", "  ab.........."]
    assert result.exit_code == 1
    assert "line 6, seq_rm 1 5 -1: sequence 1 can't go on at position 5" in result.stderr
    found = steps(path, "-c", "16", "-np", "2", script="decode 0 6\ncheckpoint 0\ndecode 0 4\n")[-1]
    assert found["checkpoints"] == [[6], []]
    assert found["states"] == {
        "n_rows": 12,
        "rows": [{"row": 0, "pos": 5, "seq": [], "kept": 1}, {"row": 1, "pos": 9, "seq": [0], "kept": 0}],
    }


def test_a_model_without_states_shows_none(stories: Path) -> None:
    assert "states" not in run(stories, "-").stdout
    step = steps(stories, script="decode 0 6\ncheckpoint 0\ndecode 0 4\nrewind 0 5\n")[-1]
    assert (step["states"], step["checkpoints"]) == (None, [[], [], [], []])
    assert [group["n_used"] for group in step["groups"]] == [5]
