"""A line of a file of prompts: what is asked, and how it is to be answered."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import json
import os
import queue
import threading
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.params.params import SamplingParams

LONGEST_LINE = 1 << 26  # bytes
_N_AHEAD = 16  # lines that are read before they are asked for
_SOURCES = ("prompt", "messages", "tokens")
_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
# the names of llama-server and of OpenAI, where they are others
_SAME = {
    "n_predict": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "repeat_last_n": "penalty_last_n",
    "n_probs": "top_logprobs",
}


class Line(NamedTuple):
    """number: from 1 on. data: its bytes; of a line that is too long the first LONGEST_LINE + 1.

    n_bytes: of the file, from the end of the Line before to the end of this one.
    """

    number: int
    data: bytes
    n_bytes: int


def lines(source: IO[bytes]) -> Iterator[Line]:
    """The lines of a file that are not empty, one at a time."""
    number = n_bytes = 0
    while data := source.readline(LONGEST_LINE + 1):
        number += 1
        n_bytes += len(data)
        rest = data
        while len(rest) > LONGEST_LINE and not rest.endswith(b"\n"):
            rest = source.readline(LONGEST_LINE + 1)
            n_bytes += len(rest)
        if number == 1:
            data = data.removeprefix(codecs.BOM_UTF8)
        if data.strip():
            yield Line(number, data, n_bytes)
            n_bytes = 0


class Arrivals:
    """The lines of a file as they come: a thread reads them, a few ahead."""

    def __init__(self, source: IO[bytes]) -> None:
        with contextlib.suppress(OSError):  # not a file of the system's
            # the thread may still read when the program ends: so it has a file of its own
            source = open(os.dup(source.fileno()), "rb")  # noqa: SIM115 - the thread's
        self._queue: queue.Queue[Line | OSError | None] = queue.Queue(_N_AHEAD)
        self._ended = False
        threading.Thread(target=self._read, args=(source,), name="pykvgraph batch", daemon=True).start()

    def next(self, wait: bool) -> Line | None:
        """The next line; None behind the last one, and when it isn't to wait and none has come yet."""
        if self._ended:
            return None
        try:
            came = self._queue.get(wait)
        except queue.Empty:
            return None
        if isinstance(came, Line):
            return came
        self._ended = True
        if came is not None:
            raise came
        return None

    def _read(self, source: IO[bytes]) -> None:
        end = None
        try:
            with source:
                for line in lines(source):
                    self._queue.put(line)
        except OSError as error:
            end = error
        self._queue.put(end)


class Question(NamedTuple):
    """source: "prompt", "messages" or "tokens"; value: what this field has."""

    source: str
    value: Any
    params: SamplingParams


def parse(data: bytes) -> dict[str, Any]:
    """The fields of a line. Raises InvalidArgumentError when it is no JSON object, or its id is no JSON."""
    if len(data) > LONGEST_LINE:
        raise InvalidArgumentError(f"the line is longer than {LONGEST_LINE >> 20} MiB")
    try:
        fields = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"the line is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidArgumentError(f"the line must be a JSON object, got {shown(fields)}")
    try:
        json.dumps(fields.get("id"), allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"the id is no JSON: {error}") from None
    return fields


def question_of(fields: dict[str, Any]) -> Question:
    """What a line asks. Raises InvalidArgumentError, which names the field."""
    given = [name for name in _SOURCES if name in fields]
    if len(given) != 1:
        raise InvalidArgumentError(f"the line must have one of {', '.join(_SOURCES)}; it has {len(given)}")
    sampling = {name: value for name, value in fields.items() if name not in (*_SOURCES, "id")}
    unknown = sorted(sampling.keys() - _FIELDS)
    if unknown:
        name = unknown[0]
        hint = f"it is {_SAME[name]!r} here" if name in _SAME else f"{', '.join(sorted(_FIELDS))} are known"
        raise InvalidArgumentError(f"there is no field {shown(name)}: {hint}")
    if "logit_bias" in sampling:
        sampling["logit_bias"] = _biases(sampling["logit_bias"])
    return Question(given[0], fields[given[0]], SamplingParams(**sampling))


def _biases(value: Any) -> Any:
    """JSON's keys are texts, and its pairs are lists."""
    if isinstance(value, dict):
        value = list(value.items())
    if not isinstance(value, list):
        return value
    return [
        (int(item[0]), item[1])
        if isinstance(item, (tuple, list)) and len(item) == 2 and str(item[0]).isdecimal()
        else item
        for item in value
    ]
