"""Files of Hugging Face's repositories, by huggingface_hub: its cache, token, offline mode and endpoint."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import importlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from pykvgraph.download.web_file import PART
from pykvgraph.errors import InvalidArgumentError, KVGraphError, ModelLoadError

DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")  # llama.cpp's choice, too; after these the first model
NO_MODELS = ("mmproj", "imatrix")  # GGUF files that only go with a model have these in their names

_REPO = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?(?::(.+))?")
_MAIN = "main"
_SHOWN = 20  # file names in one message


def download(
    repo_id: str,
    pattern: str | None,
    more: Iterable[str] = (),
    local_dir: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> str:
    """The path of the file that a name or pattern means, downloaded unless it is there.

    more: patterns of files that must lie beside it, such as the other parts of a split model. Raises
    InvalidArgumentError when a pattern doesn't mean exactly one file, and as download_model does.
    """
    hub = _hub()
    # a plain name needs no list of files, so that it is found offline, too
    plain = pattern is not None and not any(character in pattern for character in "*?[")
    wanted = [pattern or "*.gguf", *more]
    with _typed(repo_id):
        names = (
            wanted if plain and len(wanted) == 1 else _matching(wanted, hub.list_repo_files(repo_id), repo_id)
        )
        paths = [
            hub.hf_hub_download(repo_id, name, local_dir=local_dir, cache_dir=cache_dir) for name in names
        ]
    return str(Path(paths[0]))


def download_model(name: str) -> str:
    """The path of the model that REPO, REPO:QUANT or REPO:FILE means, downloaded unless it is there.

    REPO is USER/NAME, or USER/NAME@REVISION: its files as they are in a commit, a branch or under a tag.
    When the repository can't be asked, as in offline mode, the choice is among the files in the cache. Raises
    FileNotFoundError when there is no such repository, revision, file or quantization, InvalidArgumentError
    when several files match, ModelLoadError when the server refuses, or the file doesn't arrive whole, and
    ImportError without huggingface_hub.
    """
    match = _REPO.fullmatch(name)
    if match is None:
        raise InvalidArgumentError(
            f"{name!r} is no repository: expected USER/NAME, USER/NAME:QUANT or USER/NAME@REVISION:QUANT"
        )
    repo_id, revision, quant = match[1], match[2] or _MAIN, match[3]
    hub = _hub()
    try:
        with _typed(repo_id):
            checksums = _checksums(hub, repo_id, revision)
    except InvalidArgumentError:
        raise
    except (KVGraphError, OSError):
        folder = _snapshot(repo_id, revision)
        found = [path for path in folder.rglob("*.gguf") if path.is_file()] if folder else []
        if not folder or not found:
            raise
        files = [path.relative_to(folder).as_posix() for path in found]
        return str(folder / choose(f"{folder} (the cache of {repo_id})", files, quant)[0])
    with _typed(repo_id):
        place = repo_id if revision == _MAIN else f"{repo_id}@{revision}"
        files = choose(place, checksums, quant)
        paths = [_verified(hub, repo_id, revision, file, checksums[file]) for file in files]
    return paths[0]


def choose(place: str, files: Iterable[str], quant: str | None) -> list[str]:
    """The files of the one model that a quantization or a file's name means: several when it is split."""
    models = _models(files)
    if not models:
        raise FileNotFoundError(f"{place} has no model in a GGUF file{_listed(files)}")
    if quant and quant.lower().endswith(".gguf"):
        found = [parts for parts in models if any(quant in (part, Path(part).name) for part in parts)]
    else:
        found = _of_quant(models, [quant] if quant else DEFAULT_QUANTS)
    if not found and not quant:
        found = models[:1]
    names = [parts[0] for parts in models]
    if not found:
        raise FileNotFoundError(f"{place} has no model {quant}{_listed(names)}")
    if len(found) > 1:
        several = _listed(parts[0] for parts in found)
        raise InvalidArgumentError(
            f"{place}: more than one model is {quant or DEFAULT_QUANTS[0]}{several}; give USER/NAME:FILE"
        )
    (parts,) = found
    split = PART.search(parts[0])
    if split and len(parts) != int(split[2]):
        raise FileNotFoundError(f"{place} has {len(parts)} of the {int(split[2])} parts of {parts[0]}")
    return parts


