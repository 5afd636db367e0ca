"""edit="approximate": a prompt that is an earlier text of its session with other tokens in its midst."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support import chance, where
from support.architectures import ArchSpec
from support.engines import ids_of, open_context
from support.faults import fault
from support.kinds import KINDS
from support.rollback import accounts
from support.soak import F32, SITES, Soak, are_likeliest, has_faults

import pykvgraph as kvg
from pykvgraph.engine import edits
from pykvgraph.engine.prefix_edits import salt_without

GREEDY = kvg.SamplingParams(max_tokens=6)
BRIEF = kvg.SamplingParams(max_tokens=1)
REPAIR = 32  # arXiv:2410.15332


def engine_of(model: kvg.Model, **options: Any) -> kvg.Engine:
    return kvg.Engine(model, **{"n_ctx": 2048, "n_seq_max": 3, "background": False, **F32, **options})


def edited(engine: kvg.Engine, ids: list[int], session: str = "a", **options: Any) -> kvg.Completion:
    return engine.submit(ids, GREEDY, edit="approximate", session=session, **options).result()


@pytest.mark.parametrize("spec", KINDS[:2], ids=str)
def test_it_is_what_the_operations_of_the_cache_give(
    architecture: Callable[[ArchSpec], Path], spec: ArchSpec
) -> None:
    """Beside a context in which the same cells are removed, moved and decoded again by hand."""
    with kvg.Model(architecture(spec), device=where.device) as model:
        _require_operations_of_the_cache(model)


def _require_operations_of_the_cache(model: kvg.Model) -> None:
    old, tail = ids_of(model, 300, 1), ids_of(model, 40, 2)
    new = [*old[:50], *old[90:180], *tail[:10], *old[185:300], *tail]
    every = kvg.SamplingParams(max_tokens=1, top_logprobs=model.n_vocab)
    with engine_of(model, swa_full=True) as engine:
        edited(engine, old)
        (piece,) = engine.submit(new, every, edit="approximate", session="a")
    with open_context(model, n_ctx=512, swa_full=True, **F32) as ctx:
        batch = kvg.Batch()
        batch.extend(old, 0, logits=False)
        ctx.decode(batch)
        ctx.kv.seq_rm(0, 180, 185)
        ctx.kv.seq_add(0, 185, -1, 5)
        ctx.kv.seq_rm(0, 50, 90)
        ctx.kv.seq_add(0, 90, -1, -40)
        batch.clear()
        for begin, end in ((50, 82), (140, 182)):
            batch.extend(new[begin:end], begin, logits=False)
        batch.extend(tail, 265)
        ctx.decode(batch, repair=True)
        row = ctx.logits()[-1].astype(np.float64)
    wanted = row - np.logaddexp.reduce(row)
    top = dict(piece.top)
    assert max(abs(top[token] - wanted[token]) for token in range(model.n_vocab)) < 1e-4


def test_the_earlier_text_stays_as_it_was(small: kvg.Model) -> None:
    old = ids_of(small, 300, 1)
    with engine_of(small) as engine:
        told = edited(engine, old)
        assert edited(engine, [*old[:100], *old[140:], *told.tokens]).cache.edited > 100
        again = engine.submit(old, GREEDY, session="a").result()
        assert (again.tokens, again.n_cached, again.cache.edited) == (told.tokens, 299, 0)
        assert are_likeliest(small, old, again.tokens)


@pytest.mark.parametrize("seed", range(50 if chance.THOROUGH else 2))
def test_exact_answers_are_those_of_a_fresh_engine(small: kvg.Model, seed: int) -> None:
    """Conversations that are edited, whose turns come approximately and exactly, one among the other."""
    rng = Random(chance.seed(seed))
    texts = [ids_of(small, 200, seed)]
    with engine_of(small, n_ctx=rng.choice([512, 2048])) as engine:
        for turn in range(10):
            ids = _changed(rng, rng.choice(texts), small.n_vocab)[:400]
            approximate, session = rng.random() < 0.5, rng.choice(["", "a", "b"])
            edit = "approximate" if approximate else "exact"
            told = engine.submit(ids, GREEDY, edit=edit, session=session).result()  # type: ignore[arg-type]
            texts.append([*ids, *told.tokens])
            assert sum(told.cache[:4]) == told.n_cached
            if told.cache.edited:
                assert approximate
                continue
            with engine_of(small, n_ctx=512) as fresh:
                assert told.tokens == fresh.submit(ids, GREEDY).result().tokens, turn


def _changed(rng: Random, ids: list[int], n_vocab: int) -> list[int]:
    """Spans of it go, or others come in their place, and more is said."""
    ids = list(ids)
    for _ in range(rng.randrange(3)):
        at, n_new = rng.randrange(len(ids)), rng.choice([0, 0, 20])
        ids[at : at + rng.randrange(60)] = [rng.randrange(n_vocab) for _ in range(n_new)]
    return [*ids, *(rng.randrange(n_vocab) for _ in range(rng.randrange(1, 60)))]


def test_an_agent_whose_old_results_are_cleared(tiny: kvg.Model) -> None:
    """40 turns with results of 250 tokens, of which the last three are kept: by hand what is decoded."""
    n_result, cleared, keep = 250, [2, 1, 2], 3
    rng, talk = Random(1), kvg.SamplingParams(max_tokens=6, logit_bias={2: -100.0})
    system = [rng.randrange(3, 200) for _ in range(64)]
    calls: list[list[int]] = []  # of the model, each with its result
    results: list[list[int]] = []
    stays = read_again = 0
    with engine_of(tiny, n_ctx=8192) as engine:
        for turn in range(40):
            prompt = list(system)
            for i, (call, result) in enumerate(zip(calls, results, strict=True)):
                prompt += call + (result if i >= turn - keep else cleared)
            before = engine.stats().decoded_tokens
            told = engine.submit(prompt, talk, edit="approximate", session="agent").result()
            n_prompt_decoded = engine.stats().decoded_tokens - before - (len(told.tokens) - 1)
            # behind the answer so far, whose last token was handed out and not decoded
            n_new = 1 + n_result if turn else len(system)
            assert n_prompt_decoded == n_new + (len(cleared) + REPAIR if turn > keep else 0)
            assert told.n_cached == len(prompt) - n_prompt_decoded
            if turn > keep:
                stays += len(prompt) - n_new - len(cleared)
                read_again += REPAIR
                assert told.cache.miss is not None
                assert told.cache.miss.reason == "edited"
            calls.append(list(told.tokens))
            results.append([rng.randrange(200, tiny.n_vocab) for _ in range(n_result)])
    assert read_again < 0.05 * stays


def test_who_may_have_an_edited_text(small: kvg.Model) -> None:
    old = ids_of(small, 300, 1)
    new, later = [*old[:50], *old[90:]], ids_of(small, 40, 2)
    with engine_of(small) as engine:
        edited(engine, old, "a")
        told = edited(engine, [*new, *later[:32]], "a")
        assert told.cache.edited == 300 - 90 - REPAIR
        ids = [*new, *later]
        again = edited(engine, ids, "a")
        assert again.cache[:4] == (50 + REPAIR, 0, 0, len(new) + 32 - 50 - REPAIR)
        wanted: list[dict[str, Any]] = [
            {"session": "b"},
            {},
            {"session": "a", "edit": "exact"},
            {"session": "a", "salt": b"salt"},
        ]
        for n, others in enumerate(wanted):
            asked: dict[str, Any] = {"edit": "approximate", **others}
            completion = engine.submit(ids, BRIEF, **asked).result()
            assert completion.cache.edited == 0, others
            # the first of them has read it for those behind it, but for the one with another salt
            assert completion.n_cached == [50, len(ids) - 1, len(ids) - 1, 0][n]


def test_what_is_forgotten_is_gone_from_edited_texts_too(small: kvg.Model) -> None:
    """From an edit of an edit as well, though that is gone; a text that others made of another one stays."""
    old, later = ids_of(small, 300, 1), ids_of(small, 40, 2)
    new = [*old[:50], *old[90:], *later]
    again = [*new[:50], *new[70:], *later]
    mine = ids_of(small, 350, 3)
    with engine_of(small) as engine:
        said = edited(engine, old).tokens
        said_new = edited(engine, new).tokens
        assert edited(engine, again).cache.edited > 0
        edited(engine, mine, "b")
        assert edited(engine, [*mine[:10], *mine[20:], *later], "b").cache.edited > 0
        index = engine._loop.stepper._index
        first = next(root for root in index._roots.values() if [of.salt for of in root.made_of] == [b""])
        index.forget(array("i", [*new, *said_new]), first.salt)
        assert first.salt not in index._roots  # as when others need the cells
        n_used = engine.stats().cells_used
        engine.forget_prefix([*old, *said])
        assert edited(engine, [*again, *later]).cache.edited == 0
        assert edited(engine, [*mine[:10], *mine[20:], *later, 5], "b").cache.edited > 0
        for ids in (again, [*new, *said_new]):
            engine.forget_prefix(ids)
        assert sum(engine.stats().cells_used) < sum(n_used)


def test_which_text_was_cut_is_part_of_the_salt(small: kvg.Model) -> None:
    """Two texts become the same one by the same cut: neither gets what has read the other's words."""
    begin, behind, later = (ids_of(small, n, seed) for n, seed in ((50, 1), (200, 2), (40, 3)))
    cut = [ids_of(small, 40, seed) for seed in (4, 5)]
    new = [*begin, *behind, *later]
    with engine_of(small) as engine:
        for words in cut:
            edited(engine, [*begin, *words, *behind])
            engine.submit([*new, words[0]], BRIEF, edit="approximate", session="a").result()
        salts = {text.salt for text in engine._loop.stepper._entry._texts if text.salt}
        assert len(salts) == 2
        by_slot = [salt_without(b"", [*begin, *words, *behind], [(50, 90)]) for words in cut]
        assert len({*by_slot, *salts}) == 4  # no session has the former


