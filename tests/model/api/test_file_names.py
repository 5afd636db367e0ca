"""The file of a model keeps its content whatever becomes of its name, and its name may be any bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pykvgraph as kvg

TEXT = "Once upon a time"


@pytest.fixture
def copied(stories: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(stories, tmp_path / "model.gguf"))


@pytest.mark.parametrize("fate", ["replaced", "damaged", "deleted"])
def test_the_tokenizer_is_of_the_file_that_was_opened(copied: Path, fate: str) -> None:
    with kvg.Model(copied, device="cpu") as model:
        if fate == "deleted":
            copied.unlink()
        else:
            data = copied.read_bytes()
            other = copied.with_name("other")
            # another vocabulary, or half a file, which libllama never sees unchecked
            swapped = data.replace(b"Once", b"####").replace(b"Lily", b"####")
            other.write_bytes(swapped if fate == "replaced" else data[: len(data) // 3])
            other.rename(copied)
        ids = model.tokenizer.encode(TEXT)
        assert ids == [1, 403, 407, 261, 378]  # llama2.c's ids of these words
        assert model.tokenizer.decode(ids) == TEXT


@pytest.mark.parametrize("locale", [{}, {"LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
@pytest.mark.parametrize("name", [b"\xff.gguf", b"a\x0c7f00-7f01 r-xp 0 0 1 \xe2\x80\xa8.gguf"])
def test_names_that_are_no_text(stories: Path, tmp_path: Path, name: bytes, locale: dict[str, str]) -> None:
    """Mapped before the import, and before libllama's, which both look at what is mapped."""
    path = os.path.join(os.fsencode(tmp_path), name)
    shutil.copy(os.fsencode(stories), path)
    script = (
        "import mmap, os, sys\n"
        f"path = os.fsdecode({path!r})\n"
        "file = open(path, 'rb')\n"
        "held = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "import pykvgraph as kvg\n"
        f"print(kvg.Model(path, 'cpu').tokenizer.encode({TEXT!r}))\n"
        "print(len(kvg.GgufFile(path).tensors))"
    )
    env = {**os.environ, "LC_ALL": "", **locale}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=env)
    assert (run.returncode, run.stdout.split("\n")[0]) == (0, "[1, 403, 407, 261, 378]"), run.stderr
