"""Requests under different LoRA adapters on one engine: each says what a context of its own would say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.adapters import write_adapter
from support.engines import open_context, random_ids
from support.models import N_VOCAB, SMALL, ModelSpec

import pykvgraph as kvg
from pykvgraph.model.adapter import Active, key_of
from pykvgraph.prefix import block
from pykvgraph.sequence.sequence import TokenSequence

PROMPT = random_ids(70, N_VOCAB)
PARAMS = kvg.SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def sets(
    small: kvg.Model, model_file: Callable[[ModelSpec], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Active]]:
    """No adapter, one, the same with another scale, another one."""
    folder = tmp_path_factory.mktemp("adapters")
    paths = [write_adapter(folder / f"{seed}.gguf", model_file(SMALL), seed=seed) for seed in range(2)]
    first, second = (small.load_adapter(path) for path in paths)
    yield [(), ((first, 1.0),), ((first, 0.3),), ((second, 1.0),)]


def alone(model: kvg.Model, adapters: Active, prompt: list[int], n: int = 12) -> list[int]:
    """Greedily, on a context of its own, token by token."""
    with open_context(model, n_ctx=256, adapters=adapters) as ctx:
        batch = kvg.Batch()
        batch.extend(prompt, 0, logits="last")
        said = [int(ctx.decode_last(batch).argmax())]
        while len(said) < n:
            said.append(int(ctx.append(said[-1]).argmax()))
        return said


def test_texts_are_those_of_contexts_of_their_own(small: kvg.Model, sets: list[Active]) -> None:
    expected = [alone(small, each, PROMPT) for each in sets]
    assert len({tuple(said) for said in expected}) == len(sets)
    with kvg.Engine(small, n_ctx=1024, n_seq_max=8, background=False, n_threads=1) as engine:
        requests = [engine.submit(PROMPT, PARAMS, adapters=each) for each in sets * 2]
        while engine.step():
            pass
        found = [list(request.result().tokens) for request in requests]
        assert found == expected * 2
        # the second of each pair has the first one's whole blocks, and nobody else's
        assert len(sets) * 64 <= engine.stats().prefix_hit_tokens < len(sets) * len(PROMPT)


def test_nobody_starves(small: kvg.Model, sets: list[Active]) -> None:
    """A text is decoded in every len(sets)-th step at least."""
    with kvg.Engine(small, n_ctx=1024, n_seq_max=8, background=False, n_threads=1) as engine:
        requests = [engine.submit(PROMPT[:5], PARAMS, adapters=each) for each in sets]
        for _ in range(len(sets) * PARAMS.max_tokens):
            engine.step()
        assert all(request.done for request in requests)


def test_an_engines_own_adapters(small: kvg.Model, sets: list[Active]) -> None:
    with kvg.Engine(small, n_ctx=512, n_seq_max=2, adapters=sets[1], background=False) as engine:
        own, none = engine.submit(PROMPT, PARAMS), engine.submit(PROMPT, PARAMS, adapters=[])
        while engine.step():
            pass
        assert list(own.result().tokens) == alone(small, sets[1], PROMPT)
        assert list(none.result().tokens) == alone(small, (), PROMPT)


@pytest.mark.parametrize("wrong", [7, "a", [3]])
def test_what_is_no_list_is_refused(small: kvg.Model, wrong: Any) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match="adapters must be pairs"):
        kvg.Engine(small, n_ctx=64, adapters=wrong)
    with pytest.raises(kvg.InvalidArgumentError, match="load_adapter"):
        kvg.Adapter(small, "a.gguf", False)  # type: ignore[arg-type]


def test_prefix_files_belong_to_adapters(small: kvg.Model, sets: list[Active], tmp_path: Path) -> None:
    with kvg.Engine(small, n_ctx=512, n_seq_max=2, background=False) as engine:
        for each in (sets[1], sets[3]):  # cells of both are there now
            engine.submit(PROMPT, PARAMS, adapters=each)
            while engine.step():
                pass
        assert engine.save_prefix(tmp_path / "a", PROMPT, adapters=sets[1]) == len(PROMPT)
        assert engine.save_prefix(tmp_path / "none", PROMPT) == 0
    with kvg.Engine(small, n_ctx=512, n_seq_max=2, background=False) as engine:
        for each in (sets[0], sets[2], sets[3]):
            with pytest.raises(kvg.StateError, match="adapters"):
                engine.load_prefix(tmp_path / "a", adapters=each)
        assert engine.load_prefix(tmp_path / "a", adapters=sets[1]) == PROMPT
        request = engine.submit(PROMPT, PARAMS, adapters=sets[1])
        while engine.step():
            pass
        assert request.result().n_cached == len(PROMPT) - 1
        assert list(request.result().tokens) == alone(small, sets[1], PROMPT)


@pytest.mark.usefixtures("decoding_is_slow")
def test_tiers_belong_to_adapters(small: kvg.Model, sets: list[Active], tmp_path: Path) -> None:
    hits = []
    for each in (sets[1], sets[1], sets[0], sets[2], sets[3]):
        tiers = kvg.Tiers(ram="64M", disk="256M", path=str(tmp_path))
        with kvg.Engine(small, n_ctx=512, n_seq_max=2, tiers=tiers, background=False) as engine:
            request = engine.submit(PROMPT, PARAMS, adapters=each)
            while engine.step():
                pass
            hits.append(request.result().n_cached)
            assert list(request.result().tokens) == alone(small, each, PROMPT)
    assert hits[0] == 0 and hits[1] >= 64 and hits[2:] == [0, 0, 0]


def test_keys(small: kvg.Model, sets: list[Active]) -> None:
    keys = [key_of(each) for each in sets]
    assert keys[0] == b"" and len(set(keys)) == len(sets)
    assert block.under(b"salt", b"") == b"salt"
    assert len({block.under(salt, key) for salt in (b"", b"salt") for key in keys}) == 2 * len(sets)


def test_embeddings(small: kvg.Model, sets: list[Active]) -> None:
    with kvg.Engine(small, n_ctx=512, n_seq_max=2, background=False) as engine:
        found = [engine.embed(PROMPT, "last", adapters=each) for each in (sets[1], sets[0], sets[1])]
    assert np.array_equal(found[0], found[2])
    assert not np.allclose(found[0], found[1], rtol=1e-2)


def test_an_adapter_of_another_model(small: kvg.Model, sets: list[Active], tiny: kvg.Model) -> None:
    with (
        kvg.Engine(tiny, n_ctx=64, n_seq_max=1, background=False) as engine,
        pytest.raises(kvg.InvalidArgumentError, match="another model"),
    ):
        engine.submit([1, 2], PARAMS, adapters=sets[1])
    with pytest.raises(kvg.InvalidArgumentError, match="another model"):
        kvg.Engine(tiny, n_ctx=64, n_seq_max=1, background=False, adapters=sets[1])


def test_a_closed_adapter(model_file: Callable[[ModelSpec], Path], tmp_path: Path, small: kvg.Model) -> None:
    """Refused at once, also where its cells could be used without it."""
    adapter = small.load_adapter(write_adapter(tmp_path / "one.gguf", model_file(SMALL)))
    with kvg.Engine(small, n_ctx=512, n_seq_max=2, background=False) as engine:
        request = engine.submit(PROMPT[:5], PARAMS, adapters=[(adapter, 1.0)])
        while engine.step():
            pass
        assert request.result().tokens
        adapter.close()
        with pytest.raises(kvg.InvalidArgumentError, match="closed"):
            engine.submit(PROMPT[:5], PARAMS, adapters=[(adapter, 1.0)])


def test_a_token_sequence_is_decoded_again(small: kvg.Model, sets: list[Active]) -> None:
    with open_context(small, n_ctx=256) as ctx:
        text = TokenSequence(ctx)
        assert text.set(PROMPT).n_decoded == len(PROMPT)
        ctx.set_adapters(sets[1])
        assert text.set(PROMPT).n_decoded == len(PROMPT)
        assert text.set(PROMPT).n_decoded == 1
        fresh = alone(small, sets[1], PROMPT, 1)
        assert int(text.set(PROMPT).last.logits.argmax()) == fresh[0]
