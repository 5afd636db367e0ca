"""Texts that have shifted and are parked, or set aside: they go on with their own rows, and say the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import where
from support.architectures import ArchSpec
from support.engines import ids_of
from support.shifted import follows_alone, oldest
from support.soak import F32, are_likeliest

import pykvgraph as kvg
from pykvgraph.engine import own_rows
from pykvgraph.engine import running_set as texts
from pykvgraph.engine.own_rows import OwnRows
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.kv_cache.reserved_cells import Incoming

LLAMA = ArchSpec("llama", 2, 32, 2, 1, 16, 32)
HEADS_OF_32 = ArchSpec("llama", 2, 64, 2, 1, 32, 32)
WINDOW = kvg.Window(96, 4)
LONG = kvg.SamplingParams(max_tokens=200, temperature=0)
TIERS = [pytest.param(None, id="cells"), pytest.param(kvg.Tiers("64M"), id="tiers")]


@pytest.fixture(scope="module")
def model(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(LLAMA), device=where.device) as model:
        yield model


@pytest.fixture
def n_copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each text whose rows went to host memory, how many."""
    counts: list[int] = []
    copy = OwnRows.copy

    def counted(own: OwnRows) -> None:
        copy(own)
        counts.append(own.n)

    monkeypatch.setattr(OwnRows, "copy", counted)
    return counts


def engine_of(model: kvg.Model, n_ctx: int, **options: Any) -> kvg.Engine:
    return kvg.Engine(model, n_ctx=n_ctx, n_seq_max=3, background=False, **F32, **options)


def submit(engine: kvg.Engine, seed: int, window: kvg.Window = WINDOW) -> kvg.Request:
    return engine.submit(ids_of(engine.model, 50, seed), LONG, window=window)


def shift(engine: kvg.Engine, request: kvg.Request) -> None:
    """Until the text has given up some tokens."""
    while not any(each.has_shifted for each in engine._loop.stepper._running_set.of(request)):
        engine.step()
        assert not request.done


def take_all_cells(engine: kvg.Engine) -> None:
    n = engine.context.n_ctx
    engine.submit(ids_of(engine.model, n - 1, n), kvg.SamplingParams(max_tokens=1)).result()


def follows(request: kvg.Request, model: kvg.Model, seed: int, window: kvg.Window = WINDOW) -> int:
    """How many shifts a text in a context of its own takes, which says the same."""
    done = request.result()
    assert (done.finish_reason, len(done.tokens)) == ("length", LONG.max_tokens)
    prompt, said = ids_of(model, 50, seed), list(done.tokens)
    return follows_alone(model, prompt, said, window.n_ctx, oldest(window.n_keep, 0))


def test_what_was_edited_before_is_still_known_as_that(small: kvg.Model) -> None:
    """Whoever goes on from its beginning hears of it, and who forgets the old text gives it up."""
    old, behind = ids_of(small, 200, 1), ids_of(small, 40, 2)
    new, brief = [*old[:40], *old[60:], *behind], kvg.SamplingParams(max_tokens=1)
    asked: dict[str, Any] = {"edit": "approximate", "session": "a"}
    with engine_of(small, 768) as engine:
        engine.submit(old, brief, **asked).result()
        long = kvg.SamplingParams(max_tokens=100, logit_bias={2: -100.0})
        request = engine.submit(new, long, window=kvg.Window(260, 160), **asked)
        shift(engine, request)
        engine.park(request)
        take_all_cells(engine)
        engine.resume(request)
        assert request.result().cache[:4] == (40, 0, 0, 180 - 40 - 32)
        ids = [*new[:160], 5, 6, 7]
        assert engine.submit(ids, brief, **asked).result().cache[:4] == (72, 0, 0, 160 - 72)
        engine.forget_prefix(old)
        assert engine.submit(ids, brief, **asked).result().cache.edited == 0


def is_empty(engine: kvg.Engine) -> bool:
    index = engine._loop.stepper._index
    index.clear()
    return engine.context.kv.n_used == 0


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("are_needed", [False, True], ids=["free", "needed"])
def test_a_parked_text_says_the_same(
    model: kvg.Model, n_copied: list[int], tiers: kvg.Tiers | None, are_needed: bool
) -> None:
    """Again and again, whether others need its cells meanwhile or not: nothing is decoded twice."""
    with engine_of(model, 150, tiers=tiers) as engine:
        request = submit(engine, 1)
        shift(engine, request)
        n_parked = n_others = 0
        while not request.done:
            before = engine.stats().decoded_tokens
            assert engine.park(request)
            assert not engine.park(request)
            if are_needed:
                take_all_cells(engine)
            n_others += engine.stats().decoded_tokens - before
            assert engine.resume(request)
            n_parked += 1
            for _ in range(30):
                engine.step()
        assert n_parked > 4
        assert len(n_copied) == (n_parked if are_needed else 0)
        assert engine.stats().decoded_tokens - n_others == 50 + LONG.max_tokens - 1
        assert follows(request, model, 1) > 2
        assert is_empty(engine)


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("n_said", range(43, 49))
def test_a_text_that_is_parked_about_its_first_shift(
    model: kvg.Model, n_said: int, tiers: kvg.Tiers | None
) -> None:
    """Its window is full when it has said 46 tokens: it is read again up to there, and shifted then."""
    with engine_of(model, 150, tiers=tiers) as engine:
        request = submit(engine, 1)
        engine.step()
        (sequence,) = engine._loop.stepper._running_set.of(request)
        while sequence.look(0).n_said < n_said:
            engine.step()
        assert engine.park(request)
        take_all_cells(engine)
        assert engine.resume(request)
        assert follows(request, model, 1) > 2
        assert is_empty(engine)


