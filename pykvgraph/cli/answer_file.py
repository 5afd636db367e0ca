"""A file of answers, one JSON object a line, which can be gone on with."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from typing import IO, Any

from pykvgraph.cli.show import print_json
from pykvgraph.errors import InvalidArgumentError

_FRONT = b'{"line": '  # of each line


class AnswerFile:
    """Answers are added as they come, and are in the file at once. "-" is stdout.

    A file that is there already is gone on with: `answered` has its answers' digests by the lines of their
    prompts. Errors in it, and a line that was not written to its end, are taken out, so that these prompts
    are tried again. Raises InvalidArgumentError for a file of anything else, which stays as it is, and for
    one that another run adds to, and OSError.
    """

    def __init__(self, path: str) -> None:
        self._path = os.path.realpath(path)  # what a link leads to, as the file may be written anew
        self.answered: dict[int, Any] = {}
        self._file: IO[str] | None = None
        if path != "-":
            self._file = self._opened()
            try:
                if os.path.isfile(self._path):
                    self._look(self._file)
            except BaseException:
                self._file.close()
                raise

    def add(self, answer: dict[str, Any]) -> None:
        """An answer to the prompt in the line `answer["line"]`, or an error."""
        if self._file is None:
            print_json(answer)
        else:
            self._file.write(json.dumps(answer, ensure_ascii=False) + "\n")
            self._file.flush()

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def _opened(self) -> IO[str]:
        """The file to add to, which is locked for as long as it is open."""
        # what is no character is written as JSON's escape
        file = open(self._path, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 - see __exit__
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = os.path.samestat(os.fstat(file.fileno()), os.stat(self._path))
            except BlockingIOError:
                is_ours = False
            except OSError:  # a file system without locks
                is_ours = True
            if not is_ours:
                file.close()
                raise InvalidArgumentError(
                    f"another run of `pykvgraph batch` adds answers to {self._path}: wait for its end, or "
                    "give another file"
                )
        return file

    def _look(self, file: IO[str]) -> None:
        """Learns what is answered. Only then, and only if it must, it writes the file anew."""
        n_bad = 0
        for number, data in self._lines():
            answer = self._parsed(number, data)
            if "error" in answer or not data.endswith(b"\n"):
                n_bad += 1
            else:
                self.answered[answer["line"]] = answer.get("digest")
        if n_bad:
            part = f"{self._path}.{os.getpid()}"
            with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as kept:
                os.fchmod(kept.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
                for number, data in self._lines():
                    if data.endswith(b"\n") and "error" not in self._parsed(number, data):
                        kept.write(data)
            os.replace(part, self._path)
            self._file = self._opened()
            file.close()  # with its lock

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Those that are not empty, with their numbers."""
        with open(self._path, "rb") as file:
            yield from ((number, data) for number, data in enumerate(file, 1) if data.strip())

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
