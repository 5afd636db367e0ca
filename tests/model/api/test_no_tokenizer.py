"""A model whose file has no tokenizer decodes token ids; whatever needs text says so at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.engines import decode, run_of
from support.gguf_bytes import STRING
from support.gguf_parts import take_apart
from support.models import SMALL, ModelSpec

import pykvgraph as kvg
from pykvgraph.cli import main

KINDS = [None, b"none", b"no_vocab", b"test"]


def mute(source: Path, target: Path, kind: bytes | None, keep_tokens: bool = False) -> Path:
    """The model without its tokenizer; libllama's own tests keep a list of tokens that stand for nothing."""
    parts = take_apart(source.read_bytes())
    kept = (b"tokenizer.ggml.tokens",) if keep_tokens else ()
    parts.keys = [key for key in parts.keys if not key.name.startswith(b"tokenizer.") or key.name in kept]
    if kind is not None:
        parts.set("tokenizer.ggml.model", STRING, kind)
    return parts.raw().write(target)


@pytest.fixture(params=KINDS, ids=str)
def path(request: pytest.FixtureRequest, model_file: Callable[[ModelSpec], Path], tmp_path: Path) -> Path:
    return mute(model_file(SMALL), tmp_path / "model.gguf", request.param, request.param == b"test")


@pytest.fixture
def ctx(path: Path) -> Iterator[kvg.Context]:
    with kvg.Model(path, device="cpu") as model, kvg.Context(model, n_ctx=64) as ctx:
        yield ctx


def test_the_tokenizer_is_refused_by_name(ctx: kvg.Context, path: Path, small: kvg.Model) -> None:
    assert not ctx.model.has_tokenizer
    assert small.has_tokenizer
    for _ in range(2):
        with pytest.raises(kvg.UnsupportedError, match=r"model\.gguf has no tokenizer .*: give token ids"):
            _ = ctx.model.tokenizer
    with pytest.raises(kvg.UnsupportedError, match="has no tokenizer"):
        kvg.Tokenizer.from_file(path)


def test_token_ids_are_decoded_and_continued(ctx: kvg.Context, small: kvg.Model) -> None:
    """As the same model with a tokenizer does, but without a text and without an end."""
    with kvg.Context(small, n_ctx=64) as other:
        assert (decode(ctx, run_of([1, 2, 3])) == decode(other, run_of([1, 2, 3]))).all()
    ctx.reset()
    pieces = list(kvg.generate(ctx, [1, 5, 9], max_tokens=20))
    assert [piece.text for piece in pieces] == [""] * 20
    assert [piece.finish_reason for piece in pieces] == [None] * 19 + ["length"]
    with kvg.Context(small, n_ctx=64) as other:
        spoken = [piece.token for piece in kvg.generate(other, [1, 5, 9], max_tokens=20)]
    assert [piece.token for piece in pieces][: len(spoken)] == spoken


def test_what_needs_text_is_refused_at_once(ctx: kvg.Context) -> None:
    with pytest.raises(kvg.UnsupportedError, match="has no tokenizer"):
        kvg.generate(ctx, "Once upon a time")
    with pytest.raises(kvg.UnsupportedError, match="stop"):
        kvg.generate(ctx, [1, 2], stop="end")
    assert ctx.kv.n_used == 0


@pytest.mark.parametrize("verb", [["generate", "-p", "Once"], ["generate"], ["passkey"]])
def test_verbs_that_need_text_say_so(path: Path, verb: list[str]) -> None:
    result = CliRunner().invoke(main, [*verb, "-m", str(path)])
    assert result.exit_code == 1
    assert "has no tokenizer" in result.stderr
    assert result.stderr.count("\n") == 1


def test_verbs_that_need_none_work(path: Path) -> None:
    for verb in (["bench", "-p", "16", "-n", "4", "-r", "1"], ["info"]):
        result = CliRunner().invoke(main, [*verb, "-m", str(path)])
        assert result.exit_code == 0, result.output
