"""The passkey test on a model that can't find keys: what it counts, what it prints, how it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.engines import open_context

import pykvgraph as kvg
from pykvgraph.cli import main
from pykvgraph.demos import passkey
from pykvgraph.models import embedded_model
from pykvgraph.types import CellsView

N_CTX, N_BATCH, N_KEEP = 320, 64, 16


@pytest.fixture(scope="module")
def model(stories: Path) -> Iterator[kvg.Model]:
    with kvg.Model(stories, device="cpu") as loaded:
        yield loaded


@pytest.fixture
def documents(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The tokens of every text that is read from now on."""
    seen: list[list[int]] = []
    read = kvg.LongReader.read

    def record(self: kvg.LongReader, ids: list[int]) -> None:
        seen.append(ids)
        read(self, ids)

    monkeypatch.setattr(kvg.LongReader, "read", record)
    return seen


class Naive:
    """A cache that is a list of [token's index, position, pending shift], in the order of the text."""

    def __init__(self, n_cells: int, n_batch: int, n_keep: int, n_grp: int) -> None:
        self.n_cells, self.n_batch, self.n_keep, self.n_grp = n_cells, n_batch, n_keep, n_grp
        self.cells: list[list[int]] = []
        self.discards = self.shifted = 0

    def read(self, n_tokens: int) -> None:
        for begin in range(0, n_tokens, self.n_batch):
            new = range(begin, min(begin + self.n_batch, n_tokens))
            self.make_room(len(new))
            p0 = max((pos for _, pos, _ in self.cells), default=-1) + 1
            self.cells = [[i, pos, 0] for i, pos, _ in self.cells]  # a decode rotates K first
            last = new.stop == n_tokens
            for j, i in enumerate(new):
                pos = p0 + (j if last else j // self.n_grp)
                self.cells.append([i, pos, pos - p0 - j])

    def make_room(self, n: int) -> None:
        n_discard = -(-self.n_batch // self.n_grp)
        while self.n_cells - len(self.cells) < n:
            self.discards += 1
            end = self.n_keep + n_discard
            self.cells = [
                [i, pos - n_discard, shift - n_discard] if pos >= end else [i, pos, shift]
                for i, pos, shift in self.cells
                if pos < self.n_keep or pos >= end
            ]
            self.shifted += sum(shift != 0 for _, _, shift in self.cells)
            self.cells = [[i, pos, 0] for i, pos, _ in self.cells]


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many cells each shift has to move at least: those that stay, and are beyond what will be used."""
    seen: list[int] = []
    shift = kvg.ContextShift.apply

    def watched(self: kvg.ContextShift, kv: kvg.KVCache, seq: int = 0) -> kvg.ShiftReport:
        pos = kv.cells().pos
        assert self.n_discard is not None
        stay = (pos >= 0) & ((pos < self.n_keep) | (pos >= self.n_keep + self.n_discard))
        seen.append(int(stay[int(stay.sum()) :].sum()))
        return shift(self, kv, seq)

    monkeypatch.setattr(kvg.ContextShift, "apply", watched)
    return seen


@pytest.mark.parametrize("n_grp", [1, 2, 4])
@pytest.mark.parametrize("n_junk", [3, 10, 21])
def test_counters_are_those_of_a_naive_cache(
    model: kvg.Model, documents: list[list[int]], moves: list[int], n_junk: int, n_grp: int
) -> None:
    task = passkey.Task(n_junk=n_junk, n_grp=n_grp, n_keep=N_KEEP)
    with open_context(model, n_ctx=N_CTX, n_batch=N_BATCH) as ctx:
        trial = passkey.run(ctx, task)
    (document,) = documents
    naive = Naive(N_CTX, N_BATCH, N_KEEP, n_grp)
    naive.read(len(document))
    n_question = len(model.tokenizer.encode(passkey.QUESTION, add_special=False))
    naive.make_room(n_question + passkey.N_ANSWER)
    assert trial.n_tokens == len(document) + n_question
    assert (trial.discards, trial.shifted_cells, trial.moved_cells) == (
        naive.discards,
        naive.shifted,
        sum(moves),
    )
    line = key_line(model, document, trial.key)
    assert trial.in_window == (set(line) <= {i for i, _, _ in naive.cells})


def key_line(model: kvg.Model, document: list[int], key: str) -> range:
    """The tokens of the key's line, found in the text that they spell."""
    sentence = f" The pass key is {key}. Remember it. {key} is the pass key."
    ends = [len(model.tokenizer.decode(document[: i + 1])) for i in range(len(document))]
    begin = model.tokenizer.decode(document).index(sentence)
    first = next(i for i, end in enumerate(ends) if end > begin)
    return range(first, next(i for i, end in enumerate(ends) if end >= begin + len(sentence)) + 1)


@pytest.mark.parametrize("i_pos", range(4))
def test_key_cells_moved_is_where_its_values_went(
    model: kvg.Model,
    documents: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    i_pos: int,
) -> None:
    """V doesn't change when positions do, and in the last layer it is different for every token."""
    layer = model.n_layer - 1
    shift = kvg.ContextShift.apply
    rows: list[bytes] = []  # of the key's line, from the first shift on
    moved = 0

    def places(kv: kvg.KVCache) -> dict[bytes, int]:
        values, used = kv.read_v(layer), np.flatnonzero(kv.cells().pos >= 0)
        found = {values[cell].tobytes(): int(cell) for cell in used}
        assert len(found) == len(used)
        return found

    def watched(self: kvg.ContextShift, kv: kvg.KVCache, seq: int = 0) -> kvg.ShiftReport:
        nonlocal moved
        before = places(kv)
        if not rows:  # nothing has moved yet: cells are in the order of the text
            names = {cell: name for name, cell in before.items()}
            rows.extend(names[i] for i in line if i in names)
            assert len(rows) == len(line)
        report = shift(self, kv, seq)
        after = places(kv)
        moved += sum(after[name] != before[name] for name in rows if name in after)
        return report

    task = passkey.Task(n_junk=12, i_pos=i_pos, n_keep=N_KEEP)
    with open_context(model, n_ctx=N_CTX, n_batch=N_BATCH) as ctx:
        plain = passkey.run(ctx, task)
        line = key_line(model, documents[0], plain.key)
        monkeypatch.setattr(kvg.ContextShift, "apply", watched)
        trial = passkey.run(ctx, task)
    assert trial.key_cells_moved == plain.key_cells_moved == moved


def test_the_seed_makes_the_key_and_its_place(model: kvg.Model) -> None:
    with open_context(model, n_ctx=N_CTX, n_batch=N_BATCH) as ctx:
        trials = [passkey.run(ctx, passkey.Task(n_junk=4, seed=seed)) for seed in (1, 1, 2, 3)]
    assert trials[0].key == trials[1].key
    assert len({trial.key for trial in trials}) == 3
    assert all(1 <= int(trial.key) <= passkey.MAX_KEY and 0 <= trial.i_pos < 4 for trial in trials)


@pytest.mark.parametrize(
    ("answer", "found"),
    [("{key}", True), ("{key} is", True), ("{key}1", False), ("no {key}", False), ("", False)],
)
def test_found_is_the_key_and_nothing_else(
    model: kvg.Model, monkeypatch: pytest.MonkeyPatch, answer: str, found: bool
) -> None:
    with open_context(model, n_ctx=N_CTX, n_batch=N_BATCH) as ctx:
        text = answer.format(key=passkey.run(ctx, passkey.Task(n_junk=1)).key)
        monkeypatch.setattr(passkey, "generate", lambda *_, **__: iter([kvg.Piece(text, 0, 0.0, "stop")]))
        assert passkey.run(ctx, passkey.Task(n_junk=1)).found == found


def run(stories: Path, *arguments: str) -> Result:
    options = ["passkey", "-m", str(stories), "-t", "1", "-c", "320", "-b", "64", "--keep", "16"]
    return CliRunner().invoke(main, [*options, *arguments], prog_name="pykvgraph")


def test_json_has_what_was_promised(stories: Path) -> None:
    result = run(stories, "--n-junk", "10", "--i-pos", "6", "--trials", "2", "--json")
    report: dict[str, Any] = json.loads(result.stdout)
    assert (result.exit_code, report["found"]) == (1, 0)
    assert (report["n_trials"], report["n_ctx"]) == (2, 320)
    assert report["n_in_window"] == sum(trial["in_window"] for trial in report["trials"])
    assert report["seconds"] > 0
    trials = report["trials"]
    assert len(trials) == 2
    for trial in trials:
        assert isinstance(trial["key"], str)
        assert isinstance(trial["answer"], str)
        assert trial["found"] is False
        assert trial["i_pos"] == 6
    for name in ("discards", "shifted_cells", "moved_cells", "key_cells_moved", "n_tokens"):
        assert report[name] == sum(trial[name] for trial in trials) > 0


def test_it_shows_each_shift_and_a_verdict(stories: Path) -> None:
    arguments = ("--n-junk", "10", "--i-pos", "6")
    discards = json.loads(run(stories, *arguments, "--json").stdout)["discards"]
    result = run(stories, *arguments)
    lines = result.stdout.splitlines()
    assert sum(line.startswith("  shift: positions 16 to 79 given up, ") for line in lines) == discards
    assert len(lines) == discards + 2
    assert "the key after 6 of 10 lines" in lines[-2]
    assert lines[-1].endswith(": not found")
    assert result.exit_code == 1


def test_exit_code_0_is_for_a_found_key(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = json.loads(run(stories, "--n-junk", "1", "--json").stdout)["trials"][0]["key"]
    monkeypatch.setattr(passkey, "generate", lambda *_, **__: iter([kvg.Piece(key, 0, 0.0, "stop")]))
    assert run(stories, "--n-junk", "1").exit_code == 0
    assert run(stories, "--n-junk", "1", "--trials", "2").exit_code == 1  # the second has another key


@pytest.mark.slow
def test_grid_is_a_table_and_a_picture(stories: Path, tmp_path: Path) -> None:
    path = tmp_path / "grid.png"
    result = run(stories, "-c", "528", "--grid", "--plot", str(path))
    lines = result.stdout.splitlines()
    assert " ".join(lines[0].split()) == "depth 0.5 ctx 1 ctx 2 ctx 3 ctx 4 ctx"
    depths = [line.split() for line in lines if line.split()[0].endswith("%")]
    assert [row[0] for row in depths] == [f"{5 + 10 * i}%" for i in range(10)]
    assert {share for row in depths for share in row[1:]} <= {"0%", "-"}
    # half a context fits; at four, an early key has long been given up
    assert all(row[1] == "0%" for row in depths)
    assert depths[2][5] == "-"
    assert depths[9][5] == "0%"
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert path.stat().st_size > 10_000
    assert result.exit_code == 1


class _Seen:
    """A passkey.run that answers without a model: which keys are in the window, and which are found."""

    def __init__(self, in_window: int, found: int) -> None:
        self.in_window, self.found, self.n = in_window, found, 0

    def __call__(self, *_: object) -> passkey.Trial:
        self.n += 1
        inside = self.n <= self.in_window
        return passkey.Trial("7", "7", not inside or self.n <= self.found, inside, 0, 1, 0, 0, 0, 0, 0.1)


@pytest.mark.parametrize(
    ("in_window", "found", "code"),
    [(0, 0, 1), (1, 1, 0), (1, 0, 1), (20, 20, 0), (20, 19, 1), (50, 50, 0)],
)
def test_a_grid_counts_the_keys_in_the_window(
    stories: Path, monkeypatch: pytest.MonkeyPatch, in_window: int, found: int, code: int
) -> None:
    """And no key in the window is no success; keys that were guessed outside don't count."""
    monkeypatch.setattr(passkey, "run", _Seen(in_window, found))
    result = run(stories, "--grid", "--json")
    report = json.loads(result.stdout)
    assert (report["found"], report["n_in_window"], report["n_trials"]) == (found, in_window, 50)
    assert result.exit_code == code
    monkeypatch.setattr(passkey, "run", _Seen(in_window, found))
    result = run(stories, "--grid")
    assert result.stdout.splitlines()[-1].startswith(f"{found} of {in_window} keys found")
    assert result.exit_code == code
    hopeless = "no key was found: " in result.stdout
    assert hopeless == (in_window > 0 and found == 0)


def test_a_grid_tells_of_each_place_when_it_is_known(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a pipe, where there is no bar. The last place that is told was the last one to be read."""
    seen = _Seen(26, 25)

    def run_until_40(*arguments: object) -> passkey.Trial:
        if seen.n == 40:
            raise KeyboardInterrupt
        return seen(*arguments)

    monkeypatch.setattr(passkey, "run", run_until_40)
    result = run(stories, "--grid", "--trials", "2")
    told = [line.rpartition(", ")[0] for line in result.stderr.splitlines() if " ctx, depth " in line]
    places = [f"{length} ctx, depth {depth}%" for length in ("0.5", "1") for depth in range(5, 100, 10)]
    found = ["100% found"] * 12 + ["50% found"] + ["the key was given up"] * 7
    assert told == [f"{place}: {share}" for place, share in zip(places, found, strict=True)]
    monkeypatch.setattr(passkey, "run", _Seen(0, 0))
    assert run(stories, "--grid", "--json").stderr == ""


def test_a_plot_without_a_grid_is_a_film(stories: Path, tmp_path: Path) -> None:
    path = tmp_path / "film.png"
    options = ["-c", "528", "--n-junk", "10", "--keep", "16"]
    result = run(stories, *options, "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert result.stdout.count("  shift: ") == run(stories, *options).stdout.count("  shift: ")


def test_what_a_film_shows() -> None:
    """The embedded model: before and after each shift, and at the question; the key's line moves once."""
    frames: list[tuple[str, CellsView, list[int]]] = []
    task = passkey.Task(n_junk=40, i_pos=22)
    with (
        kvg.Model(embedded_model(), device="cpu") as model,
        kvg.Context(model, n_ctx=512, n_batch=128) as ctx,
    ):
        passkey.run(ctx, task, on_cells=lambda *frame: frames.append(frame))
    labels = [label for label, _, _ in frames]
    assert labels[:3] == ["full", "shift 1: 128 moved", "full"]
    assert labels[-1] == "the question"
    for label, cells, key in frames:
        if label.startswith("shift"):
            assert cells.n_used == cells.n_kv == 512 - 128
        assert (cells.pos[key] >= 0).all()
    there = [key for _, _, key in frames if key]
    assert len(set(map(tuple, there))) > 1
    assert len(set(map(len, there[1:]))) == 1


@pytest.mark.parametrize("option", ["--n-junk", "--i-pos"])
def test_a_grid_has_its_own_lengths_and_depths(stories: Path, option: str) -> None:
    result = run(stories, "--grid", option, "3")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"leave out {option}" in result.stderr


@pytest.mark.parametrize("arguments", [("--i-pos", "11", "--n-junk", "10"), ("--keep", "300")])
def test_what_cannot_be_is_one_line(stories: Path, arguments: tuple[str, ...]) -> None:
    result = run(stories, *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


def test_no_more_than_4096_of_a_long_context() -> None:
    for trained, n_ctx in ((512, 1056), (4096, 8224), (131072, 8224)):
        model = cast(kvg.Model, SimpleNamespace(n_ctx_train=trained))
        assert passkey.default_n_ctx(model, 2, 32) == n_ctx


def test_no_hadamard(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is typed reaches the context."""
    seen = []

    class Recorded(kvg.Context):
        def __init__(self, model: kvg.Model, **options: Any) -> None:
            seen.append(options["hadamard"])
            super().__init__(model, **options)

    monkeypatch.setattr(kvg, "Context", Recorded)
    for typed in ([], ["--no-hadamard"]):
        result = CliRunner().invoke(main, ["passkey", "--n-junk", "5", "-ctk", "q4_0", *typed])
        assert result.exit_code == 0, result.output
    assert seen == [True, False]
