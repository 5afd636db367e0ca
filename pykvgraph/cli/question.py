"""A line of a file of prompts: what is asked, and how it is to be answered."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from pykvgraph.checks import shown
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.params import SamplingParams

LONGEST_LINE = 1 << 26  # bytes
_SOURCES = ("prompt", "messages", "tokens")
_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))


class Line(NamedTuple):
    """number: from 1 on. data: its bytes; of a line that is too long the first LONGEST_LINE + 1."""

    number: int
    data: bytes


def lines(source: IO[bytes]) -> Iterator[Line]:
    """The lines of a file that are not empty, one at a time."""
    number = 0
    while data := source.readline(LONGEST_LINE + 1):
        number += 1
        rest = data
        while len(rest) > LONGEST_LINE and not rest.endswith(b"\n"):
            rest = source.readline(LONGEST_LINE + 1)
        if data.strip():
            yield Line(number, data)


class Question(NamedTuple):
    """source: "prompt", "messages" or "tokens"; value: what this field has."""

    source: str
    value: Any
    params: SamplingParams


def parse(data: bytes) -> dict[str, Any]:
    """The fields of a line. Raises InvalidArgumentError when it is no JSON object."""
    if len(data) > LONGEST_LINE:
        raise InvalidArgumentError(f"the line is longer than {LONGEST_LINE >> 20} MiB")
    try:
        fields = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"the line is no JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidArgumentError(f"the line must be a JSON object, got {shown(fields)}")
    return fields


def question_of(fields: dict[str, Any]) -> Question:
    """What a line asks. Raises InvalidArgumentError, which names the field."""
    given = [name for name in _SOURCES if name in fields]
    if len(given) != 1:
        raise InvalidArgumentError(f"the line must have one of {', '.join(_SOURCES)}; it has {len(given)}")
    sampling = {name: value for name, value in fields.items() if name not in (*_SOURCES, "id")}
    unknown = sorted(sampling.keys() - _FIELDS)
    if unknown:
        raise InvalidArgumentError(
            f"there is no field {shown(unknown[0])}: {', '.join(sorted(_FIELDS))} are known"
        )
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
