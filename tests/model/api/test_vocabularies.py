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
# what these do to a text can't be undone: 'bert' makes letters small, both join blanks
LOSSY = ("bert-bge", "nomic-bert-moe")

if not FILES:
    pytest.skip(f"no vocabularies in {FOLDER} (KVGRAPH_VOCABULARIES)", allow_module_level=True)


def name_of(path: Path) -> str:
    return path.stem.removeprefix("ggml-vocab-")


EXPECTED = [path for path in FILES if path.with_suffix(".gguf.inp").exists()]


def cases(path: Path) -> list[tuple[str, list[int]]]:
    """Texts, and the ids of each; without special tokens, neither added nor parsed."""
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    ids = path.with_suffix(".gguf.out").read_text().split("\n")
    return [(text, [int(token) for token in line.split()]) for text, line in zip(texts, ids, strict=False)]


@pytest.mark.parametrize("path", EXPECTED, ids=name_of)
def test_ids_are_llama_cpps(path: Path) -> None:
    tokenizer = kvg.Tokenizer.from_file(path)
    found = cases(path)
    assert len(found) > 40
    for text, ids in found:
        assert tokenizer.encode(text, add_special=False) == ids, repr(text)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_texts_come_back(path: Path) -> None:
    tokenizer = kvg.Tokenizer.from_file(path)
    texts = ("the cat", "  two  blanks\n\n", "a\tb", "é 🦊 中文 1234", "don't", "x" * 3000)
    for text in texts[: 1 if name_of(path) in LOSSY else None]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("text", "ids"), [("Hello world!", [35378, 8999, 38]), ("  Hello \uff57orld\uff01", [35378, 8999, 38])]
)
def test_a_unigram_vocabulary(text: str, ids: list[int]) -> None:
    """XLM-RoBERTa's, which comes without expectations: ids as Hugging Face documents them, wide forms too."""
    path = FOLDER / "ggml-vocab-nomic-bert-moe.gguf"
    if not path.exists():
        pytest.skip("the file is not there")
    tokenizer = kvg.Tokenizer.from_file(path)
    assert tokenizer.encode(text) == [0, *ids, 2]
    assert tokenizer.decode(ids) == "Hello world!"