def test_texts_without_a_session_begin_alike(small: kvg.Model) -> None:
    """The one that begins like the prompt for the longest, not the newest."""
    begin, others = ids_of(small, 100, 1), [ids_of(small, 200, n) for n in (2, 3)]
    with engine_of(small) as engine:
        for other in others:
            edited(engine, begin + other, "")
        new = begin + others[0][:20] + others[0][60:] + ids_of(small, 40, 4)
        told = edited(engine, new, "")
        assert told.cache[:4] == (120, 0, 0, 140 - REPAIR)


@pytest.mark.parametrize("spec", KINDS, ids=str)
def test_where_cells_can_move(architecture: Callable[[ArchSpec], Path], spec: ArchSpec) -> None:
    with kvg.Model(architecture(spec), device=where.device) as model:
        old = ids_of(model, 240, 1)
        new = [*old[:100], *old[140:], *ids_of(model, 40, 2)]
        for options in ({}, {"swa_full": True}):
            with engine_of(model, n_ctx=512, **options) as engine:
                moves = spec.arch == "llama" or (spec.window > 0 and bool(options))
                assert engine.can_shift == moves
                told = edited(engine, old)
                changed = edited(engine, new)
                assert changed.cache.edited == (240 - 140 - REPAIR if moves else 0)
                assert moves or are_likeliest(model, new, changed.tokens)
                again = engine.submit(old, GREEDY).result()
                assert again.tokens == told.tokens and again.cache.edited == 0
                if moves:  # it goes on anywhere, without a resume point
                    assert engine.submit([*old[:111], 5], BRIEF).result().n_cached == 111


