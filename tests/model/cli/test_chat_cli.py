"""`pykvgraph chat`, as people run it: through pipes, and on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.ctrl_c import heard as ctrl_c_heard

from pykvgraph.cli import main
from pykvgraph.cli.chat import POLICIES
from pykvgraph.context import cell_scores

SPEED = re.compile(
    r"\[(cut off at 12 tokens; )?\d+ tokens, "
    r"the first after \d+\.\d\d s(, then [\d,]+/s)?; \d+ of \d+ cells\]"
)


def chat(stories: Path, lines: str, *arguments: str) -> Result:
    options = ["-m", str(stories), "-t", "1", "--temp", "0", "-n", "12", *arguments]
    env = {"COLUMNS": "80"}
    return CliRunner().invoke(main, ["chat", *options], input=lines, env=env, prog_name="pykvgraph")


def test_answers_go_to_stdout_and_all_else_to_stderr(stories: Path) -> None:
    result = chat(stories, "Once upon a time\nAnd then?\n")
    assert result.exit_code == 0
    answers = result.stdout
    assert len(answers) > 20 and answers.endswith("\n") and "[" not in answers
    plain, *speeds = result.stderr.splitlines()
    assert plain == "[the model has no chat template: turns are lines of User: and Assistant:]"
    assert len(speeds) == 2 and all(SPEED.fullmatch(line) for line in speeds)
    assert (
        chat(stories, "Once upon a time\n").stdout
        == answers[: len(chat(stories, "Once upon a time\n").stdout)]
    )


def test_commands(stories: Path, tmp_path: Path) -> None:
    """Each of them, in a pipe."""
    first = chat(stories, "Once upon a time\n").stdout
    assert chat(stories, "Once upon a time\n/regen\n").stdout == first * 2  # greedy
    assert chat(stories, "Hello\n/edit Once upon a time\n").stdout.endswith(first)
    by_edit = chat(stories, "Hello\n/edit\nOnce upon a time\n")  # the next line is the text
    assert by_edit.stdout == chat(stories, "Hello\n/edit Once upon a time\n").stdout
    assert chat(stories, "Hello\n/reset\nOnce upon a time\n").stdout.endswith(first)
    assert chat(stories, "/quit\nOnce upon a time\n").stdout == ""
    with_system = chat(stories, "Once upon a time\n", "--system", "Be kind.").stdout
    assert with_system != first
    assert chat(stories, "/system Be kind.\nOnce upon a time\n").stdout == with_system
    assert chat(stories, '/system ""\nOnce upon a time\n', "--system", "Be kind.").stdout == first
    assert "\nBe kind.\n" in chat(stories, "/system\n", "--system", "Be kind.").stderr
    assert "cells: 0 used" in chat(stories, "/cells\n").stderr
    helped = chat(stories, "/help\n").stderr
    assert all(
        f"\n/{name}" in helped for name in ("regen", "edit", "system", "cells", "save", "load", "reset")
    )


def test_forget(stories: Path) -> None:
    """In place of turns, and each time a line says so."""
    lines = "Once upon a time\n" * 8
    result = chat(stories, lines, "-c", "110", "--forget", "keydiff", "-b", "32")
    assert result.exit_code == 0, result.stderr
    notes = re.findall(r"\[cells full: (\d+) forgotten, (\d+) left\]", result.stderr)
    assert notes and all(int(n_left) < 110 for _, n_left in notes)
    assert "given up" not in result.stderr
    assert "given up" in chat(stories, lines, "-c", "110", "-b", "32").stderr
    assert "--forget" in chat(stories, "", "--forget", "lru").stderr
    assert tuple(name for name, each in cell_scores.POLICIES.items() if not each.repeats) == POLICIES


def test_another_seed_for_another_answer(stories: Path) -> None:
    answers = chat(stories, "Once upon a time\n/regen\n", "--temp", "1", "-s", "1").stdout
    assert answers == chat(stories, "Once upon a time\n/regen\n", "--temp", "1", "-s", "1").stdout
    half = len(answers) // 2
    assert answers[:half] != answers[half:]


def test_saved_and_loaded_in_another_process(stories: Path, tmp_path: Path) -> None:
    talk = tmp_path / "talk"
    whole = run(stories, "Once upon a time\nAnd then?\n")
    first = run(stories, f"Once upon a time\n/save {talk}\n")
    assert f"[1 turn in {talk}]" in "".join(first.stderr.splitlines())
    then = run(stories, f"/load {talk}\nAnd then?\n")
    assert first.stdout + then.stdout == whole.stdout
    told = " ".join(then.stderr.split())
    assert re.search(r"\[1 turn from .*: \d+ tokens, none decoded again\]", told)


def run(stories: Path, lines: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pykvgraph",
        "chat",
        "-m",
        str(stories),
        "-t",
        "1",
        "--temp",
        "0",
        "-n",
        "12",
    ]
    return subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60, check=True)


def test_errors_end_a_pipe(stories: Path, tmp_path: Path) -> None:
    for line, message in (
        ("/regen", "no message yet"),
        (f"/load {tmp_path / 'none'}", "No such file"),
        (f"/svae {tmp_path / 'talk'}", "there is no /svae; /help lists what there is"),
    ):
        result = chat(stories, f"{line}\nOnce upon a time\n")
        assert (result.exit_code, result.stdout) == (1, "")
        assert message in result.stderr


def test_a_full_cache_is_told_of(stories: Path) -> None:
    lines = "".join(f"Tell me of number {i}.\n" for i in range(12))
    result = chat(stories, lines, "-c", "200", "--system", "Be kind.")
    told = re.findall(
        r"\[context full: (\d+) turns? given up, (\d+) tokens; (\d+) cells shifted, ", result.stderr
    )
    assert len(told) >= 2
    assert result.exit_code == 0


def test_the_embedded_model_remembers_what_the_cache_has() -> None:
    """A fact of the system prompt, and one of a turn that is given up."""
    talk = "My cat is called Tom.\nWhat is my cat called?\nHow are you?\nI like tea.\nDo you like music?\n"
    talk += "I live in Rome.\nWhat is my cat called?\nWhat is my dog called?\n"
    options = ["-c", "96", "--temp", "0", "--system", "My dog is called Rex."]
    result = CliRunner().invoke(main, ["chat", *options], input=talk)
    answers = result.stdout.splitlines()
    assert answers[1] == "Your cat is called Tom."
    assert "context full: 3 turns given up" in result.stderr
    assert "Tom" not in answers[6] and answers[7] == "Your dog is called Rex."


def test_self_extend_is_told_of(stories: Path) -> None:
    """The cache is as many times as large as the model was trained on, which is 512 tokens."""
    lines = "".join(f"Tell me of number {i}.\n" for i in range(14))
    result = chat(stories, lines, "--self-extend", "4", "-n", "40")
    assert re.search(r"\[trained context full: \d+ old tokens share positions\]", result.stderr)
    assert "given up" not in result.stderr and " of 2048 cells]" in result.stderr


class Terminal:
    """A chat on a terminal of its own."""

    def __init__(self, stories: Path, *arguments: str) -> None:
        self._end, its_end = pty.openpty()
        command = [sys.executable, "-m", "pykvgraph", "chat", "-m", str(stories), "-t", "1", "--temp", "0"]
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
        with ctrl_c_heard():
            self._process = subprocess.Popen(
                [*command, *arguments], stdin=its_end, stdout=its_end, stderr=its_end, env=env
            )
        os.close(its_end)
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def interrupt(self) -> None:
        """As Ctrl-C does while the program doesn't read keys."""
        os.kill(self._process.pid, signal.SIGINT)

    def wait(self, pattern: str, keys: str = "") -> None:
        """Until something is shown that was not before; types the keys again while nothing is."""
        deadline = time.monotonic() + 60
        while not (found := re.search(pattern, self._shown)):
            assert time.monotonic() < deadline, self._shown
            if not select.select([self._end], [], [], 0.5)[0]:
                self.type(keys)
                continue
            data = os.read(self._end, 4096).decode("utf-8", "replace")
            if "\x1b[6n" in data:  # where is the cursor?
                self.type("\x1b[1;1R")
            self._shown += data
        self._shown = self._shown[found.end() :]

    def end(self, keys: str) -> int:
        """The exit code, which these keys lead to."""
        for _ in range(60):
            self.type(keys)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(0.5)
        raise AssertionError("the chat goes on")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._end)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--show-cache",)], ids=["", "strip"])
def test_ctrl_c_on_a_terminal(stories: Path, arguments: tuple[str, ...]) -> None:
    """During an answer it stops that; what was said stays. Twice at the prompt, it ends the chat."""
    with contextlib.closing(Terminal(stories, "-n", "-1", *arguments)) as terminal:
        terminal.wait(">")
        terminal.type("Once upon a time\r")
        terminal.wait("was|the|and")
        terminal.interrupt()
        terminal.wait(r"stopped; \d+ tokens")
        terminal.wait(">")
        terminal.type("/edit\r")
        terminal.wait("Once upon a time")
        terminal.type("!\r")
        terminal.wait("was|the|and")
        terminal.interrupt()
        terminal.wait(r"stopped; \d+ tokens")
        terminal.wait(">")
        terminal.type("/nothing\r")
        terminal.wait("there is no /nothing")
        terminal.wait("Ctrl-C again ends the chat", keys="\x03")
        assert terminal.end("\x03") == 130
