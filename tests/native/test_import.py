"""Importing pykvgraph among others that open ggml, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ONE_GGML = """
from pathlib import Path
from pykvgraph._native import loader
mapped = loader.mapped_libraries(Path("/proc/self/maps").read_text())
print(sorted(len(files) for files in mapped.values()) == [1] * len(mapped), "libggml" in mapped)
"""

# a line of each of ggml's levels, debug to error, from another thread
SAY = """
import ctypes, threading
base = next(path for path in pykvgraph.library_info().ggml_paths if path.name.startswith("libggml-base"))
say = ctypes.CDLL(str(base)).ggml_log_internal
lines = lambda: [say(level, b"said at %d\\n", level) for level in (1, 2, 3, 4)]
thread = threading.Thread(target=lines)
thread.start()
thread.join()
"""


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if key != "KVGRAPH_LOG"}
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**variables, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "imports", ["import llama_cpp, pykvgraph", "import pykvgraph, llama_cpp", "import pykvgraph"]
)
def test_one_ggml_in_whatever_order(imports: str) -> None:
    done = run(imports + ONE_GGML)
    assert done.stdout.strip() == "True True", done.stderr


def test_a_second_ggml_is_refused() -> None:
    """llama_cpp._ggml opens libggml.so beside libllama's libggml.so.0."""
    done = run("import llama_cpp._ggml, pykvgraph")
    assert done.returncode == 1
    assert "ImportError: libggml is in this process twice" in done.stderr
    assert "libggml.so.0" in done.stderr
    assert "llama_cpp._ggml" in done.stderr


@pytest.mark.parametrize(
    ("level", "shown"), [("debug", [1, 2, 3, 4]), ("info", [2, 3, 4]), ("WARNING", [3, 4]), ("error", [4])]
)
def test_log_from_the_level_on(level: str, shown: list[int]) -> None:
    done = run("import pykvgraph" + SAY, KVGRAPH_LOG=level)
    assert done.returncode == 0
    said = [line for line in done.stderr.splitlines() if line.startswith("said")]
    assert said == [f"said at {number}" for number in shown]


def test_no_log_unasked() -> None:
    done = run("import pykvgraph" + SAY)
    assert (done.returncode, done.stderr) == (0, "")


def test_log_goes_to_the_programs_own_logging() -> None:
    setup = "import logging, pykvgraph; logging.basicConfig(format='%(name)s %(levelname)s %(message)s')"
    done = run(setup + SAY, KVGRAPH_LOG="warning")
    assert [line for line in done.stderr.splitlines() if "said" in line] == [
        "pykvgraph WARNING said at 3",
        "pykvgraph ERROR said at 4",
    ]


def test_a_broken_log_handler_breaks_nothing() -> None:
    setup = (
        "import logging, pykvgraph\n"
        "class Broken(logging.Handler):\n"
        "    def emit(self, record): raise RuntimeError('no')\n"
        "logging.getLogger('pykvgraph').addHandler(Broken())"
    )
    done = run(setup + SAY + "print('on')", KVGRAPH_LOG="debug")
    assert (done.returncode, done.stdout.strip()) == (0, "on")
    assert "said at 4" in done.stderr


def test_ggml_logs_to_us_after_libllama_came(stories: Path) -> None:
    """Who sets libllama's log, as the tokenizer does, gives ggml's away with it."""
    setup = f"import pykvgraph; tokenizer = pykvgraph.Model({str(stories)!r}, 'cpu').tokenizer"
    done = run(setup + SAY, KVGRAPH_LOG="error")
    assert done.stderr.splitlines() == ["said at 4"]
    done = run(setup + SAY)
    assert done.stderr == ""


def test_bad_log_level_is_told() -> None:
    done = run("import pykvgraph", KVGRAPH_LOG="loud")
    assert done.returncode == 1
    assert "KVGRAPH_LOG is 'loud': expected one of debug, info, warning, error" in done.stderr