def test_cancelled_amid_a_repair(small: kvg.Model) -> None:
    """The cells are as before, and others find what was there."""
    old = ids_of(small, 400, 1)
    new = [*old[:50], *old[90:180], *old[220:300], *old[330:], *ids_of(small, 40, 2)]
    with engine_of(small, n_batch=16, n_ubatch=16) as engine:
        told = edited(engine, old)
        before = accounts(engine)
        request = engine.submit(new, GREEDY, edit="approximate", session="a")
        for _ in range(3):
            engine.step()
        (sequence,) = engine._loop.stepper._running_set.scheduler.running
        assert 0 < len(sequence.anew) < 3 * REPAIR
        request.cancel()
        while engine.step():
            pass
        assert request.result().finish_reason == "cancelled"
        assert accounts(engine) == before
        again = engine.submit(old, GREEDY).result()
        assert (again.tokens, again.n_cached) == (told.tokens, 399)


@pytest.mark.parametrize("site", ["replace", "cells", "build", "alloc", "compute"])
def test_a_fault_amid_a_repair(small: kvg.Model, site: str) -> None:
    old = ids_of(small, 300, 1)
    new = [*old[:50], *old[90:], *ids_of(small, 40, 2)]
    with engine_of(small) as engine:
        told = edited(engine, old)
        before = accounts(engine)
        request = engine.submit(new, GREEDY, edit="approximate", session="a")
        with fault(site):
            engine.step()
        assert request.done
        with pytest.raises(kvg.KVGraphError):
            request.result()
        assert accounts(engine) == before
        again = engine.submit(old, GREEDY).result()
        assert (again.tokens, again.n_cached) == (told.tokens, 299)
        assert edited(engine, new).cache.edited == 300 - 90 - REPAIR


