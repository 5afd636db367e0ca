"""What objects look like in a debugger: short, useful, and never an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.architectures import ArchSpec
from support.recurrent import DELTA_NET

import pykvgraph as kvg
from pykvgraph.models import embedded_model


def test_what_they_say(stories: Path) -> None:
    model = kvg.Model(stories, device="cpu")
    ctx = kvg.Context(model, n_ctx=64)
    ctx.append(1)
    kv, tokenizer = ctx.kv, model.tokenizer
    name = f"<Model: {str(stories)!r}, llama, 0.3 M parameters, 1.1 MiB"
    assert repr(model) == f"{name}>"
    assert repr(ctx) == "<Context: n_ctx 64, 1 of 64 cells used>"
    assert repr(kv) == "<KVCache: 1 of 64 cells used, 160.0 KiB>"  # tensors of 256 rows
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
        cells, states = ctx.kv.groups
        size = f"{(256 * cells.cell_bytes + 10 * states.cell_bytes) / 1024:.1f} KiB"
        assert repr(ctx.kv) == f"<KVCache: 2 of 64 cells used, 2 of 10 states, {size}>"


def test_windows(architecture: Callable[[ArchSpec], Path]) -> None:
    spec = ArchSpec("gemma3", n_layer=3, window=24)
    with kvg.Model(architecture(spec), device="cpu") as model, kvg.Context(model, n_ctx=64) as ctx:
        ctx.append(1)
        assert repr(ctx.kv).startswith("<KVCache: 1 of 64 cells used, 1 of 64 in the window of 24, ")


def test_the_map_of_a_cache(architecture: Callable[[ArchSpec], Path]) -> None:
    """Each group as its cells() has it, at one moment, and checkpoints."""
    spec = ArchSpec("gemma3", n_layer=3, window=24)
    with kvg.Model(architecture(spec), device="cpu") as model, kvg.Context(model, n_ctx=64) as ctx:
        for _ in range(5):
            ctx.append(1)
        ctx.kv.checkpoint(0)
        found = ctx.kv.cell_map(0)
        assert [group.window for group in found.groups] == [0, 24]
        for index, cells in enumerate(found.views):
            assert cells.pos.tolist() == ctx.kv.cells(index).pos.tolist()
        assert (found.states, found.checkpoints, found.seq) == (None, [[5]], 0)
        with pytest.raises(kvg.InvalidArgumentError):
            ctx.kv.cell_map(1)


def test_cells_wait_after_an_update_only() -> None:
    """With a quantized K on the CPU; UpdateStats counts the same cells."""
    with (
        kvg.Model(embedded_model(), device="cpu") as model,
        kvg.Context(model, n_ctx=512, type_k="q8_0", type_v="q8_0") as ctx,
    ):
        batch = kvg.Batch()
        batch.extend([1] * 300, 0, (0,), logits=False)
        ctx.decode(batch)
        ctx.kv.seq_rm(0, 0, 40)
        ctx.kv.seq_add(0, 40, -1, -40)
        assert "260 pending" in repr(ctx.kv.cells())
        assert not ctx.kv.cells().waiting.any()
        assert ctx.kv.update().waiting_cells == 260 == ctx.kv.cells().waiting.sum()
        ctx.kv.seq_add(0, 250, -1, 1)
        assert not ctx.kv.cells().waiting.any()


@pytest.mark.parametrize("kind", [kvg.Model, kvg.Context, kvg.KVCache, kvg.Tokenizer])
def test_half_made_ones(kind: type) -> None:
    assert repr(object.__new__(kind)) == f"<{kind.__name__}>"


@pytest.mark.parametrize("kind", [kvg.Model, kvg.GgufFile])
def test_an_empty_path(kind: type) -> None:
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: ''$"):
        kind("")
