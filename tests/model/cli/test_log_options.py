"""-lv, -v, --log-file and --log-disable: which lines of the native side arrive, and where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# as tests/native/test_import.py lets ggml speak
SCRIPT = """
import ctypes, logging, click, pykvgraph
from pykvgraph.cli.log_options import log_options

@click.command()
@log_options
def verb():
    base = next(path for path in pykvgraph.library_info().ggml_paths if path.name.startswith("libggml-base"))
    say = ctypes.CDLL(str(base)).ggml_log_internal
    for level in (1, 2, 3, 4):
        say(level, b"said at %d\\n", level)
    logging.getLogger("pykvgraph.server").error("said by the server")

verb()
"""
SERVER = "said by the server"


def lines(text: str) -> list[str]:
    return [line.removeprefix("said at ") for line in text.splitlines()]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ("", []),
        ("-lv 0", []),
        ("-lv 1", ["4"]),
        ("--verbosity 2", ["3", "4"]),
        ("--log-verbosity 3", ["2", "3", "4"]),
        ("-lv 4", ["1", "2", "3", "4"]),
        ("-lv 99", ["1", "2", "3", "4"]),
        ("-v", ["1", "2", "3", "4"]),
        ("--log-verbose -lv 1", ["1", "2", "3", "4"]),
        ("-v --log-disable", None),
    ],
)
def test_what_is_said_of_the_native_side(options: str, shown: list[str] | None, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "KVGRAPH_LOG"}
    for file in ([], ["--log-file", str(tmp_path / "log")]):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *options.split(), *file],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (0, "")
        assert lines(done.stderr) == ([] if shown is None else [*shown, SERVER])
    assert (tmp_path / "log").read_text() == done.stderr
