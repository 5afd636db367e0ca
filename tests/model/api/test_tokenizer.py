"""The tokenizer on real and on awkward vocabularies: neither file nor text may end the process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pykvgraph as kvg
from pykvgraph.model.tokenizer import LoadedVocabulary

# GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on
PRINTABLE = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
ALPHABET = {byte: chr(byte) for byte in PRINTABLE} | {
    byte: chr(0x100 + i) for i, byte in enumerate(sorted(set(range(256)) - set(PRINTABLE)))
}


@pytest.fixture(scope="module")
def stories_tokenizer(stories: Path) -> Iterator[kvg.Tokenizer]:
    with kvg.Model(stories, device="cpu") as model:
        yield model.tokenizer


def write_vocabulary(path: Path, kind: str, tokens: list[str], pre: str = "default", **keys: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    if kind == "llama":
        writer.add_token_scores([0.0] * len(tokens))
    else:
        writer.add_token_merges(["a a"])
    for key, value in keys.items():
        writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def open_tokenizer(path: Path) -> kvg.Tokenizer:
    with kvg.GgufFile(path) as file:
        return kvg.Tokenizer(path, file._handle.call(LoadedVocabulary.read, {}))


def byte_level_tokens() -> list[str]:
    return [*(ALPHABET[byte] for byte in range(256)), "aa", "<|end|>"]


def test_special_tokens(stories_tokenizer: kvg.Tokenizer) -> None:
    assert (stories_tokenizer.bos, stories_tokenizer.eos) == (1, 2)
    assert stories_tokenizer.encode("") == [1]
    assert stories_tokenizer.encode("", add_special=False) == []
    assert [stories_tokenizer.is_eog(token) for token in (0, 1, 2, 3)] == [False, False, True, False]
    assert stories_tokenizer.token_to_piece(1) == b""


def test_control_tokens_in_a_text_are_text_unless_asked(stories_tokenizer: kvg.Tokenizer) -> None:
    assert 2 not in stories_tokenizer.encode("</s>")
    assert stories_tokenizer.decode(stories_tokenizer.encode("</s>")) == "</s>"
    assert stories_tokenizer.encode("</s>", add_special=False, parse_special=True) == [2]


# U+2581 stands for a blank inside a SentencePiece vocabulary, and comes back as one
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=60))
def test_text_survives(stories_tokenizer: kvg.Tokenizer, text: str) -> None:
    for add_special in (True, False):
        ids = stories_tokenizer.encode(text, add_special=add_special)
        assert stories_tokenizer.decode(ids) == text
        assert stories_tokenizer.decode(np.array(ids, np.int32)) == text
        assert stories_tokenizer.decode_bytes(ids) == text.encode()


def test_pieces_join_to_the_text(stories_tokenizer: kvg.Tokenizer) -> None:
    """But for the space that SentencePiece puts in front; a piece may be part of a character."""
    ids = stories_tokenizer.encode("Lily saw a 🦊.")
    pieces = [stories_tokenizer.token_to_piece(token) for token in ids]
    assert b"".join(pieces) == " Lily saw a 🦊.".encode()
    assert b"\xf0" in pieces


def test_bytes_that_are_no_text(stories_tokenizer: kvg.Tokenizer) -> None:
    half = [token for token in stories_tokenizer.encode("🦊") if token != stories_tokenizer.bos][:-1]
    assert stories_tokenizer.decode(half).endswith("\ufffd")


@pytest.mark.parametrize("text", [None, b"bytes", 5, ["a"], "\ud800"])
def test_what_is_no_text(stories_tokenizer: kvg.Tokenizer, text: Any) -> None:
    with pytest.raises(kvg.InvalidArgumentError):
        stories_tokenizer.encode(text)


@pytest.mark.parametrize("name", ["add_special", "parse_special"])
def test_flags_are_bools(stories_tokenizer: kvg.Tokenizer, name: str) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match=name):
        stories_tokenizer.encode("a", **{name: 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, 512, 2**31, 2**70, 1.0, "1", None, True])
def test_ids_that_are_none(stories_tokenizer: kvg.Tokenizer, token: Any) -> None:
    for name in ("token_to_piece", "is_eog"):
        with pytest.raises(kvg.InvalidArgumentError, match=r"^id must"):
            getattr(stories_tokenizer, name)(token)
    for name in ("decode", "decode_bytes"):
        with pytest.raises(kvg.InvalidArgumentError, match=r"^ids\[0\] must"):
            getattr(stories_tokenizer, name)([token])


def test_several_threads(stories_tokenizer: kvg.Tokenizer) -> None:
    text = "Once upon a time, there was a little girl named Lily. " * 20
    expected = stories_tokenizer.encode(text)
    wrong: list[list[int]] = []

    def encode() -> None:
        for _ in range(20):
            ids = stories_tokenizer.encode(text)
            if ids != expected or stories_tokenizer.decode(ids) != text:
                wrong.append(ids)

    threads = [threading.Thread(target=encode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_it_outlives_its_model(stories: Path) -> None:
    model = kvg.Model(stories, device="cpu")
    tokenizer = model.tokenizer
    model.close()
    assert tokenizer is model.tokenizer
    assert tokenizer.decode(tokenizer.encode("Lily")) == "Lily"
    closed = kvg.Model(stories, device="cpu")
    closed.close()
    with pytest.raises(kvg.InvalidArgumentError, match="closed"):
        _ = closed.tokenizer


def test_nothing_on_stderr(stories: Path) -> None:
    """Neither from loading, nor when libllama has something to say of a text."""
    script = (
        f"import pykvgraph; tokenizer = pykvgraph.Model({str(stories)!r}, 'cpu').tokenizer\n"
        "print(tokenizer.encode('<s>a', parse_special=True)[:2])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[1, 1]"
    assert run.stderr == ""


def test_long_words_of_a_regex_pre_tokenizer(tmp_path: Path) -> None:
    """libllama's std::regex recurses once per character: on an ordinary stack this would be the end."""
    path = write_vocabulary(tmp_path / "model.gguf", "gpt2", byte_level_tokens(), pre="deepseek-llm")
    script = (
        "from pathlib import Path\nimport pykvgraph as kvg\n"
        "from pykvgraph.model.tokenizer import LoadedVocabulary\n"
        f"path = Path({str(path)!r})\n"
        "tokenizer = kvg.Tokenizer(path, kvg.GgufFile(path)._handle.call(LoadedVocabulary.read, {}))\n"
        "for text in ('a' * 200_000, ' ' * 200_000, 'é中' * 100_000):\n"
        "    assert tokenizer.decode(tokenizer.encode(text)) == text\n"
        "print('whole')"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "whole"), run.stderr


