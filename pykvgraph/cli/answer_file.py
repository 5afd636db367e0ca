"""A file of answers, one JSON object a line, which can be gone on with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from pykvgraph.errors import InvalidArgumentError

_FRONT = b'{"line": '  # of each line


class AnswerFile:
    """Answers are added as they come, and are in the file at once.

    A file that is there already is gone on with: `answered` has its answers' ids by the lines of their
    prompts. Errors in it, and a line that was not written to its end, are taken out, so that these prompts
    are tried again. Raises InvalidArgumentError for a file of anything else, which stays as it is, and
    OSError.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.answered: dict[int, Any] = {}
        if os.path.isfile(path):
            self._look()
        # what is no character is written as JSON's escape
        self._file = open(path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 - see __exit__

    def add(self, number: int, id: Any, answer: dict[str, Any]) -> None:
        """An answer to the prompt in this line, or an error."""
        named = {"line": number} | ({} if id is None else {"id": id})
        self._file.write(json.dumps(named | answer, ensure_ascii=False) + "\n")
        self._file.flush()

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _look(self) -> None:
        """Learns what is answered. Only then, and only if it must, it writes the file anew."""
        n_bad = 0
        for number, data in self._lines():
            answer = self._parsed(number, data)
            if "error" in answer or not data.endswith(b"\n"):
                n_bad += 1
            else:
                self.answered[answer["line"]] = answer.get("id")
        if n_bad:
            part = f"{self._path}.{os.getpid()}"
            with open(part, "wb") as kept:
                for number, data in self._lines():
                    if data.endswith(b"\n") and "error" not in self._parsed(number, data):
                        kept.write(data)
            os.replace(part, self._path)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with open(self._path, "rb") as file:
            yield from enumerate(file, 1)

    def _parsed(self, number: int, data: bytes) -> dict[str, Any]:
        """The answer in a line; an empty one for a line that was not written to its end."""
        if not data.endswith(b"\n") and data[: len(_FRONT)] == _FRONT[: len(data)]:
            return {}
        try:
            answer = json.loads(data)
            if isinstance(answer, dict) and type(answer.get("line")) is int:
                return answer
        except (ValueError, RecursionError):
            pass
        raise InvalidArgumentError(
            f"line {number} of {self._path} is no answer of `pykvgraph batch`: give another file"
        )
