"""Every record of a directory, looked at from outside: which there are, and which are what they say."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pykvgraph.prefix import block
from pykvgraph.tiers.disk import FILE_NAME, SUFFIXES, read_file
from pykvgraph.tiers.record import HEADER_BYTES, MissError, Reason, check, read_header, split


class SurveyedFile(NamedTuple):
    """A record's file as it was found.

    n_tokens: 0 where it doesn't say. used: nanoseconds. fault: None: none was found.
    """

    name: str
    n_tokens: int
    n_bytes: int
    used: int
    fault: Reason | None

    @property
    def key(self) -> bytes:
        """As its name says."""
        return bytes.fromhex(self.name[:64])


def survey(folder: Path, *, verify: bool = False) -> Iterator[SurveyedFile]:
    """The records of a directory, what was used last first. Others may change it meanwhile. Raises OSError.

    verify: they are read whole, and compared with their digests and names; else only their first bytes.
    """
    found = []
    with os.scandir(folder) as entries:
        for each in entries:
            with contextlib.suppress(FileNotFoundError):
                if FILE_NAME.fullmatch(each.name) and each.is_file(follow_symlinks=False):
                    info = each.stat(follow_symlinks=False)
                    found.append((info.st_mtime_ns, each.name, info.st_size))
    for used, name, n_bytes in sorted(found, reverse=True):
        with contextlib.suppress(FileNotFoundError):
            n_tokens, fault = _read(folder / name, n_bytes + 1 if verify else HEADER_BYTES, verify)
            yield SurveyedFile(name, n_tokens, n_bytes, used, fault)


def _read(path: Path, n_bytes: int, verify: bool) -> tuple[int, Reason | None]:
    try:
        data = read_file(path, n_bytes)
    except FileNotFoundError:
        raise
    except OSError:
        return 0, "unreadable"
    header = read_header(data)
    n_tokens = len(header.tokens) // block.TOKEN_BYTES if header else 0
    try:
        if header is None:
            raise MissError("foreign")
        if SUFFIXES.get(header.kind) != path.suffix:
            raise MissError("other")
        if verify:
            check(split(data), bytes.fromhex(path.stem))
    except MissError as miss:
        return n_tokens, miss.reason
    return n_tokens, None
