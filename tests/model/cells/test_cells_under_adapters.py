"""Cells that were decoded under an adapter go only where the same one is, with the same scale."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.adapters import write_adapter
from support.engines import decode, open_context, random_ids, run_of
from support.models import N_VOCAB, SMALL, ModelSpec

import pykvgraph as kvg
from pykvgraph import stream

TOKENS = run_of(random_ids(20, N_VOCAB))


@pytest.fixture(scope="module")
def adapters(
    small: kvg.Model, model_file: Callable[[ModelSpec], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[kvg.Adapter]]:
    folder = tmp_path_factory.mktemp("adapters")
    paths = [write_adapter(folder / f"{seed}.gguf", model_file(SMALL), seed=seed) for seed in range(2)]
    yield [small.load_adapter(path) for path in paths]


def saved_under(model: kvg.Model, pairs: list[tuple[kvg.Adapter, float]]) -> tuple[bytes, np.ndarray]:
    """A state, and the logits of a token behind it."""
    with open_context(model, n_ctx=64) as ctx:
        ctx.set_adapters(pairs)
        decode(ctx, TOKENS)
        return ctx.kv.save(0), ctx.append(7)


def test_a_saved_state_belongs_to_its_adapters(small: kvg.Model, adapters: list[kvg.Adapter]) -> None:
    first, second = adapters
    under: list[list[tuple[kvg.Adapter, float]]] = [
        [],
        [(first, 1.0)],
        [(first, 0.5)],
        [(second, 1.0)],
        [(first, 1.0), (second, 1.0)],
    ]
    states = [saved_under(small, pairs) for pairs in under]
    for here, pairs in enumerate(under):
        with open_context(small, n_ctx=64) as ctx:
            ctx.set_adapters([*reversed(pairs)])  # in any order
            for theirs, (state, behind) in enumerate(states):
                if theirs == here:
                    ctx.kv.load(state, 0)
                    assert np.array_equal(ctx.append(7), behind)
                else:
                    with pytest.raises(kvg.StateError, match="adapters"):
                        ctx.kv.load(state, 0)


def test_the_same_file_elsewhere_is_the_same_adapter(
    small: kvg.Model, adapters: list[kvg.Adapter], tmp_path: Path
) -> None:
    state, behind = saved_under(small, [(adapters[0], 1.0)])
    copied = tmp_path / "elsewhere.gguf"
    copied.write_bytes(adapters[0].path.read_bytes())
    with open_context(small, n_ctx=64) as ctx:
        ctx.set_adapters([(small.load_adapter(copied), 1.0)])
        ctx.kv.load(state, 0)
        assert np.array_equal(ctx.append(7), behind)


def test_cells_of_two_kinds_are_not_saved(small: kvg.Model, adapters: list[kvg.Adapter]) -> None:
    with open_context(small, n_ctx=64) as ctx:
        decode(ctx, TOKENS)
        plain = ctx.kv.save(0)
        ctx.set_adapters([(adapters[0], 1.0)])
        for use in (lambda: ctx.kv.save(0), lambda: ctx.kv.load(plain, 0)):
            with pytest.raises(kvg.UnsupportedError, match="clear"):
                use()
        ctx.set_adapters([])  # cells of the adapter may be among them: nobody counted
        with pytest.raises(kvg.UnsupportedError, match="clear"):
            ctx.kv.save(0)
        ctx.kv.clear()
        ctx.kv.load(plain, 0)
        assert ctx.kv.save(0) == plain


def test_a_stream_belongs_to_its_adapters(small: kvg.Model, adapters: list[kvg.Adapter]) -> None:
    with open_context(small, n_ctx=64) as source, open_context(small, n_ctx=64) as target:
        source.set_adapters([(adapters[0], 1.0)])
        decode(source, TOKENS)
        for pairs in ([], [(adapters[0], 1.0)]):
            target.set_adapters(pairs)
            ends = stream.open("memory:adapters"), stream.open("memory:adapters")
            layouts = [stream.Layout({end: range(small.n_layer)}) for end in ends]
            sending = threading.Thread(target=_send, args=(source, layouts[0]))
            sending.start()
            if not pairs:
                with pytest.raises(kvg.StateError, match="adapters"):
                    stream.stream_in(target, 0, layouts[1])
            else:
                stream.stream_in(target, 0, layouts[1])
            sending.join()
            for end in ends:
                end.close()
        assert np.array_equal(source.append(7), target.append(7))


def test_a_stream_ends_when_adapters_change(small: kvg.Model, adapters: list[kvg.Adapter]) -> None:
    """What was decoded under others doesn't go under the names of the first ones; nor is it taken so."""
    with open_context(small, n_ctx=64) as source, open_context(small, n_ctx=64) as target:
        decode(source, TOKENS)
        ends = stream.open("memory:changed"), stream.open("memory:changed")
        layouts = [stream.Layout({end: range(small.n_layer)}) for end in ends]
        out = stream.following(source, 0, layouts[0])
        coming = iter(stream.arrivals(target, 0, layouts[1]))
        assert next(coming) == len(TOKENS) - 1
        source.append(7)
        out.send()
        target.set_adapters([(adapters[0], 1.0)])
        with pytest.raises(kvg.InvalidArgumentError, match="adapters have changed"):
            next(coming)
        source.set_adapters([(adapters[0], 1.0)])
        source.append(7)
        with pytest.raises(kvg.InvalidArgumentError, match="adapters have changed"):
            out.send()


@pytest.mark.parametrize("where", ["before", "behind"])
def test_ctrl_c_leaves_the_old_ones(
    small: kvg.Model, adapters: list[kvg.Adapter], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Whatever was done when it came: cells are never taken for those of others."""
    with open_context(small, n_ctx=64) as ctx, open_context(small, n_ctx=64) as plain:
        done = ctx.kv._decode_under

        def interrupted(*arguments: Any) -> None:
            if where == "behind":
                done(*arguments)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ctx.kv, "_decode_under", interrupted)
            ctx.set_adapters([(adapters[0], 1.0)])
        assert not list(ctx.adapters)
        decode(ctx, TOKENS)
        decode(plain, TOKENS)
        assert np.array_equal(ctx.append(7), plain.append(7))
        plain.kv.load(ctx.kv.save(0), 0)
        ctx.set_adapters([(adapters[0], 1.0)])
        assert list(ctx.adapters) == [(adapters[0], 1.0)]


def test_a_file_that_is_overwritten(small: kvg.Model, adapters: list[kvg.Adapter], tmp_path: Path) -> None:
    """Cells belong to what was loaded."""
    path = tmp_path / "one.gguf"
    path.write_bytes(adapters[0].path.read_bytes())
    adapter = small.load_adapter(path)
    path.write_bytes(adapters[1].path.read_bytes())
    assert adapter.digest == adapters[0].digest != adapters[1].digest


def test_more_adapters_than_can_be(small: kvg.Model, adapters: list[kvg.Adapter]) -> None:
    many: list[kvg.Adapter] = [small.load_adapter(adapters[0].path) for _ in range(65)]
    with open_context(small, n_ctx=64) as ctx:
        with pytest.raises(kvg.InvalidArgumentError, match="at most 64"):
            ctx.set_adapters([(each, 0.01) for each in many])
        ctx.set_adapters([(each, 0.01) for each in many[1:]])
        assert len(ctx.adapters) == 64


def _send(ctx: kvg.Context, layout: stream.Layout) -> None:
    with contextlib.suppress(kvg.TransportError):  # who takes nothing closes its end
        stream.stream_out(ctx, 0, layout)
