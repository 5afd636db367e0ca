"""Another build's own llama-bench, such as ik_llama.cpp's: a program that is started for each turn."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pykvgraph.bench.tests import Test
from pykvgraph.errors import InvalidArgumentError, KVGraphError
from pykvgraph.params.params import ContextParams

_HELP_SECONDS = 60.0
_TURN_SECONDS = 1800.0  # with loading, and with what is in the cache before the test
_N_RUNS = 2  # the first one of a process has pages to fetch: as with ours, it is not measured
_N_WORDS = 400  # characters of a program's last line


class RivalError(KVGraphError, RuntimeError):
    """A llama-bench failed, did not end, or printed no result."""


class LlamaBench:
    """A llama-bench on one file, with the threads, batches and cache types of `params`.

    words: the program, and options of its own. name: how it is called. device: "CPU", or a device that has
    the whole model. environment: of the program; None: as ours. Making one decodes a token with it, so that
    the file is in memory from then on, and what can't work is known. `name` ends with the commit that the
    program was built from.

    Raises InvalidArgumentError for what is no llama-bench, or knows no devices; RivalError when it fails.
    """

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        model: Path,
        params: ContextParams,
        device: str,
        environment: Mapping[str, str] | None,
    ) -> None:
        self.name = name
        on_cpu = device == "CPU"
        self._environment = environment
        self._known = self._options_of(words)
        if not on_cpu and "-dev" not in self._known:
            raise InvalidArgumentError(f"{name} has no -dev: it can be compared on the CPU, with -dev none")
        options: dict[str, object] = {
            "-m": model,
            "-t": params.n_threads,
            "-b": params.n_batch,
            "-ub": params.n_ubatch,
            "-ctk": params.type_k,
            "-ctv": params.type_v,
            "-ngl": 0 if on_cpu else 999,
            "-r": _N_RUNS,
            "-o": "json",
        }
        if "-dev" in self._known:
            options["-dev"] = "none" if on_cpu else device
        self._command = [*words, *_spelled(options)]
        self.version = str(self._row({"-p": 1, "-n": 0}, {}).get("build_commit", "unknown"))
        self.name = f"{name} ({self.version})"

    def refusal(self, test: Test) -> str:
        """Why this program can't run the test; empty when it can. ik_llama.cpp's has -gp in place of -d."""
        if not test.depth or "-d" in self._known:
            return ""
        if test.kind == "pp":
            return "it has no -d, for a prompt behind other tokens"
        return "" if "-gp" in self._known else "it has neither -d nor -gp, for tokens behind others"

    def seconds(self, test: Test) -> float:
        """Those of one run of the test, as the program has measured them. Raises RivalError."""
        n_prompt, n_gen = (test.amount, 0) if test.kind == "pp" else (0, test.amount)
        asked: dict[str, object] = {"-p": n_prompt, "-n": n_gen}
        told = {"n_prompt": n_prompt, "n_gen": n_gen}
        if test.depth and "-d" in self._known:
            asked["-d"] = told["n_depth"] = test.depth
        elif test.depth:
            asked = {"-p": 0, "-n": 0, "-gp": f"{test.depth},{test.amount}"}
            told["n_prompt"] = test.depth
        seconds: float = self._row(asked, told)["samples_ns"][-1] / 1e9
        return seconds

    def _options_of(self, words: Sequence[str]) -> set[str]:
        """What its help names."""
        _, out, error = self._run([*words, "--help"], _HELP_SECONDS)
        known = set(re.findall(r"(?<!\S)--?\w[\w-]*", out + error))
        if "--n-gen" not in known:
            raise InvalidArgumentError(f"{self.name} is no llama-bench: its --help has no --n-gen")
        return known

    def _row(self, asked: Mapping[str, object], told: Mapping[str, int]) -> dict[str, Any]:
        """Its one result, which has these values."""
        code, out, error = self._run([*self._command, *_spelled(asked)], _TURN_SECONDS)
        if code:
            end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            why = _last_line(error) or _last_line(out)
            raise RivalError(f"{self.name} failed ({end})" + (f": {why}" if why else ""))
        rows = list(_results(out))
        if not rows:
            said = _last_line(out) or _last_line(error) or "nothing"
            raise RivalError(f"{self.name} printed no result as JSON; its last line: {said}")
        if len(rows) > 1:
            raise RivalError(f"{self.name} printed {len(rows)} results, not 1: leave out -p, -n, -d and -t")
        other = {key: rows[0].get(key) for key, value in told.items() if rows[0].get(key) != value}
        if other:
            raise RivalError(f"{self.name} measured {other}, and was asked for {dict(told)}")
        return rows[0]

    def _run(self, command: Sequence[str], most_seconds: float) -> tuple[int, str, str]:
        """Its exit code and what it printed. However this ends, the program and its own children end, too."""
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # a process group, which is killed as a whole
            )
        except OSError as error:
            raise RivalError(f"{self.name} can't be started: {error.strerror}") from None
        with process:
            try:
                out, error_text = process.communicate(timeout=most_seconds)
            except subprocess.TimeoutExpired:
                _kill(process)
                raise RivalError(
                    f"{self.name} had not ended after {most_seconds:g} s, and was killed"
                ) from None
            except BaseException:  # Ctrl-C
                _kill(process)
                raise
        return process.returncode, out, error_text


def _spelled(options: Mapping[str, object]) -> list[str]:
    return [str(word) for option in options.items() for word in option]


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:_N_WORDS] if lines else ""


def _results(text: str) -> Iterator[dict[str, Any]]:
    """The objects with samples among what was printed: a fork may print other lines between them."""
    decoder = json.JSONDecoder()
    for begin in re.finditer(r"^\s*\{", text, re.MULTILINE):
        try:
            found, _ = decoder.raw_decode(text, begin.end() - 1)
        except ValueError:
            continue
        samples = found.get("samples_ns")
        if (
            isinstance(samples, list)
            and samples
            and all(isinstance(each, int) and each > 0 for each in samples)
        ):
            yield found