@pytest.mark.parametrize("kib", [192, 1024])
def test_threads_with_small_stacks(tmp_path: Path, kib: int) -> None:
    path = write_vocabulary(tmp_path / "model.gguf", "gpt2", byte_level_tokens(), pre="deepseek-llm")
    script = (
        "import threading; import pykvgraph as kvg; from pykvgraph.model.tokenizer import LoadedVocabulary\n"
        f"file = kvg.GgufFile({str(path)!r})\n"
        "tokenizer = kvg.Tokenizer(file.path, file._handle.call(LoadedVocabulary.read, {}))\n"
        f"threading.stack_size({kib} << 10)\n"
        "def work():\n"
        "    for n in (1, 600, 2000, 4096):\n"
        "        assert tokenizer.decode(tokenizer.encode('a' * n)) == 'a' * n\n"
        "    print('whole')\n"
        "thread = threading.Thread(target=work); thread.start(); thread.join()"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, "whole"), run.stderr


def test_merges_of_a_byte_level_vocabulary(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(write_vocabulary(tmp_path / "model.gguf", "gpt2", byte_level_tokens()))
    assert tokenizer.encode("aaab", add_special=False) == [256, ord("a"), ord("b")]
    assert tokenizer.decode(tokenizer.encode(" é🦊\n\0")) == " é🦊\n\0"


def test_a_character_without_token_or_bytes(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "é"]
    tokenizer = open_tokenizer(write_vocabulary(tmp_path / "model.gguf", "llama", tokens))
    assert tokenizer.encode("aé a", add_special=False) == [3, 4, 5, 3, 4]
    for text in ("b", "aaab", "è", "\0"):
        with pytest.raises(kvg.InvalidArgumentError, match="no token for"):
            tokenizer.encode(text)


def test_duplicate_tokens(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "model.gguf", "llama", ["<unk>", "a", "b", "a"])
    with pytest.raises(kvg.ModelLoadError, match="'a' twice, at 1 and 3"):
        open_tokenizer(path)


def test_empty_tokens_are_no_duplicates(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "", ""]
    tokenizer = open_tokenizer(write_vocabulary(tmp_path / "model.gguf", "llama", tokens))
    assert tokenizer.encode("a", add_special=False) == [3, 4]


def test_bos_wanted_but_not_named(tmp_path: Path) -> None:
    """The default id is past the end of so small a vocabulary."""
    path = write_vocabulary(tmp_path / "model.gguf", "gpt2", ["a", "b", "aa"], add_bos_token=True)
    with pytest.raises(kvg.ModelLoadError, match="bos"):
        open_tokenizer(path)


@pytest.mark.parametrize("kind", ["BERT", "unheard of"])
def test_another_kind_of_tokenizer(tmp_path: Path, kind: str) -> None:
    path = write_vocabulary(tmp_path / "model.gguf", kind, ["a", "b"])
    with pytest.raises(kvg.UnsupportedError, match=rf"tokenizer\.ggml\.model is '{kind}'"):
        open_tokenizer(path)


def test_a_pre_tokenizer_that_libllama_does_not_know(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "model.gguf", "gpt2", byte_level_tokens(), pre="of tomorrow")
    with pytest.raises(kvg.ModelLoadError, match=r"tokenizer\.ggml\.pre 'of tomorrow'"):
        open_tokenizer(path)
