"""Completion.cache: where a prompt's tokens came from, and where the first came that had been read before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import where
from support.adapters import write_adapter
from support.architectures import ArchSpec
from support.engines import ids_of
from support.models import SMALL, ModelSpec
from support.recurrent import DELTA_NET
from support.soak import F32

import pykvgraph as kvg
from pykvgraph.sequence.edits import REPAIR

BRIEF = kvg.SamplingParams(max_tokens=2)


def engine_of(model: kvg.Model, **options: Any) -> kvg.Engine:
    return kvg.Engine(model, **{"n_ctx": 512, "n_seq_max": 2, "background": False, **F32, **options})


def ask(engine: kvg.Engine, ids: list[int], **options: Any) -> kvg.Completion:
    return engine.submit(ids, BRIEF, **options).result()


def test_a_conversation_that_goes_on_misses_nothing(small: kvg.Model) -> None:
    ids = ids_of(small, 100, 1)
    with engine_of(small) as engine:
        first = ask(engine, ids)
        assert first.cache == (0, 0, 0, 0, None)
        second = ask(engine, [*ids, *first.tokens, *ids_of(small, 20, 2)])
        assert second.cache == (101, 0, 0, 0, None)
        again = ask(engine, ids)
        assert again.cache == (99, 0, 0, 0, None)


def test_where_texts_part(small: kvg.Model) -> None:
    """Which token the earlier request has there, and which request that was."""
    ids, other = ids_of(small, 100, 1), ids_of(small, 40, 2)
    with engine_of(small) as engine:
        ask(engine, other)
        ask(engine, ids)
        told = ask(engine, [*ids[:70], ids[70] ^ 1, *other])
        assert told.cache == (70, 0, 0, 0, (70, "parted", ids[70], 2))


def test_what_others_needed(small: kvg.Model) -> None:
    ids = ids_of(small, 300, 1)
    with engine_of(small) as engine:
        ask(engine, ids)
        ask(engine, ids_of(small, 400, 2))
        told = ask(engine, [*ids, 5, 6])
        assert told.n_cached < 300
        assert told.cache.miss == (told.n_cached, "evicted", None, None)


def test_under_which_key_and_adapter(
    small: kvg.Model, model_file: Callable[[ModelSpec], Path], tmp_path: Path
) -> None:
    ids = ids_of(small, 100, 1)
    adapter = small.load_adapter(write_adapter(tmp_path / "a.gguf", model_file(SMALL)))
    with engine_of(small) as engine:
        ask(engine, ids, salt="mine")
        adapted = ask(engine, ids, salt="mine", adapters=[(adapter, 1.0)])
        assert adapted.cache.miss == (0, "other_adapter", None, None)
        assert ask(engine, ids, salt="yours").cache.miss == (0, "other_key", None, None)


def test_where_a_model_can_go_on(architecture: Callable[[ArchSpec], Path]) -> None:
    with kvg.Model(architecture(DELTA_NET), device=where.device) as model, engine_of(model) as engine:
        ids = ids_of(model, 100, 1)
        ask(engine, ids)
        told = ask(engine, [*ids[:90], *ids_of(model, 30, 2)])
        assert told.n_cached + told.n_decoded_again == 90
        assert told.cache.miss == (told.n_cached, "no_resume_point", None, None)


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_from_tiers(small: kvg.Model, decoding_is_slow: None, tmp_path: Path, tier: str) -> None:
    """Each token is counted once, by where it was."""
    ids = ids_of(small, 300, 1)
    tiers = kvg.Tiers("64M") if tier == "ram" else kvg.Tiers("64M", "64M", tmp_path)
    with engine_of(small, tiers=tiers) as engine:
        ask(engine, ids)
        if tier == "ram":
            ask(engine, ids_of(small, 400, 2))
            told = ask(engine, ids)
    if tier == "disk":
        with engine_of(small, tiers=tiers) as engine:
            told = ask(engine, ids)
            assert told.cache.cells == 0
    assert told.n_cached == 299
    assert sum(told.cache[:4]) == told.n_cached
    assert getattr(told.cache, tier) >= 160
    assert told.cache.edited == 0
    assert told.cache.miss is None


def test_edited_texts_come_from_tiers(small: kvg.Model, decoding_is_slow: None) -> None:
    """To their own session alone, as what they are. The answer is that of an engine that kept the cells."""
    old, tail, later = ids_of(small, 320, 1), ids_of(small, 40, 2), ids_of(small, 30, 4)
    new = [*old[:64], *old[104:], *tail]
    given: dict[str, Any] = {"session": "a", "edit": "approximate"}
    every = kvg.SamplingParams(max_tokens=1, top_logprobs=500)
    rows = []
    with (
        engine_of(small, n_ctx=4096) as engine,
        engine_of(small, n_ctx=768, tiers=kvg.Tiers("64M")) as tiered,
    ):
        for each in (engine, tiered):
            ask(each, old, **given)
            assert ask(each, new, **given).cache.edited == 320 - 104 - REPAIR
            ask(each, ids_of(small, 760, 3))
            request = each.submit([*new, *later], every, **given)
            rows.append(dict(next(iter(request)).top))
            told, n_exact = request.result().cache, 64 + REPAIR
            assert told.edited >= len(new) // 32 * 32 - n_exact
            assert told[:3] == ((0, n_exact, 0) if each is tiered else (n_exact, 0, 0))
            view = each._loop.context.kv.cells()
            assert 1 in view.dither[view.pos == 150]  # K was rotated once
        assert rows[0] == pytest.approx(rows[1], abs=1e-4)
        assert ask(tiered, [*new, *later], session="b", edit="approximate").cache.edited == 0
        stats = tiered.stats().tiers
    assert stats is not None
    assert not any(stats.misses.values())