@pytest.mark.parametrize("are_needed", [False, True], ids=["free", "needed"])
def test_a_parked_text_whose_grammar_takes_long(
    model: kvg.Model, monkeypatch: pytest.MonkeyPatch, are_needed: bool
) -> None:
    """Its last token is decoded, and nothing was said behind it: it is decoded again."""
    answers = itertools.cycle((False, True))
    monkeypatch.setattr(RequestSequence, "can_say", lambda *_: next(answers))
    with engine_of(model, 150) as engine:
        request = submit(engine, 1)
        shift(engine, request)
        n_parked = 0
        while n_parked < 5:
            engine.step()
            (sequence,) = engine._loop.stepper._running_set.of(request)
            if sequence.unsaid is not None:
                assert engine.park(request)
                if are_needed:
                    take_all_cells(engine)
                assert engine.resume(request)
                n_parked += 1
        for _ in range(10 * LONG.max_tokens):
            engine.step()
        assert request.done
        assert follows(request, model, 1) > 2
        assert is_empty(engine)


@pytest.mark.parametrize(
    ("type_k", "type_v"), [("f32", "f32"), ("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q8_0")]
)
def test_every_byte_comes_back(architecture: Callable[[ArchSpec], Path], type_k: str, type_v: str) -> None:
    """As save() gives them, which rounds K that waits for its shift; a copy has rounded it already."""
    types: dict[str, Any] = {"type_k": type_k, "type_v": type_v}
    with (
        kvg.Model(architecture(HEADS_OF_32), device=where.device) as model,
        kvg.Engine(model, n_ctx=260, n_seq_max=2, background=False, **types) as engine,
    ):
        request = submit(engine, 3, kvg.Window(200, 4, 20))
        kv, here = engine.context.kv, engine._loop.stepper._running_set
        shift(engine, request)
        assert where.device != "cpu" or bool(kv.cells().shift.any()) == (type_k in ("q8_0", "q4_0"))
        (sequence,) = here.of(request)
        before, n = kv.save(sequence.seq), sequence.n_decoded
        for is_copied in (False, True):
            assert here.park(request)
            if is_copied:
                take_all_cells(engine)
            assert here.resume(request)
            own = sequence.own
            assert own is not None
            assert own.n_cells == (0 if is_copied else n)
            assert here.put_back(sequence, own)
            assert (kv.save(sequence.seq), sequence.n_decoded) == (before, n)
        assert len(request.result().tokens) == LONG.max_tokens
        assert is_empty(engine)


@pytest.mark.parametrize(
    "options",
    [{}, {"tiers": kvg.Tiers("64M")}, {"prefix_cache": False}, {"draft": "ngram"}],
    ids=["cells", "tiers", "no prefix cache", "drafts"],
)
def test_a_text_that_is_set_aside_says_the_same(
    model: kvg.Model, n_copied: list[int], options: dict[str, Any]
) -> None:
    """The older one has a wider window, and takes the cells of the younger one behind its first shift."""
    windows = [kvg.Window(150, 4), kvg.Window(70, 4)]
    with engine_of(model, 200, overcommit=True, **options) as engine:
        asked = [submit(engine, seed, window) for seed, window in enumerate(windows)]
        while engine.step():
            pass
        assert engine.stats().n_preempted >= len(n_copied) > 0
        for seed, (request, window) in enumerate(zip(asked, windows, strict=True)):
            assert follows(request, model, seed, window) > 1
        stats = engine.stats()
        n_in_vain = stats.drafted - stats.accepted
        assert stats.decoded_tokens - n_in_vain == 2 * (50 + LONG.max_tokens - 1)
        assert is_empty(engine)


@pytest.mark.parametrize("tiers", TIERS)
def test_nobody_else_gets_its_rows(model: kvg.Model, tiers: kvg.Tiers | None, n_copied: list[int]) -> None:
    """A prompt that is what the parked text has left, with its cells there and after they were needed."""
    with engine_of(model, 300, tiers=tiers) as engine:
        request = submit(engine, 2)
        shift(engine, request)
        (sequence,) = engine._loop.stepper._running_set.of(request)
        left = list(sequence.ids)
        assert engine.park(request)
        for salt in (b"", b"other"):
            again = engine.submit(left, kvg.SamplingParams(max_tokens=10), salt=salt).result()
            assert again.n_cached <= WINDOW.n_keep + 1  # and one more by chance
            assert are_likeliest(model, left, again.tokens)
            take_all_cells(engine)
        assert n_copied == [len(left) - 1]
        assert engine.resume(request)
        assert follows(request, model, 2) > 2


