"""Llama's constructor, its vocabulary, embeddings, and its life."""

from __future__ import annotations

import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pykvgraph as kvg
import pykvgraph.llama as face
from pykvgraph.llama.arguments import _ONLY
from pykvgraph.plan import fitting

from .conftest import EXACT, Pair, llama_cpp

METHODS = [
    name
    for name, value in vars(llama_cpp.Llama).items()
    if inspect.isfunction(value) and (not name.startswith("_") or name in ("__init__", "__call__"))
]
OUR_OWN = [("kv_tier", "device"), ("device_layers", 2)]  # behind theirs


def test_the_methods_are_there() -> None:
    assert {"eval", "generate", "embed", "save_state", "create_chat_completion"} < set(METHODS)
    assert [name for name in METHODS if not hasattr(kvg.Llama, name)] == []


@pytest.mark.parametrize("name", face.__all__)
def test_what_is_imported_late_is_there(name: str) -> None:
    assert getattr(face, name).__name__ in (name, "LlamaRAMCache")


@pytest.mark.parametrize("name", METHODS)
def test_arguments_have_the_same_names_order_and_defaults(name: str) -> None:
    def shown(llama: Any) -> list[tuple[str, Any]]:
        parameters = inspect.signature(getattr(llama, name)).parameters.values()
        return [(each.name, each.default) for each in parameters if each.kind is not each.VAR_KEYWORD]

    theirs, ours = shown(llama_cpp.Llama), shown(kvg.Llama)
    assert ours[: len(theirs)] == theirs
    assert ours[len(theirs) :] == (OUR_OWN if name == "__init__" else [])


@pytest.mark.parametrize("name", sorted(_ONLY))
def test_what_is_not_supported_is_named(stories: Path, name: str) -> None:
    if name in ("tfs_z", "penalize_nl"):  # of the methods
        with kvg.Llama(str(stories)) as llm, pytest.raises(kvg.UnsupportedError, match=name):
            next(llm.generate([1], **{name: 0.5}))  # type: ignore[arg-type]
        return
    with pytest.raises(kvg.UnsupportedError, match=name):
        kvg.Llama(str(stories), **{name: 2})  # type: ignore[arg-type]


def test_the_page_names_everything() -> None:
    """docs/ says of each method and argument whether it is the same, and refuses what the code does."""
    text = (Path(__file__).parents[3] / "docs/coming-from-llama-cpp-python.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1:-1] for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    named = {kind: "".join(row[0] for row in rows if row[1].strip() == kind) for kind in ("same", "refused")}
    listed = {kind: set(re.findall(r"`(\w+)[=`]", cells)) for kind, cells in named.items()}
    assert listed["refused"] >= set(_ONLY)
    arguments = {
        parameter.name
        for method in METHODS
        for parameter in inspect.signature(getattr(llama_cpp.Llama, method)).parameters.values()
        if method in ("__init__", "create_completion", "create_chat_completion")
        and parameter.name not in ("self", "kwargs")
    }
    everywhere = set(re.findall(r"`(\w+)[=`]", "".join(row[0] + row[2] for row in rows)))
    methods = set(METHODS) - {"__init__"}
    assert sorted((arguments | methods) - everywhere) == []
    assert not listed["same"] & set(_ONLY)


def test_what_nobody_knows(stories: Path) -> None:
    with pytest.raises(TypeError, match="n_contex"):
        kvg.Llama(str(stories), n_contex=5)  # type: ignore[call-arg]


def test_another_type_is_told_which_there_are(stories: Path) -> None:
    with pytest.raises(
        kvg.UnsupportedError, match=r"no type 999; it has f32 \(0\), f16 \(1\), [a-z0-9_, ()]+$"
    ):
        kvg.Llama(str(stories), type_k=999)


@pytest.mark.parametrize("error", [FileNotFoundError, ValueError])
def test_a_missing_file(error: Any) -> None:
    with pytest.raises(error, match="nowhere"):
        kvg.Llama("nowhere.gguf")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"type_k": 99}, kvg.UnsupportedError),
        ({"n_ctx": -1}, ValueError),
        ({"n_ctx": "a"}, (TypeError, ValueError)),
        ({"chat_handler": 5}, ValueError),
        ({"pooling_type": 4, "embedding": True}, None),
    ],
    ids=str,
)
def test_bad_values(stories: Path, arguments: dict[str, Any], error: Any) -> None:
    if error is not None:
        with pytest.raises(error):
            kvg.Llama(str(stories), **arguments)
        return
    with (
        kvg.Llama(str(stories), **arguments) as llm,
        pytest.raises(kvg.UnsupportedError, match="pooling_type"),
    ):
        llm.embed("a")


TEXTS = [b"Hello World", b"", b" two  spaces", "\u00e9\u20ac".encode(), b"Hello</s>", b"\xff half", b"\n"]


def test_the_vocabulary(both: Pair) -> None:
    ours, theirs = both
    for text in TEXTS:
        for add_bos in (False, True):
            for special in (False, True):
                ids = ours.tokenize(text, add_bos, special)
                if text != TEXTS[5]:
                    assert ids == theirs.tokenize(text, add_bos, special)
                assert ours.detokenize(ids) == theirs.detokenize(ids)
                assert ours.detokenize(ids, special=True) == theirs.detokenize(ids, special=True)
                assert ours.tokenizer().decode(ids) == theirs.tokenizer().decode(ids)
    for name in ("token_bos", "token_eos", "token_nl", "n_vocab", "n_embd", "pooling_type"):
        assert getattr(ours, name)() == getattr(theirs, name)()
    assert ours.metadata == theirs.metadata


