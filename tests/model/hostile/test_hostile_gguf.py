"""Damaged and malicious models: a typed error or a working model, never a dead process, and no hang."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import chance
from support.gguf_bytes import FLOAT32, STRING, UINT32
from support.gguf_parts import BOOL, Parts, Tensor, take_apart
from support.hostile import ARCHITECTURES, RARE_KINDS, byte_level
from support.models import TINY, ModelSpec
from support.mutations import (
    INT32,
    PRE_TOKENIZERS,
    SPECIAL_TOKENS,
    TOKENIZERS,
    UINT16,
    WEIGHT_TYPES,
    items_of,
    write_mutant,
)
from support.vocabularies import CHARSMAP, UINT8, charsmap, of_kind

import pykvgraph as kvg
from pykvgraph.model.tokenizer import LoadedVocabulary

TESTS = Path(__file__).parents[2]
ModelFile = Callable[[ModelSpec], Path]

# series of 250: as many at a time as there are processors
MUTANTS = [(base, first, 250) for base in ("stories", "tiny", "q8_0", "byte-level") for first in (0, 250)]
OTHER_KINDS = [
    (base, 0, 100) for base in ("gemma4-tokens", "hybriddna", "whitespace", *RARE_KINDS, "charsmap")
]
ROWS = [(base, 0, 255 if chance.THOROUGH else 100) for base in ARCHITECTURES]
SERIES: list[tuple[str, int, int]] = [
    *MUTANTS,
    *OTHER_KINDS,
    *ROWS,
    ("retyped", 0, len(WEIGHT_TYPES)),
    ("resplit", 0, len(PRE_TOKENIZERS)),
]


def run_python(*arguments: str) -> str:
    """stdout of Python in the tests' folder, where `support` is found."""
    run = subprocess.run(
        [sys.executable, *arguments], cwd=TESTS, capture_output=True, text=True, check=False, timeout=1800
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


def run_series(folder: Path, series: list[tuple[str, int, int]]) -> list[dict[str, str]]:
    """All of them in one process, which forks for each file."""
    arguments = [str(each) for one in series for each in one]
    out = run_python("-m", "support.hostile", str(folder), *arguments)
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.slow
def test_every_file_in_a_process_of_its_own(tmp_path: Path) -> None:
    wanted = [(base, first, count // (chance.SHARE if count >= 100 else 1)) for base, first, count in SERIES]
    n_processes = os.cpu_count() or 1
    folders = [tmp_path / str(index) for index in range(n_processes)]
    for folder in folders:
        folder.mkdir()
    shares = [wanted[index::n_processes] for index in range(n_processes)]
    with ThreadPoolExecutor(n_processes) as pool:
        told = [each for some in pool.map(run_series, folders, shares) for each in some]
    bases = {base for base, *_ in wanted}
    sound = [each["verdict"] for each in told if each["mutant"] in bases]
    trials = [each for each in told if each["mutant"] not in bases]
    assert [each.removesuffix(" head:ok") for each in sound] == ["file:ok tokenizer:ok model:ok"] * len(
        SERIES
    )
    assert sum(each.endswith(" head:ok") for each in sound) == sum(
        base.endswith("-head") for base, *_ in SERIES
    )
    assert len(trials) == sum(count for *_, count in wanted) >= 4000 // chance.SHARE
    died = [trial for trial in trials if trial["verdict"].startswith("!")]
    assert not died, f"{len(died)} of {len(trials)}; the files are in {tmp_path}. The first: {died[0]}"
    # else all of it could have been refused, or accepted, at the first step
    outcomes = Counter(part for trial in trials for part in trial["verdict"].split())
    for step in ("file", "tokenizer", "model"):
        fine = outcomes[f"{step}:ok"]
        assert 0.1 * len(trials) < fine < 0.9 * len(trials), outcomes


@pytest.mark.slow
def test_a_death_is_noticed() -> None:
    """By abort, by signal, by any other exception, by never coming back."""
    script = """
import json, os, signal
from support import hostile
hostile.SECONDS = 2
def hang():
    while True: pass
def crash():
    os.kill(os.getpid(), signal.SIGSEGV)
for task in (os.abort, crash, lambda: str(1 / 0), hang, lambda: "fine"):
    print(json.dumps(hostile.in_child(task)))
"""
    aborted, crashed, failed, hung, fine = map(json.loads, run_python("-c", script).splitlines())
    assert aborted.startswith(f"! ended with {-signal.SIGABRT}")
    assert crashed.startswith("! ended with")
    assert "ZeroDivisionError" in failed
    assert hung.startswith("! took over 2 s")
    assert fine == "fine"


def test_a_seed_is_a_file(tmp_path: Path, model_file: ModelFile) -> None:
    data = model_file(TINY).read_bytes()
    files = []
    for name in ("a.gguf", "b.gguf"):
        for index in range(20):
            write_mutant(take_apart(data), "tiny", index, tmp_path / name)
            files.append((tmp_path / name).read_bytes())
    assert files[:20] == files[20:]
    assert len(set(files)) > 15


# ---- one by one: what libllama would abort on, or would not come back from ----


@pytest.fixture
def parts(model_file: ModelFile) -> Parts:
    return take_apart(model_file(TINY).read_bytes())


def refused(parts: Parts, path: Path) -> Exception:
    """What the vocabulary is refused with. libllama must not have been asked."""
    parts.raw().write(path)
    with kvg.GgufFile(path) as file:
        try:
            file._handle.call(LoadedVocabulary.read, {})
        except (kvg.ModelLoadError, kvg.UnsupportedError) as error:
            return error
    pytest.fail("accepted")


def key(name: str, kind: int, value: object) -> Callable[[Parts], None]:
    return lambda parts: parts.set(name, kind, value)  # type: ignore[arg-type]


def token(index: int, text: bytes, kind: int = 1) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        for name, value in (("tokens", text), ("token_type", kind)):
            found = parts.find(f"tokenizer.ggml.{name}")
            assert found and isinstance(found.value, list)
            found.value[index] = value

    return change


def shorter(name: str) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        found = parts.find(name)
        assert found and isinstance(found.value, list)
        found.value.pop()

    return change


def without(name: str) -> Callable[[Parts], None]:
    def change(parts: Parts) -> None:
        parts.keys = [other for other in parts.keys if other.name != name.encode()]

    return change


def token_ids(parts: Parts) -> None:
    """All missing, of a vocabulary too small for those that stand for them then."""
    parts.keys = [other for other in parts.keys if not other.name.endswith(b"_token_id")]
    for name in ("tokens", "token_type", "scores"):
        del items_of(parts, name)[100:]
    parts.set("tokenizer.ggml.bos_token_id", UINT32, 1)


def many_tensors(parts: Parts) -> None:
    parts.tensors += [Tensor(b"t%d" % index, [1], 0, bytes(4)) for index in range(2**14)]


GGML = "tokenizer.ggml"
CHECKED = [b"llama", b"gpt2", b"gemma4", b"hybriddna", b"whitespace", *map(str.encode, RARE_KINDS)]
SPM = {
    "no architecture": (without("general.architecture"), "architecture"),
    "an architecture that is a number": (key("general.architecture", UINT32, 1), "architecture"),
    "a name that is a number": (key("general.name", UINT32, 1), "general.name"),
    "a template that is a number": (key("tokenizer.chat_template", FLOAT32, 1.0), "chat_template"),
    "too many tensors": (many_tensors, "tensors"),
    "no kind": (without(f"{GGML}.model"), "model"),
    "a kind that is an array": (key(f"{GGML}.model", STRING, [b"llama"]), "array of str"),
    "no tokens": (without(f"{GGML}.tokens"), "tokens"),
    "empty tokens": (key(f"{GGML}.tokens", STRING, []), "0 tokens"),
    "tokens that are numbers": (key(f"{GGML}.tokens", UINT32, [1] * 288), "array of u32"),
    "one token": (key(f"{GGML}.tokens", STRING, b"a"), "expected an array of str"),
    "a token twice": (token(200, b"<s>"), "'<s>' twice, at 1 and 200"),
    "a token named as empty ones are": (
        lambda parts: [token(7, b"")(parts), token(9, b"[EMPTY_7]")(parts)],
        "twice",
    ),
    "a token of half a character": (token(280, b"\xc3", 4), "token 280, of type 4, is not UTF-8"),
    "a control token of half a character": (token(280, b"\xa9", 3), "token 280, of type 3, is not UTF-8"),
    "a surrogate": (token(280, b"\xed\xa0\x80", 2), "not UTF-8"),
    "beyond Unicode": (token(280, b"\xf4\x90\x80\x80", 4), "not UTF-8"),
    "an overlong character": (token(280, b"\xe0\x80\x80", 4), "not UTF-8"),
    "a byte too short to be one": (token(280, b"<0", 6), "token 280 is a byte"),
    "a byte that is none": (token(280, b"<0xZZ>", 6), "token 280 is a byte"),
    "a token of 20,000 characters": (token(280, b"x" * 20_000), "longer"),
    "token types, one too few": (shorter(f"{GGML}.token_type"), "287 items"),
    "token types, one too many": (key(f"{GGML}.token_type", INT32, [1] * 289), "289 items"),
    "token types as unsigned": (key(f"{GGML}.token_type", UINT32, [1] * 288), "array of u32"),
    "a token type that is none": (token(280, b"odd", 7), "type 7"),
    "scores, one too few": (shorter(f"{GGML}.scores"), "287 items"),
    "a score that is none": (key(f"{GGML}.scores", FLOAT32, [0.0] * 287 + [math.nan]), "287 is not a number"),
    "scores that are texts": (key(f"{GGML}.scores", STRING, [b"1"] * 288), "array of str"),
    "a flag that is a number": (key(f"{GGML}.add_bos_token", UINT32, 1), "expected bool"),
    "a space prefix that is a text": (key(f"{GGML}.add_space_prefix", STRING, b"no"), "expected bool"),
    "suppressed tokens that are floats": (key(f"{GGML}.suppress_tokens", FLOAT32, [1.0]), "suppress"),
    **{
        f"{name} out of range": (key(f"{GGML}.{name}_token_id", UINT32, 288), "expected a token: 0 to 287")
        for name in SPECIAL_TOKENS
    },
    "a signed id": (key(f"{GGML}.bos_token_id", INT32, 1), "expected u32"),
    "an array of ids": (key(f"{GGML}.eos_token_id", UINT32, [2]), "expected u32"),
}
BYTE_LEVEL = {
    "no merges": (without(f"{GGML}.merges"), "merges"),
    "merges that are numbers": (key(f"{GGML}.merges", UINT32, [1]), "merges"),
    "a merge of one": (key(f"{GGML}.merges", STRING, [b"a a", b"aa"]), "merge 1 is 'aa'"),
    "a merge with nothing": (key(f"{GGML}.merges", STRING, [b"a "]), "merge 0"),
    "an empty merge": (key(f"{GGML}.merges", STRING, [b""]), "merge 0"),
    "a pre-tokenizer that leaves blanks": (key(f"{GGML}.pre", STRING, b"whitespace"), "whitespace"),
    "a pre-tokenizer that is a number": (key(f"{GGML}.pre", UINT32, 1), "pre"),
    "a text that grows with its square": (token(280, "\u4e2d".encode() * 10_000), "longer"),
}


@pytest.mark.parametrize(("change", "message"), SPM.values(), ids=SPM.keys())
def test_sentencepiece(parts: Parts, tmp_path: Path, change: Callable[[Parts], object], message: str) -> None:
    change(parts)
    assert message in str(refused(parts, tmp_path / "model.gguf"))


@pytest.mark.parametrize(("change", "message"), BYTE_LEVEL.values(), ids=BYTE_LEVEL.keys())
def test_byte_level(parts: Parts, tmp_path: Path, change: Callable[[Parts], object], message: str) -> None:
    change(byte_level(parts))
    assert message in str(refused(parts, tmp_path / "model.gguf"))


RARE = {
    "bert without an unknown token": ("bert", token_ids, "unknown_token_id is missing, and token 100"),
    "bert with a byte": ("bert", token(280, b"<0x00>", 6), "token 280 is a byte"),
    "t5 with a long token": ("t5", token(280, b"x" * 513), "longer"),
    "a charsmap of text": ("t5", key(CHARSMAP, STRING, [b"x"]), "no array of bytes"),
    "a charsmap of nothing": ("t5", key(CHARSMAP, UINT8, []), "size that can't be"),
    "a charsmap that is cut off": ("t5", key(CHARSMAP, UINT8, [*charsmap()[:999]]), "shorter than it says"),
    "a charsmap without its texts' ends": ("t5", key(CHARSMAP, UINT8, [*charsmap()[:-1]]), "isn't there"),
    "a charsmap that leads away": ("t5", key(CHARSMAP, UINT8, [*b"\4\0\0\0" + bytes(9)]), "out of its table"),
    "rwkv without a byte": ("rwkv", token(11, b"odd"), "is the byte 0x0A"),
    "plamo2 with half a character": ("plamo2", token(280, b"\xc3"), "token 280 of this 'plamo2'"),
}


@pytest.mark.parametrize(("kind", "change", "message"), RARE.values(), ids=RARE.keys())
def test_rare_kinds(
    parts: Parts, tmp_path: Path, kind: str, change: Callable[[Parts], object], message: str
) -> None:
    change(of_kind(parts, kind.encode()))
    assert message in str(refused(parts, tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        ("bert", "<s> \u2581the \u2581cat </s>"),
        ("t5", "\u2581the \u2581cat </s>"),
        ("rwkv", "the \\x20 cat"),
        ("plamo2", "the <0x20> cat"),
    ],
)
def test_rare_kinds_speak(parts: Parts, tmp_path: Path, kind: str, ids: str) -> None:
    """As their own rules say: the longest token, or the best scores."""
    path = tmp_path / "model.gguf"
    of_kind(parts, kind.encode()).raw().write(path)
    tokenizer = kvg.Tokenizer.from_file(path)
    tokens = items_of(parts, "tokens")
    found = tokenizer.encode("the cat")
    assert [tokens[token] for token in found] == ids.encode().split()
    assert tokenizer.decode(found) == "the cat"
    assert tokenizer.decode(tokenizer.encode("")) == ""


@pytest.mark.parametrize("kind", [kind for kind in TOKENIZERS if kind not in CHECKED])
def test_kinds_that_are_not_checked(parts: Parts, tmp_path: Path, kind: bytes) -> None:
    parts.set("tokenizer.ggml.model", STRING, kind)
    assert isinstance(refused(parts, tmp_path / "model.gguf"), kvg.UnsupportedError)


HARMLESS = {
    "no token types": without(f"{GGML}.token_type"),
    "no scores": without(f"{GGML}.scores"),
    "whole scores": key(f"{GGML}.scores", INT32, [-1] * 288),
    "no such token": key(f"{GGML}.padding_token_id", UINT32, 2**32 - 1),
    "an empty token": token(280, b""),
    "a token of half a character that is only merged": token(280, b"\xc3"),
    "a flag": key(f"{GGML}.add_eos_token", BOOL, 1),
    "a whole model": key("split.count", UINT16, 1),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS.keys())
def test_what_is_only_odd(parts: Parts, tmp_path: Path, change: Callable[[Parts], object]) -> None:
    change(parts)
    path = tmp_path / "model.gguf"
    parts.raw().write(path)
    with kvg.GgufFile(path) as file:
        tokenizer = kvg.Tokenizer(path, file._handle.call(LoadedVocabulary.read, {}))
    assert tokenizer.decode(tokenizer.encode("the cat", add_special=False)) == "the cat"
