"""Long texts: their ids are libllama's, in a time that grows with the text, and nobody need wait for them."""

from __future__ import annotations

import contextvars
import ctypes
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.gguf_bytes import STRING
from support.gguf_parts import Parts, take_apart
from support.models import TINY, ModelSpec
from support.vocabularies import of_kind

import pykvgraph as kvg
from pykvgraph._native.abandoned import AbandonedError, Wanted, begin
from pykvgraph.model import tokenizer as tokenizer_module

INT32, FLOAT32 = 5, 6
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
# they overlap, contain one another, begin and end with white space; more than 16, of few lengths
SPECIAL = [
    *("<|a|>", "<|b|>", "<|a|><", "a|><|", "|><|b", "<|", "|>", "<|end|>", "\n\n", "\n\n\n", "  ", " \t"),
    *(
        "th",
        "he c",
        "é!",
        "▁▁",
        "<|é|>",
        "ab",
        "ba",
        "aba",
        "bab",
        "bb",
        "aab",
        "abb",
        "baa",
        "bba",
        " <",
        "> ",
    ),
    *("abab", "baba", "aabb", "bbaa", "abba", "baab", "aaaa", "bbbb", "<mask>", "<|endoftext|>"),
]
TYPES = [(CONTROL, USER_DEFINED, CONTROL, USER_DEFINED, UNKNOWN)[i % 5] for i in range(len(SPECIAL))]
KINDS = ("llama", "gpt2", "gemma4", "hybriddna", "whitespace", "bert", "t5", "rwkv", "plamo2")
# libllama lets special tokens of these drop the white space behind or before them
STRIPPED = ("llama of phi-3", "gpt2 of jina-v2-de")

PARTS = [*SPECIAL, *(text[:i] for text in SPECIAL for i in range(1, len(text))), "<s>", "</s>", "[EMPTY_3]"]
TEXTS = st.lists(
    st.sampled_from(
        [*PARTS, *(" ", "\n", "\t", "\u00a0", "the", " cat", "é", "🦊", "中文", "a", "b", "\0"), "aa" * 9]
    ),
    max_size=25,
).map("".join)


def base(kind: str, tiny: bytes) -> Parts:
    parts = take_apart(tiny)
    if kind in ("bert", "t5", "rwkv", "plamo2"):
        return of_kind(parts, kind.encode())
    if kind == "llama":
        return parts
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [chr(0x100 + i) for i in range(256 - len(seen))]
    letters = [*map(chr, seen), *others, "aa", "the", "▁", "中", "<dna>", "</dna>", "<oov>", "AAAAAA\ue000"]
    tokens = [
        b"<unk>",
        b"<s>",
        b"</s>",
        *(b"<0x%02X>" % byte for byte in range(256)),
        *map(str.encode, letters),
    ]
    parts.set("tokenizer.ggml.model", STRING, kind.encode())
    parts.set("tokenizer.ggml.pre", STRING, b"whitespace" if kind == "whitespace" else b"gpt-2")
    parts.set("tokenizer.ggml.tokens", STRING, [*tokens])
    parts.set(
        "tokenizer.ggml.token_type", INT32, [*[CONTROL] * 3, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    )
    parts.set("tokenizer.ggml.scores", FLOAT32, [0.0] * len(tokens))
    parts.set("tokenizer.ggml.merges", STRING, [b"a a", b"t h", b"th e"])
    return parts


def write(kind: str, tiny: bytes, path: Path) -> Path:
    kind, _, name = kind.partition(" of ")
    parts = base(kind, tiny)
    keys = [parts.find(f"tokenizer.ggml.{each}") for each in ("tokens", "token_type", "scores")]
    texts, types, scores = (key.value for key in keys if key is not None)
    assert isinstance(texts, list) and isinstance(types, list) and isinstance(scores, list)
    for text, type in zip(SPECIAL, TYPES, strict=True):
        if text.encode() in texts:
            types[texts.index(text.encode())] = type
        else:
            texts.append(text.encode())
            types.append(type)
            scores.append(0.0)
    parts.set("general.name", STRING, name.encode() or b"test")
    if name.startswith("jina"):
        parts.set("tokenizer.ggml.pre", STRING, name.encode())
    parts.raw().write(path)
    return path


def ids_of_libllama(tokenizer: kvg.Tokenizer, text: str, add_special: bool, parse_special: bool) -> list[int]:
    data = text.encode()
    ids = (ctypes.c_int32 * (70 * len(data) + 8))()
    n = llama_cpp.llama_tokenize(tokenizer._vocab, data, len(data), ids, len(ids), add_special, parse_special)
    assert n >= 0
    return ids[:n]


@pytest.fixture(scope="module")
def vocabulary(
    model_file: Callable[[ModelSpec], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], kvg.Tokenizer]:
    folder = tmp_path_factory.mktemp("vocabularies")
    made: dict[str, kvg.Tokenizer] = {}

    def tokenizer(kind: str) -> kvg.Tokenizer:
        if kind not in made:
            path = write(kind, model_file(TINY).read_bytes(), folder / f"{kind}.gguf")
            made[kind] = kvg.Tokenizer.from_file(path)
        return made[kind]

    return tokenizer


@pytest.fixture(scope="module")
def all_are_long() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "LONG", 0)
        yield