def _models(files: Iterable[str]) -> list[list[str]]:
    """The files of each model, sorted."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        base = Path(file).name.lower()
        if base.endswith(".gguf") and not any(word in base for word in NO_MODELS):
            models.setdefault(PART.sub(r"-of-\2.gguf", file), []).append(file)
    return list(models.values())


def _of_quant(models: list[list[str]], quants: Iterable[str]) -> list[list[str]]:
    """The models of the first quantization that any has."""
    for quant in quants:
        # whole words: Q4_K is not in Q4_K_M, nor Q4_0 in IQ4_0
        pattern = re.compile(rf"(?:^|[-._/]){re.escape(quant)}[-./]", re.IGNORECASE)
        if found := [parts for parts in models if pattern.search(parts[0])]:
            return found
    return []


def _listed(files: Iterable[str]) -> str:
    names = list(files)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f": {', '.join(names[:_SHOWN])}{more}" if names else ""


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


def _checksums(hub: ModuleType, repo_id: str, revision: str) -> dict[str, str | None]:
    """The repository's files, with the SHA-256 of those that it knows it of."""
    timeout = float(_module("constants").HF_HUB_ETAG_TIMEOUT)
    info = hub.HfApi().model_info(repo_id, revision=revision, files_metadata=True, timeout=timeout)
    return {file.rfilename: file.lfs.sha256 if file.lfs else None for file in info.siblings or ()}


def _snapshot(repo_id: str, revision: str) -> Path | None:
    """The folder of the cache with the files of a revision, as they were when they were downloaded."""
    name = _module("file_download").repo_folder_name(repo_id=repo_id, repo_type="model")
    cache = Path(str(_module("constants").HF_HUB_CACHE), str(name))
    if (cache / "snapshots" / revision).is_dir():  # a commit
        return cache / "snapshots" / revision
    try:
        return cache / "snapshots" / (cache / "refs" / revision).read_text()
    except OSError:
        return None


def _verified(hub: ModuleType, repo_id: str, revision: str, file: str, checksum: str | None) -> str:
    """The file's path. What was downloaded now is removed again when its checksum is another."""
    before = hub.try_to_load_from_cache(repo_id, file, revision=revision)
    path = str(hub.hf_hub_download(repo_id, file, revision=revision))
    if checksum and path != before and _sha256(path) != checksum:
        Path(path).resolve().unlink(missing_ok=True)
        Path(path).unlink(missing_ok=True)
        raise ModelLoadError(f"{repo_id}/{file} was damaged on its way: its SHA-256 is wrong; try again")
    return path


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def _typed(repo_id: str) -> Iterator[None]:
    """Errors of huggingface_hub, whose text has several lines, become ours."""
    try:
        yield
    except KVGraphError:
        raise
    except Exception as error:
        if (told := _told(repo_id, error)) is None:
            raise
        raise told from error


def _told(repo_id: str, error: Exception) -> Exception | None:
    """The error that somebody can do something about; None for one that is no download's."""
    errors, constants = _module("errors"), _module("constants")
    endpoint = constants.ENDPOINT
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return InvalidArgumentError(f"{repo_id}: {error}")
    if isinstance(error, errors.GatedRepoError):
        return ModelLoadError(
            f"{repo_id} is gated: accept its terms at {endpoint}/{repo_id}, then set HF_TOKEN or run "
            "`hf auth login`"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return FileNotFoundError(
            f"{endpoint} has no repository {repo_id}, or it is private: check the name, or set HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return FileNotFoundError(f"{repo_id}: {endpoint} has no such revision of it: {error.response.url}")
    if isinstance(error, errors.OfflineModeIsEnabled) or (
        isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE
    ):
        return FileNotFoundError(
            f"{repo_id} is not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return FileNotFoundError(f"{repo_id}: {endpoint} has no such file: {error.response.url}")
    if status in (401, 403):
        return ModelLoadError(
            f"{repo_id}: {endpoint} refuses access (status {status}): set HF_TOKEN, or check it"
        )
    if status is not None:
        return ModelLoadError(f"{repo_id}: {endpoint} answers with status {status}; try again later")
    if isinstance(error, errors.LocalEntryNotFoundError):
        return ModelLoadError(f"{repo_id} is not in the cache, and {endpoint} can't be reached")
    if isinstance(error, FileNotFoundError):
        return None
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return ModelLoadError(
            f"{repo_id} doesn't fit on the disk of {constants.HF_HUB_CACHE}: make room, or set HF_HOME"
        )
    if isinstance(error, errors.HTTPError):  # no connection, or one that broke
        return ModelLoadError(f"{repo_id}: {endpoint} can't be reached: {error}")
    if isinstance(error, OSError) and error.errno is None:  # its own, of a file of another size
        return ModelLoadError(f"{repo_id}: {' '.join(str(error).split())}")
    return None


def _module(name: str) -> ModuleType:
    """A module of huggingface_hub, which imports them late."""
    return importlib.import_module(f"huggingface_hub.{name}")


def _hub() -> ModuleType:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ImportError(
            "models are downloaded by huggingface_hub, which is not installed: "
            "pip install 'pykvgraph[hub]', or pip install huggingface_hub"
        ) from error