def test_how_far_two_texts_agree() -> None:
    texts = [[], [1], [1, 2, 3], [1, 2, 4], [1, 2, 3, 4, 5], [2, 1]]
    for a in texts:
        for b in texts:
            expected = llama_cpp.Llama.longest_token_prefix(a, b)
            assert kvg.Llama.longest_token_prefix(a, b) == expected
            assert kvg.Llama.longest_token_prefix(np.array(a, np.int32), b) == expected


def test_a_vocabulary_alone(stories: Path) -> None:
    with kvg.Llama(str(stories), vocab_only=True) as llm:
        assert llm.detokenize(llm.tokenize(b"Hello")) == b"Hello"
        with pytest.raises(ValueError, match="vocab_only"):
            llm("Hello")


def test_a_tokenizer_of_ones_own(stories: Path) -> None:
    class Letters:
        def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
            return [1, *(400 + byte % 50 for byte in text)]

        def detokenize(
            self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
        ) -> bytes:
            return b"?" * len(tokens)

    with kvg.Llama(str(stories), tokenizer=Letters()) as llm:
        assert llm("abc", max_tokens=2)["usage"]["prompt_tokens"] == 4
        assert llm.detokenize([1, 2]) == b"??"


@pytest.mark.parametrize("pooling_type", [-1, 0, 1, 2, 3])
def test_embeddings(stories: Path, pooling_type: int) -> None:
    arguments: dict[str, Any] = {**EXACT, "embedding": True, "pooling_type": pooling_type, "n_ctx": 64}
    theirs = llama_cpp.Llama(str(stories), **arguments)
    texts = ["Once upon a time", "The big dog"]
    with kvg.Llama(str(stories), **arguments) as ours:
        assert ours.pooling_type() == theirs.pooling_type()
        for normalize in (False, True):
            alone = [
                theirs.embed(text, normalize=normalize) for text in texts
            ]  # of several it mixes the rows
            assert_close(ours.embed(texts[0], normalize=normalize), alone[0])
            together, n_tokens = ours.embed(texts, normalize=normalize, return_count=True)
            assert n_tokens == theirs.embed(texts, return_count=True)[1]
            for one, other in zip(together, alone, strict=True):
                assert_close(one, other)
        made, expected = ours.create_embedding(texts), theirs.create_embedding(texts)
        assert made["usage"] == expected["usage"] and list(made) == list(expected)
        assert [list(each) for each in made["data"]] == [list(each) for each in expected["data"]]
    theirs.close()


def assert_close(one: Any, other: Any) -> None:
    assert np.shape(one) == np.shape(other)
    assert np.allclose(one, other, atol=2e-3)


def test_embeddings_want_to_be_asked_for(llm: kvg.Llama) -> None:
    with pytest.raises(RuntimeError, match="embedding=True"):
        llm.embed("a")


def test_an_embedded_text_is_cut(stories: Path) -> None:
    with kvg.Llama(str(stories), embedding=True, n_batch=8, n_ctx=64) as llm:
        assert len(llm.embed("one two three four five six seven")) == 8
        with pytest.raises(ValueError, match="n_batch"):
            llm.embed("one two three four five six seven", truncate=False)


def test_cache_types_and_sizes(stories: Path) -> None:
    with kvg.Llama(str(stories), type_k=1, type_v="f32", n_ctx=0, n_batch=16, n_ubatch=99) as llm:
        assert (llm.context.type_k, llm.context.type_v) == ("f16", "f32")
        assert llm.n_ctx() == llm.model.n_ctx_train
        assert (llm.n_batch, llm.context.n_ubatch) == (16, 16)


def test_pickled(llm: kvg.Llama) -> None:
    """A copy opens the same file with the same arguments."""
    with pickle.loads(pickle.dumps(llm)) as other:
        assert other.n_ctx() == llm.n_ctx()
        assert (
            other("Once", max_tokens=5, temperature=0.0)["choices"]
            == llm("Once", max_tokens=5, temperature=0.0)["choices"]
        )


def test_closed(stories: Path) -> None:
    llm = kvg.Llama(str(stories))
    llm.close()
    llm.close()
    with pytest.raises(kvg.InvalidArgumentError, match="closed"):
        llm("Once")


def test_the_import_is_lazy() -> None:
    """Neither llama_cpp nor Jinja comes with pykvgraph."""
    program = "import sys, pykvgraph; print(*{'llama_cpp', 'jinja2', 'pykvgraph.llama'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []
    assert face.LlamaGrammar is llama_cpp.LlamaGrammar
    with pytest.raises(AttributeError):
        _ = face.nothing


def test_n_ctx_auto(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model was trained on, or what there is room for; and the text is answered either way."""
    with kvg.Llama(str(stories), n_ctx="auto") as llm:
        assert (llm.n_ctx(), llm.n_batch) == (512, 512)
    monkeypatch.setattr(fitting, "host_free_bytes", lambda *_, **__: 3_800_000)
    with kvg.Llama(str(stories), n_ctx="auto", embedding=True) as llm:
        assert (llm.n_ctx(), llm.n_batch) == (256, 256)
        assert len(llm.embed("Once upon a time " * 100)) == 256
        assert llm("Once upon", max_tokens=3)["usage"]["completion_tokens"] == 3
    with pytest.raises(kvg.InvalidArgumentError, match="logits_all"):
        kvg.Llama(str(stories), n_ctx="auto", logits_all=True)
