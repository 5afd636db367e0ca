"""Every environment variable that the library reads, once.

| variable               | meaning                                                                        |
|------------------------|--------------------------------------------------------------------------------|
| `KVGRAPH_LIB`          | path of the libkvgraph to open, in place of the installed one                  |
| `KVGRAPH_LOG`          | `debug`, `info`, `warning` or `error`: the native log from that level on goes  |
|                        | to the Python logger "pykvgraph". Unset: the native side is silent             |
| `KVGRAPH_STREAM_LEVEL` | 0 to 3: how caches travel where no level is given. Unset: 3                    |
| `LLAMA_CPP_LIB_PATH`   | folder of libllama and ggml; llama-cpp-python's own variable, honoured here    |
| `XDG_CACHE_HOME`       | folder of caches: downloads; digests and times of models. Unset: ~/.cache      |
| `GOMP_SPINCOUNT`,      | how threads wait for each other, for libgomp. Where neither is set, the first  |
| `OMP_WAIT_POLICY`      | is, for as long as it takes to open the libraries                              |
| `GGML_CUDA_PDL`        | whether ggml's CUDA kernels begin before the kernel in front of them has       |
|                        | ended. Set to 0 where ggml has CUDA, unless it is set already                  |

All but `KVGRAPH_STREAM_LEVEL` and `XDG_CACHE_HOME` are read when pykvgraph is imported.

The command line reads a variable for each of its options besides: see `pykvgraph.cli`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from pykvgraph.errors import InvalidArgumentError

LIBRARY = "KVGRAPH_LIB"
LOG = "KVGRAPH_LOG"
LLAMA_CPP_LIBRARIES = "LLAMA_CPP_LIB_PATH"
CACHES = "XDG_CACHE_HOME"
STREAM_LEVEL = "KVGRAPH_STREAM_LEVEL"
RAY_REPORTS = "RAY_USAGE_STATS_ENABLED"
OPENMP_SPINS = "GOMP_SPINCOUNT"
OPENMP_WAITS = "OMP_WAIT_POLICY"
CUDA_PDL = "GGML_CUDA_PDL"
# Threads wait for each other behind each operation. libgomp's own 300,000 spins take milliseconds: where
# other programs run, too, a thread that spins keeps the CPU from the one that it waits for. With few, it
# sleeps each time, which costs a quiet machine half of its speed. docs/performance.md has the figures.
SPINS = 1000

LOG_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def path(variable: str) -> Path | None:
    """A path from the environment, absolute; None when the variable is unset or empty."""
    value = os.environ.get(variable)
    return Path(value).absolute() if value else None


def cache_folder() -> Path:
    """Where pykvgraph keeps what it can get again: XDG_CACHE_HOME/pykvgraph, or ~/.cache/pykvgraph."""
    return (path(CACHES) or Path.home() / ".cache") / "pykvgraph"


def tell_nobody() -> None:
    """Ray reports its use to its makers unless RAY_USAGE_STATS_ENABLED is 0: it is, unless it is set."""
    os.environ.setdefault(RAY_REPORTS, "0")


@contextlib.contextmanager
def openmp_spins() -> Iterator[None]:
    """While libgomp is opened, which reads this once: its threads spin SPINS times, and sleep then.

    What is set already stays as it is. Programs that are started behind it don't see the variable.
    """
    if OPENMP_SPINS in os.environ or OPENMP_WAITS in os.environ:
        yield
        return
    os.environ[OPENMP_SPINS] = str(SPINS)
    try:
        yield
    finally:
        os.environ.pop(OPENMP_SPINS, None)


def cuda_kernels_in_order() -> None:
    """ggml's CUDA kernels begin when the kernel in front of them has ended, unless GGML_CUDA_PDL is set.

    With programmatic dependent launch, ggml's default on an H100 and newer cards, decoding with flash
    attention goes wrong in CUDA graphs, in libllama too: docs/devices.md has the figures. ggml reads the
    variable when it starts the first kernel, so it stays set.
    """
    os.environ.setdefault(CUDA_PDL, "0")


def without_gpus() -> dict[str, str]:
    """The environment for a program that shall see no GPU of CUDA's or ROCm's."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}


def log_level() -> int | None:
    """The level that KVGRAPH_LOG asks for, as `logging` counts; None when it is unset or empty.

    Raises InvalidArgumentError for any other word.
    """
    value = os.environ.get(LOG)
    if not value:
        return None
    if value.lower() not in LOG_LEVELS:
        raise InvalidArgumentError(f"{LOG} is {value!r}: expected one of {', '.join(LOG_LEVELS)}, or nothing")
    return LOG_LEVELS[value.lower()]


def set_log_level(word: str) -> int:
    """KVGRAPH_LOG is this word, here and in programs that are started from here; the level of log_level()."""
    os.environ[LOG] = word
    level = log_level()
    assert level is not None
    return level


def stream_level() -> int:
    """How caches travel where no level is given: 3, unless KVGRAPH_STREAM_LEVEL says something else.

    Raises InvalidArgumentError for what is no level.
    """
    value = os.environ.get(STREAM_LEVEL)
    if not value:
        return 3
    if value not in ("0", "1", "2", "3"):
        raise InvalidArgumentError(f"{STREAM_LEVEL} is {value!r}: expected 0, 1, 2 or 3, or nothing")
    return int(value)