class EditingSoak(Soak):
    """Its prompts are one of the last three, edited."""

    def submit(self) -> None:
        rng = self.rng
        prompt = _changed(rng, rng.choice(self.shared[-3:]), self.model.n_vocab)[:200]
        self.shared.append(prompt)
        params = kvg.SamplingParams(max_tokens=rng.randrange(1, 40), n=rng.choice([1, 1, 2]))
        window = None
        if params.n == 1 and rng.random() < 0.3:
            window = kvg.Window(len(prompt) + rng.randrange(8, 30), rng.randrange(40))
        edit: Any = rng.choice(["exact", "approximate", "approximate"])
        request = self.engine.submit(
            prompt, params, edit=edit, session=rng.choice(["", "a", "a"]), window=window
        )
        self.ask(request, prompt, params)


@pytest.fixture
def few_repaired(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Texts of a hundred tokens have parts then."""
    monkeypatch.setattr(edits, "REPAIR", 6)
    yield


@pytest.mark.parametrize("overcommit", [False, True])
def test_faults_at_every_place(
    small: kvg.Model, monkeypatch: pytest.MonkeyPatch, few_repaired: None, overcommit: bool
) -> None:
    """Accounts are exact at every step, whatever fails; every request ends, and nothing is left."""
    made: list[bool] = []
    make = edits.Edits.make

    def counted(*given: Any) -> bool:
        made.append(make(*given))
        return made[-1]

    monkeypatch.setattr(edits.Edits, "make", counted)
    soak = EditingSoak(small, 7 + overcommit, overcommit)
    soak.sites = (*SITES, "replace")
    soak.run(1000 if chance.THOROUGH else 80, faults=has_faults())
    assert sum(made) >= 3
    soak.close()


def test_bad_arguments(small: kvg.Model) -> None:
    with engine_of(small) as engine:
        bad: list[dict[str, Any]] = [{"edit": "some"}, {"edit": None}, {"session": 5}]
        for options in bad:
            with pytest.raises(kvg.InvalidArgumentError, match=next(iter(options))):
                engine.submit([5, 6], **options)
