"""Real vocabularies, and the ids that llama.cpp's tests expect of them.

They come with the source distribution of llama-cpp-python, in vendor/llama.cpp/models: ggml-vocab-*.gguf
with .inp and .out beside them. KVGRAPH_VOCABULARIES names the folder that has them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import pykvgraph as kvg

FOLDER = Path(os.environ.get("KVGRAPH_VOCABULARIES", Path(__file__).parents[4] / "shared" / "vocabularies"))
FILES = sorted(FOLDER.glob("ggml-vocab-*.gguf"))
# kinds that pykvgraph refuses by name: their files' expectations wait for the day when it doesn't
REFUSED = {"bert-bge": "bert", "nomic-bert-moe": "t5"}

if not FILES:
    pytest.skip(f"no vocabularies in {FOLDER} (KVGRAPH_VOCABULARIES)", allow_module_level=True)


def name_of(path: Path) -> str:
    return path.stem.removeprefix("ggml-vocab-")


TAKEN = [path for path in FILES if name_of(path) not in REFUSED]
EXPECTED = [path for path in TAKEN if path.with_suffix(".gguf.inp").exists()]


def cases(path: Path) -> list[tuple[str, list[int]]]:
    """Texts, and the ids of each; without special tokens, neither added nor parsed."""
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    ids = path.with_suffix(".gguf.out").read_text().splitlines()
    return [
        (text, [int(token) for token in line.split()]) for text, line in zip(texts, ids, strict=False) if line
    ]


@pytest.mark.parametrize("path", EXPECTED, ids=name_of)
def test_ids_are_llama_cpps(path: Path) -> None:
    tokenizer = kvg.Tokenizer.from_file(path)
    found = cases(path)
    assert len(found) > 40
    for text, ids in found:
        assert tokenizer.encode(text, add_special=False) == ids, repr(text)


@pytest.mark.parametrize("path", TAKEN, ids=name_of)
def test_texts_come_back(path: Path) -> None:
    tokenizer = kvg.Tokenizer.from_file(path)
    for text in ("the cat", "  two  blanks\n\n", "a\tb", "é 🦊 中文 1234", "don't", "x" * 3000):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("path", [path for path in FILES if name_of(path) in REFUSED], ids=name_of)
def test_other_kinds_are_refused_by_name(path: Path) -> None:
    with pytest.raises(kvg.UnsupportedError, match=f"is '{REFUSED[name_of(path)]}'"):
        kvg.Tokenizer.from_file(path)
