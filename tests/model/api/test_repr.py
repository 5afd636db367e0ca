"""What objects look like in a debugger: short, useful, and never an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.architectures import ArchSpec
from support.recurrent import DELTA_NET

import pykvgraph as kvg


def test_what_they_say(stories: Path) -> None:
    model = kvg.Model(stories, device="cpu")
    ctx = kvg.Context(model, n_ctx=64)
    ctx.append(1)
    kv, tokenizer = ctx.kv, model.tokenizer
    name = f"<Model: {str(stories)!r}, llama, 0.3 M parameters"
    assert repr(model) == f"{name}>"
    assert repr(ctx) == "<Context: n_ctx 64, 1 of 64 cells used>"
    assert repr(kv) == "<KVCache: 1 of 64 cells used>"
    assert repr(tokenizer) == "<Tokenizer: 512 tokens, bos 1, eos 2>"
    assert ctx._handle.call(lambda _: repr(ctx)) == "<Context: n_ctx 64, busy>"
    ctx.close()
    model.close()
    assert repr(model) == f"{name}, closed>"
    assert repr(ctx) == "<Context: n_ctx 64, closed>"
    assert repr(kv) == "<KVCache: closed>"
    assert repr(tokenizer) == "<Tokenizer: 512 tokens, bos 1, eos 2>"


def test_states(architecture: Callable[[ArchSpec], Path]) -> None:
    with kvg.Model(architecture(DELTA_NET), device="cpu") as model, kvg.Context(model, n_ctx=64) as ctx:
        ctx.append(1)
        ctx.kv.checkpoint(0)
        ctx.append(1)
        assert repr(ctx.kv) == "<KVCache: 2 of 64 cells used, 2 of 10 states>"


@pytest.mark.parametrize("kind", [kvg.Model, kvg.Context, kvg.KVCache, kvg.Tokenizer])
def test_half_made_ones(kind: type) -> None:
    assert repr(object.__new__(kind)) == f"<{kind.__name__}>"


@pytest.mark.parametrize("kind", [kvg.Model, kvg.GgufFile])
def test_an_empty_path(kind: type) -> None:
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: ''$"):
        kind("")
