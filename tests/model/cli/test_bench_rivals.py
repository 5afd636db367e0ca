"""`pykvgraph bench --vs llama-bench`: programs that take turns with ours, and those that fail."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support import ctrl_c, fake_llama_bench
from support.served import RIVAL

from pykvgraph.bench import llama_bench
from pykvgraph.bench.llama_bench import LlamaBench
from pykvgraph.cli import main
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.params.params import ContextParams

FAKE = [sys.executable, fake_llama_bench.__file__]
REAL = RIVAL.with_name("llama-bench")


def bench(stories: Path, arguments: str, *rivals: str) -> Result:
    beside = [word for rival in rivals for word in ("--vs", rival)]
    return CliRunner().invoke(main, ["bench", "-m", str(stories), "-t", "1", *arguments.split(), *beside])


def fake(*options: object) -> str:
    return shlex.join([*FAKE, *map(str, options)])


def rows_of(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(result.stdout)["results"]
    return rows


def starts(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_by_turns_on_the_same_file(stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for what ours does, and its last run counts, not the one that warms up."""
    log = tmp_path / "log"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    arguments = "-p 8 -n 4 -d 0,64 -r 2 -b 64 -ub 32 -ctk f32 --json"
    rows = rows_of(bench(stories, arguments, "libllama", fake("--log", log)))
    name = f"{Path(sys.executable).name} {FAKE[1]} --log {log} ({fake_llama_bench.COMMIT})"
    tests = [(test, depth) for depth in (0, 64) for test in ("pp8", "tg4")]
    assert [(row["test"], row["depth"], row["engine"]) for row in rows] == [
        (*test, engine)
        for test in tests
        for engine in ("pykvgraph", "libllama -fa 1", "libllama -fa 0", name)
    ]
    for ours, row in zip(rows[::4], rows[3::4], strict=True):
        n_tokens = int(row["test"][2:])
        assert row["version"] == fake_llama_bench.COMMIT
        assert row["refused"] is None
        assert row["seconds"] == pytest.approx([n_tokens / 1000] * 2)
        assert row["median"] == pytest.approx(1000)
        assert row["ratio"] == pytest.approx(ours["median"] / 1000)
    first, *others = starts(log)
    assert (first["p"], first["n"]) == (1, 0)
    # a round that warms up, and two that are measured
    assert [(each["p"], each["n"], each["d"]) for each in others] == [
        asked for asked in ((8, 0, 0), (0, 4, 0), (8, 0, 64), (0, 4, 64)) for _ in range(3)
    ]
    same = {"m": str(stories), "t": "1", "b": "64", "ub": "32", "ctk": "f32", "ctv": "f16", "o": "json"}
    for each in (first, *others):
        assert same.items() <= each.items()
        assert (each["ngl"], each["dev"], each["gpus"]) == ("0", "none", "")


def test_on_a_device(stories: Path, tmp_path: Path) -> None:
    """All of the model goes there; a program that can't be told so is refused."""
    log = tmp_path / "log"
    words, params = [*FAKE, "--log", str(log)], ContextParams(n_threads=1)
    LlamaBench("a", words, stories, params, "Vulkan1", None)
    assert [(each["ngl"], each["dev"]) for each in starts(log)] == [("999", "Vulkan1")]
    with pytest.raises(InvalidArgumentError, match="a has no -dev"):
        LlamaBench("a", [*words, "--lacks", "dev"], stories, params, "Vulkan1", None)


def test_a_fork_without_a_depth(stories: Path, tmp_path: Path) -> None:
    """ik_llama.cpp's has -gp, for tokens behind a prompt; what neither can do is told beside the rest."""
    log = tmp_path / "log"
    arguments = "-p 8 -n 4 -d 0,64 -r 1 -o json"
    rows = rows_of(bench(stories, arguments, fake("--lacks", "d,dev", "--log", log)))[1::2]
    assert [(row["test"], row["depth"], row["median"]) for row in rows] == [
        ("pp8", 0, pytest.approx(1000)),
        ("tg4", 0, pytest.approx(1000)),
        ("pp8", 64, None),
        ("tg4", 64, pytest.approx(1000)),
    ]
    assert [(row["seconds"], row["refused"], row["ratio"]) for row in rows if row["refused"]] == [
        ([], "it has no -d, for a prompt behind other tokens", None)
    ]
    assert [(each["p"], each["n"], each["gp"], each["dev"]) for each in starts(log)[-2:]] == [
        (0, 0, "64,4", None)
    ] * 2
    lines = bench(stories, "-p 8 -n 4 -d 64 -r 1", fake("--lacks", "d,gp")).stdout.splitlines()
    assert [line.split("left out: ")[-1] for line in lines if "left out" in line] == [
        "it has no -d, for a prompt behind other tokens",
        "it has neither -d nor -gp, for tokens behind others",
    ]
    printed = bench(stories, "-p 8 -n 0 -d 64 -r 1 -o csv", fake("--lacks", "d")).stdout
    ours, other = csv.DictReader(io.StringIO(printed))
    assert (other["median"], other["refused"][:12]) == ("", "it has no -d")
    assert float(ours["median"]) > 0


def test_words_among_the_results(stories: Path) -> None:
    rows = rows_of(bench(stories, "-p 8 -n 0 -r 1 --json", fake("--does", "talks")))
    assert rows[1]["median"] == pytest.approx(1000)