def test_one_that_is_cancelled_leaves_nothing(model: kvg.Model, n_copied: list[int]) -> None:
    with engine_of(model, 300) as engine:
        asked = [submit(engine, seed) for seed in range(2)]
        for request in asked:
            shift(engine, request)
            assert engine.park(request)
        engine._loop.stepper._running_set._copy_one()
        assert len(n_copied) == 1
        for request in asked:
            request.cancel()
            engine.step()
            assert request.result().finish_reason == "cancelled"
        assert is_empty(engine)


@pytest.mark.parametrize("is_parked", [False, True], ids=["set aside", "parked"])
def test_where_memory_is_short(model: kvg.Model, monkeypatch: pytest.MonkeyPatch, is_parked: bool) -> None:
    """Parking is refused, and the text goes on; one that must make way fails alone."""
    monkeypatch.setattr(texts, "host_free_bytes", lambda *_: 1000)
    with engine_of(model, 200, overcommit=True) as engine:
        asked = [submit(engine, seed) for seed in range(1 if is_parked else 2)]
        shift(engine, asked[0])
        if is_parked:
            with pytest.raises(kvg.DeviceError, match="memory for 500"):
                engine.park(asked[0])
            assert engine.stats().n_parked == 0
        else:
            shift(engine, asked[1])
            engine._loop.stepper._running_set.preempt(engine._loop.stepper._scheduler.youngest())
            with pytest.raises(kvg.DeviceError, match="memory for 500"):
                asked[1].result()
        assert follows(asked[0], model, 0) > 2
        assert is_empty(engine)


@pytest.mark.parametrize("error", [kvg.DeviceError, MemoryError])
@pytest.mark.parametrize("stage", ["hold", "copy", "attach", "reserve", "write", "show_text"])
def test_rows_that_can_not_be_kept_or_put_back(
    model: kvg.Model, monkeypatch: pytest.MonkeyPatch, stage: str, error: type[BaseException]
) -> None:
    """Nothing is half done: it is not parked, or its request alone has the error; no cell is left."""
    owner, name = {
        "hold": (kvg.KVCache, "hold"),
        "copy": (own_rows, "take_held"),
        "attach": (kvg.KVCache, "attach"),
        "reserve": (kvg.KVCache, "reserve"),
        "write": (Incoming, "write"),
        "show_text": (Incoming, "show_text"),
    }[stage]

    def fails(*_: Any) -> None:
        raise error("broken")

    with engine_of(model, 300) as engine:
        other, request = submit(engine, 0), submit(engine, 1)
        shift(engine, request)
        with monkeypatch.context() as patch:
            if stage == "hold":
                patch.setattr(owner, name, fails)
                with pytest.raises(error, match="broken"):
                    engine.park(request)
                patch.undo()
                assert follows(request, model, 1) > 2
            else:
                assert engine.park(request)
                patch.setattr(owner, name, fails)
                if stage != "attach":
                    engine._loop.stepper._running_set._copy_one()
                engine.resume(request)
                engine.step()
                with pytest.raises(error, match="broken"):
                    request.result(0)
        assert follows(other, model, 0) > 2
        assert is_empty(engine)


def test_a_device_that_has_lost_the_cells(model: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was in cells only can't go on; what is in host memory can."""

    def fails(_: kvg.KVCache) -> None:
        raise kvg.DeviceError("lost")

    with engine_of(model, 300) as engine:
        asked = [submit(engine, seed) for seed in range(2)]
        for request in asked:
            shift(engine, request)
            assert engine.park(request)
        here = engine._loop.stepper._running_set
        here._copy_one()
        in_cells = next(iter(here.kept)).request
        assert isinstance(in_cells, kvg.Request)
        with monkeypatch.context() as patch:
            patch.setattr(kvg.KVCache, "update", fails)
            here.start_over_if_broken()
        with pytest.raises(kvg.DeviceError, match="lost"):
            in_cells.result(0)
        (left,) = [request for request in asked if request is not in_cells]
        assert engine.resume(left)
        assert follows(left, model, asked.index(left)) > 2
        assert is_empty(engine)


def test_what_was_said_before_the_first_shift(model: kvg.Model) -> None:
    """Another engine goes on from there; behind a shift it could not."""
    prompt = ids_of(model, 50, 1)
    with engine_of(model, 150) as engine:
        said = submit(engine, 1).result().tokens
        n_most = WINDOW.n_ctx - len(prompt) - 1
        for n in (1, n_most):
            again = engine.submit(prompt, LONG, window=WINDOW, said=said[:n], salt=str(n))
            assert again.result().tokens == said
        with pytest.raises(kvg.InvalidArgumentError, match="its window has still all tokens"):
            engine.submit(prompt, LONG, window=WINDOW, said=said[: n_most + 1])
