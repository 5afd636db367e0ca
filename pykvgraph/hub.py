"""Files of Hugging Face's repositories, by huggingface_hub: its cache, token, offline mode and endpoint."""

from __future__ import annotations

import fnmatch
import importlib
import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from pykvgraph.errors import InvalidArgumentError


def download(
    repo_id: str,
    pattern: str | None,
    more: Iterable[str] = (),
    local_dir: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> str:
    """The path of the file that a name or pattern means, downloaded unless it is there.

    more: patterns of files that must lie beside it, such as the other parts of a split model. Raises
    InvalidArgumentError when a pattern doesn't mean exactly one file, and what huggingface_hub raises.
    """
    hub = _hub()
    # a plain name needs no list of files, so that it is found offline, too
    plain = pattern is not None and not any(character in pattern for character in "*?[")
    wanted = [pattern or "*.gguf", *more]
    names = wanted if plain and len(wanted) == 1 else _matching(wanted, hub.list_repo_files(repo_id), repo_id)
    paths = [hub.hf_hub_download(repo_id, name, local_dir=local_dir, cache_dir=cache_dir) for name in names]
    return str(Path(paths[0]))


def _matching(patterns: list[str], files: list[str], repo_id: str) -> list[str]:
    found = []
    for pattern in patterns:
        matches = [file for file in files if fnmatch.fnmatch(file, pattern)]
        if len(matches) != 1:
            raise InvalidArgumentError(
                f"{pattern!r} means {len(matches)} files of {repo_id}, and must mean one of "
                f"{', '.join(files)}"
            )
        found += matches
    return found


def _hub() -> ModuleType:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ImportError(
            "models are downloaded by huggingface_hub, which is not installed: pip install huggingface_hub"
        ) from error