def test_cache_tests_are_not_for_programs(stories: Path) -> None:
    rows = rows_of(bench(stories, "-p 0 -n 0 -d 64 -r 1 --cache holes --json", fake()))
    assert {row["engine"] for row in rows} == {"pykvgraph"}


def test_two_programs_and_a_variable(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line in the environment is one, with its blanks."""
    two = rows_of(bench(stories, "-p 8 -n 0 -r 1 --json", fake(), fake("--lacks", "d")))
    assert [row["engine"].partition(".py")[2] for row in two[1:]] == [" (abc1234)", " --lacks d (abc1234)"]
    monkeypatch.setenv("KVGRAPH_VS", fake("--lacks", "d"))
    assert [row["engine"] for row in rows_of(bench(stories, "-p 8 -n 0 -r 1 --json"))] == [
        two[0]["engine"],
        two[2]["engine"],
    ]


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("fails", "failed (exit code 3): error: no memory for this"),
        ("crashes", "failed (SIGSEGV)\n"),
        ("prints words", "printed no result as JSON; its last line: | model | test | t/s |"),
        ("prints two", "printed 2 results, not 1"),
        ("measures less", "measured {'n_prompt': 3}, and was asked for {'n_prompt': 8, 'n_gen': 0}"),
        ("measures nothing", "printed no result as JSON"),
    ],
)
def test_a_program_that_fails_is_an_error_of_one_line(stories: Path, does: str, why: str) -> None:
    result = bench(stories, "-p 8 -n 0 -r 1", fake("--does", does))
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert why in result.stderr
    assert result.stderr.count("\n") == 1


def test_what_is_no_llama_bench(stories: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(b"\0\1\2")
    data.chmod(0o755)
    for arguments, rival, why in (
        ("", "no-such-bench", "there is no program no-such-bench"),
        ("", "echo", "echo is no llama-bench: its --help has no --n-gen"),
        ("", str(data), "data can't be started: Exec format error"),
        ("--swa-full", fake(), "llama-bench has no such option"),
        ("--server 1x1", fake(), ""),
    ):
        result = bench(
            stories, f"-p 8 -n 0 -r 1 {arguments}", rival, *(["sh"] if "server" in arguments else [])
        )
        assert result.exit_code == 1
        assert result.stderr.startswith("Error: ")
        assert why in result.stderr


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_program_that_hangs_is_killed(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_bench, "_TURN_SECONDS", 4.0)
    log = tmp_path / "log"
    result = bench(stories, "-p 8 -n 0 -r 1", fake("--does", "hangs", "--log", log))
    assert result.exit_code == 1
    assert "had not ended after 4 s, and was killed" in result.stderr
    pids = [int(pid) for pid in Path(f"{log}.pids").read_text().split()]
    assert len(pids) == 2  # its child, too
    until(lambda: not any(map(is_alive, pids)))


def test_ctrl_c_kills_the_program(stories: Path, tmp_path: Path) -> None:
    log, told = tmp_path / "log", tmp_path / "log.pids"
    arguments = ["-m", str(stories), "-t", "1", "-p", "8", "-n", "0", "--json"]
    command = [sys.executable, "-m", "pykvgraph", "bench", *arguments]
    with ctrl_c.heard():
        process = subprocess.Popen(
            [*command, "--vs", fake("--does", "hangs", "--log", log)], stdout=subprocess.PIPE, text=True
        )
    with process:
        until(lambda: told.exists() and told.read_text().endswith("\n"))
        process.send_signal(signal.SIGINT)
        found = json.loads(process.communicate(timeout=60)[0])
    assert process.returncode == 130
    assert found["results"] == []
    pids = [int(pid) for pid in told.read_text().split()]
    until(lambda: not any(map(is_alive, pids)))


def test_the_real_one(stories: Path, tmp_path: Path) -> None:
    """Its tokens a second are those that it prints itself, of the last run of each start."""
    if not os.access(REAL, os.X_OK):
        pytest.skip("there is no llama-bench to compare with")
    log, program = tmp_path / "log", tmp_path / "llama-bench"
    program.write_text(f'#!/bin/sh\n{shlex.quote(str(REAL))} "$@" | tee -a {log}\n')
    program.chmod(0o755)
    rows = rows_of(bench(stories, "-p 32 -n 8 -d 0,64 -r 2 --json", str(program)))
    ours, theirs = rows[::2], rows[1::2]
    assert [(row["test"], row["depth"]) for row in theirs] == [
        (test, depth) for depth in (0, 64) for test in ("pp32", "tg8")
    ]
    (commit,) = set(re.findall(r'"build_commit": "([0-9a-f]{7,})"', log.read_text()))
    assert {(row["engine"], row["version"]) for row in theirs} == {(f"llama-bench ({commit})", commit)}
    assert {(row["version"], row["refused"]) for row in ours} == {(None, None)}
    printed = re.findall(r'"samples_ts": \[ [\d.e+]+, ([\d.e+]+) \]', log.read_text())
    assert len(printed) == 1 + 4 * 3
    for i, row in enumerate(theirs):
        rates = [int(row["test"][2:]) / seconds for seconds in row["seconds"]]
        assert rates == pytest.approx([float(rate) for rate in printed[2 + 3 * i : 4 + 3 * i]], rel=1e-4)
