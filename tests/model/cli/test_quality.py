"""`pykvgraph quality` on a small model: what it prints, draws and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import pykvgraph as kvg
from pykvgraph.cli import main
from pykvgraph.cli.quality import _LEAST_LENGTH, _TASKS
from pykvgraph.demos.quality import LEAST_LENGTH
from pykvgraph.demos.quality_tasks import TASKS

ROOT = Path(__file__).parents[3]
STORIES, TEXT = str(ROOT / "tests/data/stories260K.gguf"), str(ROOT / "docs/glossary.md")
SMALL = ("-m", STORIES, "-dev", "none", "-t", "1", "-f", TEXT, "--length", "100", "--trials", "2")
CASES = ("--case", "edit 20:50", "--case", "shift keep=4 discard=30", "--case", "ctk bf16 link 2x30")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["quality", *arguments], env={"COLUMNS": "120"})


def test_the_object() -> None:
    """With the fields that quality.md promises; the reference comes first."""
    result = run(*SMALL, *CASES, "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert (told["n_trials"], told["length"], told["seed"]) == (2, 100, 1)
    assert [each["case"] for each in told["cases"]] == ["full", *CASES[1::2]]
    for each in told["cases"]:
        assert set(each) == {
            *("case", "kl_mean", "kl_median", "kl_99", "same_top", "perplexity", "n_cells", "kept", "tasks")
        }
    full, *others = told["cases"]
    assert (full["kl_mean"], full["same_top"], full["n_cells"], full["tasks"]) == (0.0, 1.0, 100, {})
    assert all(each["kl_mean"] > 0 for each in others)


def test_tasks_and_a_picture(tmp_path: Path) -> None:
    """A small model knows nothing; what was erased is gone."""
    picture = tmp_path / "quality.png"
    arguments = ("--length", "420", "--tasks", "niah_single_1,erase", "--plot", str(picture))
    result = run(*SMALL[:-4], "--trials", "1", *arguments, *CASES[:2])
    assert result.exit_code == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    _, full, edit, head, *tasks = (line.split() for line in result.stdout.splitlines())
    assert (full[0], full[-1], edit[-2:]) == ("420", "full", ["edit", "20:50"])
    assert head == ["right", "task", "case"]
    assert [row[1] for row in tasks[::2]] == ["niah_single_1", "erase", "erase_kept", "erase_gone"]
    assert [row[0] for row in tasks[-2:]] == ["100%", "100%"]


def test_what_is_left_of_a_text() -> None:
    """A line for each policy: `window` keeps the first 4 tokens and the last ones, of parts of two or so."""
    arguments = ("--length", "128", "--case", "forget window .25", "--case", "forget keydiff cells=96")
    result = run(*SMALL[:-4], "--trials", "1", *arguments)
    assert result.exit_code == 0, result.stderr
    *_, head, window, keydiff = result.stdout.splitlines()
    assert head.startswith("Cells left")
    assert window == "##" + "." * 16 + "#" * 46 + " forget window .25"
    assert keydiff.endswith("# forget keydiff cells=96")
    told = json.loads(run(*SMALL[:-4], "--trials", "1", *arguments, "--json").stdout)["cases"]
    assert [each["n_cells"] for each in told] == [128, 96, 96]
    assert [2 * sum(each["kept"]) for each in told] == [128, 96, 96]


def test_what_is_left_where_a_question_is_read_with_the_text() -> None:
    """A line, too; composite cells, which share a position, have none."""
    cases = ("--case", "forget window .25 asked", "--case", "forget keydiff .25 composite")
    result = run(*SMALL[:-4], "--trials", "1", "--length", "420", "--tasks", "niah_single_1", *cases)
    assert result.exit_code == 0, result.stderr
    *_, head, window = result.stdout.splitlines()
    assert head.startswith("Cells left") and window.endswith("# forget window .25 asked")


def test_tasks_of_the_option() -> None:
    """The verb names them, and the least length, without importing them."""
    assert (tuple(TASKS), LEAST_LENGTH) == (_TASKS, _LEAST_LENGTH)


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured until then is told."""
    decode, calls = kvg.Context.decode, [0]

    def interrupted(self: kvg.Context, *arguments: Any, **others: Any) -> None:
        calls[0] += 1
        if calls[0] == 30:
            raise KeyboardInterrupt
        decode(self, *arguments, **others)

    monkeypatch.setattr(kvg.Context, "decode", interrupted)
    result = run(*SMALL[:-2], "--trials", "9", "--case", "edit 20:50", "--json")
    assert result.exit_code == 130
    assert 0 < json.loads(result.stdout)["n_trials"] < 9
    calls[0] = 29
    result = run(*SMALL, "--json")
    assert (result.exit_code, json.loads(result.stdout)["cases"]) == (130, [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--case", "cut 5:9"), "'cut 5:9' is no case"),
        (("--case", "ctk q8_0"), "blocks of 32 values"),
        (("--tasks", "niah,erase"), "'niah' is no task"),
        (("--tasks", "chat"), "chat needs"),
        (("--case", "link 9x99"), "link 9x99 needs more tokens"),
        (("--case", "forget lru 0.5"), "'forget lru 0.5' is no case"),
        (("--case", "forget keydiff cells=68"), "budget must be"),
        (("--case", "forget keydiff 0.9"), "forget keydiff: 0.9 of a text of 100 tokens is 90; 32 may be"),
        (("--length", "15"), "15 is not in the range x>=16"),
        (("--case", "forget window .5 asked"), "no task asks anything"),
        (("--case", "shift keep=4 discard=50"), "there are 50 cells, too few for both"),
        (("--length", "100000"), "give a longer one"),
        (("--trials", "0"), "--trials"),
        (("--plot", "picture.doc"), "is no picture's name"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], said: str) -> None:
    result = run(*SMALL, *arguments)
    assert result.exit_code in (1, 2)
    assert said in " ".join(result.stderr.split()), result.stderr
    assert result.stdout == ""


def test_without_a_text() -> None:
    result = run("-m", STORIES)
    assert result.exit_code == 2 and "-f" in result.stderr