@pytest.mark.parametrize("kind", [*KINDS, *STRIPPED])
@pytest.mark.usefixtures("all_are_long")
@given(text=TEXTS, add_special=st.booleans(), parse_special=st.booleans())
@example(text="<|a|><|b|>", add_special=True, parse_special=True)
@example(text=" <mask>  <|end|> \n", add_special=False, parse_special=True)
@example(text="", add_special=True, parse_special=True)
def test_ids_are_libllamas(
    vocabulary: Callable[[str], kvg.Tokenizer], kind: str, text: str, add_special: bool, parse_special: bool
) -> None:
    tokenizer = vocabulary(kind)
    assert tokenizer.encode(text, add_special, parse_special) == ids_of_libllama(
        tokenizer, text, add_special, parse_special
    )


@pytest.mark.parametrize("kind", [*KINDS, *STRIPPED])
@given(text=TEXTS)
@example(text="\x04" * 300)
@example(text=" " * 300)
@example(text="<|end|>" + " " * 300)
@example(text="xyz" * 300)
@example(text="\U00040000" * 300)
def test_no_text_has_fewer_tokens_than_is_said(
    vocabulary: Callable[[str], kvg.Tokenizer], kind: str, text: str
) -> None:
    tokenizer = vocabulary(kind)
    for parse_special in (False, True):
        assert tokenizer.least_tokens(text) <= len(ids_of_libllama(tokenizer, text, False, parse_special))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma4", "rwkv"])
def test_what_is_said_is_of_use(vocabulary: Callable[[str], kvg.Tokenizer], kind: str) -> None:
    """A token stands for as many bytes as the longest one has."""
    longest = max(map(len, (text.encode() for text in SPECIAL)))
    assert vocabulary(kind).least_tokens("cat " * 1000) >= 4000 // longest


def test_bytes_without_a_token_are_none(tmp_path: Path, model_file: Callable[[ModelSpec], Path]) -> None:
    """As in SmolLM2's vocabulary, whose makers left out bytes that they had not seen."""
    parts = base("gpt2", model_file(TINY).read_bytes())
    key, types = parts.find("tokenizer.ggml.tokens"), parts.find("tokenizer.ggml.token_type")
    assert key is not None and types is not None and isinstance(key.value, list)
    tokens = [token for token in key.value if isinstance(token, bytes) and not re.match(b"<0x", token)]
    tokens.remove("Ą".encode())  # U+0004
    parts.set(key.name.decode(), STRING, [*tokens])
    parts.set(types.name.decode(), INT32, [NORMAL] * len(tokens))
    parts.set("tokenizer.ggml.scores", FLOAT32, [0.0] * len(tokens))
    parts.raw().write(tmp_path / "model.gguf")
    tokenizer = kvg.Tokenizer.from_file(tmp_path / "model.gguf")
    assert tokenizer.encode("\x04" * 9, False) == []
    assert tokenizer.least_tokens("\x04" * 9000) == 0
    assert tokenizer.least_tokens("\x03" * 9000) > 0


def turns(n: int) -> str:
    return "".join(f"<|a|>user\nNumber {i}<|b|>\n" for i in range(n))


def test_many_special_tokens_take_a_time_that_grows_with_the_text(stories: Path) -> None:
    """libllama's own takes the square."""
    tokenizer = kvg.Tokenizer.from_file(stories)
    text = "a</s>" * 20_000
    begin = time.process_time()
    ids = tokenizer.encode(text, False, True)
    took = time.process_time() - begin
    assert len(ids) == 40_000 and ids[1::2] == [2] * 20_000
    begin = time.process_time()
    ids_of_libllama(tokenizer, text[: len(text) // 2], False, True)
    assert took < (time.process_time() - begin) / 2


def test_work_that_nobody_waits_for_ends_between_two_special_tokens(stories: Path) -> None:
    tokenizer = kvg.Tokenizer.from_file(stories)
    text = "a</s>" * 8_000_000
    wanted = Wanted()
    threading.Timer(0.2, wanted.abandon).start()

    def encode() -> None:
        begin(wanted)
        tokenizer.encode(text, False, True)

    began = time.process_time()
    with pytest.raises(AbandonedError):
        contextvars.copy_context().run(encode)
    assert time.process_time() - began < 2  # of 4
    with pytest.raises(AbandonedError):  # not begun at all
        contextvars.copy_context().run(encode)
    assert tokenizer.encode("a</s>" * 2000, False, True)[-1] == 2  # others are wanted as before


def test_threads_share_a_tokenizer(vocabulary: Callable[[str], kvg.Tokenizer]) -> None:
    tokenizer = vocabulary("gpt2")
    text = turns(400)
    expected = ids_of_libllama(tokenizer, text, True, True)
    wrong = []

    def encode() -> None:
        for _ in range(5):
            if tokenizer.encode(text, True, True) != expected:
                wrong.append(1)

    threads = [threading.Thread(target=encode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
