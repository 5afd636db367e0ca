"""Texts that are edited in the cache, beside lists: which tokens they have, and which of them are exact."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support import chance
from support.architectures import ArchSpec
from support.engines import Logits, decode, open_context, random_ids, run_of
from support.faults import fault
from support.judge import nmse
from support.kv_rows import same_cells
from support.models import N_VOCAB

import pykvgraph as kvg
from pykvgraph.sequence.sequence import earlier_texts

IDS, OTHER = random_ids(120, N_VOCAB), random_ids(120, N_VOCAB, 1)
OPTIONS: dict[str, Any] = {
    "n_ctx": 400,
    "n_batch": 40,
    "n_ubatch": 16,
    "n_seq_max": 3,
    "type_k": "f32",
    "type_v": "f32",
    "swa_full": True,
}
SAME = 1e-6


@pytest.fixture
def ctx(small: kvg.Model) -> Iterator[kvg.Context]:
    with open_context(small, **OPTIONS) as ctx:
        yield ctx


def read_anew(model: kvg.Model, ids: list[int]) -> Logits:
    """The last token's logits in a context that reads nothing else."""
    with open_context(model, **OPTIONS) as ctx:
        return kvg.Sequence(ctx).set(ids).last.logits


def behind(text: kvg.Sequence) -> tuple[Logits, Logits]:
    """A token's logits, behind the text and behind the same text read anew."""
    model, ids = text._ctx.model, [*text.ids.tolist(), 7]
    return text.append(7).logits, read_anew(model, ids)


class NaiveText:
    """Ids, and for each a key of what it has read: of the id, and of the keys of those before it then.

    A token is exact when its key is what it is in the same text read at once.
    """

    def __init__(self) -> None:
        self.cells: list[tuple[int, int]] = []

    @property
    def ids(self) -> list[int]:
        return [id for id, _ in self.cells]

    def key(self, id: int, before: list[tuple[int, int]]) -> int:
        return hash((id, *(key for _, key in before)))

    def append(self, ids: list[int]) -> None:
        for id in ids:
            self.cells.append((id, self.key(id, self.cells)))

    def repair(self, begin: int, end: int) -> None:
        for i in range(begin, min(end, len(self.cells))):
            id = self.cells[i][0]
            self.cells[i] = id, self.key(id, self.cells[:i])

    def put(self, begin: int, end: int, ids: list[int], n_repair: int) -> None:
        self.cells[begin:end] = [(id, 0) for id in ids]
        self.repair(begin, begin + len(ids) + n_repair)

    def link(self, ids: list[int], n_repair: int) -> None:
        document = NaiveText()
        document.append(ids)
        begin = len(self.cells)
        self.cells += document.cells
        self.repair(begin, begin + n_repair)

    @property
    def approximate_from(self) -> int | None:
        fresh = NaiveText()
        fresh.append(self.ids)
        pairs = zip(self.cells, fresh.cells, strict=True)
        return next((i for i, (own, true) in enumerate(pairs) if own != true), None)


def edit(text: kvg.Sequence, naive: NaiveText, rng: Random, document: kvg.Document) -> str:
    """One edit at random, of both."""
    n = len(text)
    op = (
        rng.choice(["remove", "replace", "link", "repair", "append", "go back", "exact"])
        if n > 4
        else "append"
    )
    begin = rng.randrange(1, n - 1) if n > 4 else 0
    end, k = rng.randint(min(begin + 1, n), n), rng.choice([0, 3, 10, 99])
    new = [rng.randrange(3, N_VOCAB) for _ in range(rng.choice([1, 4, 9]))]
    if op == "append":
        text.set([*text.ids.tolist(), *new])
        naive.append(new)
    elif op == "remove":
        text.remove(begin, end, repair=k)
        naive.put(begin, end, [], k)
    elif op == "replace":
        text.replace(begin, end, new, repair=k)
        naive.put(begin, end, new, k if end < n else 0)
    elif op == "link":
        text.link(document, repair=k)
        naive.link(document.ids.tolist(), k)
    elif op == "repair":
        text.repair([(begin, end), (end - 1, min(end + 3, n))])
        naive.repair(begin, min(end + 3, n))
    elif op == "go back":
        text.go_back(end)
        del naive.cells[end:]
    elif (first := text.approximate_from) is not None:
        ids = text.ids.tolist()
        text.go_back(first)
        text.set(ids)
        naive.repair(0, n)
    return op


@pytest.mark.parametrize("seed", range(40 if chance.THOROUGH else 6))
def test_any_edits(ctx: kvg.Context, seed: int) -> None:
    """Tokens, positions and what is exact; and where all is, what the text says."""
    rng, done, n_exact = Random(chance.seed(seed)), set(), 0
    document = ctx.read(OTHER[:12])
    text, naive = kvg.Sequence(ctx), NaiveText()
    for _ in range(40):
        if len(text) > 120:
            text.go_back(20)
            del naive.cells[20:]
        op = edit(text, naive, rng, document)
        done.add(op)
        assert text.ids.tolist() == naive.ids, op
        view = ctx.kv.cells()
        assert sorted(view.pos[view.seq[:, 0]].tolist()) == list(range(len(text))), op
        assert text.approximate_from == naive.approximate_from, op
        if text.approximate_from is None and len(text) and rng.random() < 0.2:
            n_exact += 1
            own, anew = behind(text)
            assert nmse(own[None], anew[None]) <= SAME
            naive.append([7])
    assert len(done) >= 5
    assert n_exact > 0
    document.release()
    text.go_back(0)
    assert ctx.kv.n_used == 0


@pytest.mark.parametrize("spec", [ArchSpec("gemma3", n_layer=4, window=24, period=4)], ids=str)
def test_windows_with_every_position(architecture: Callable[[ArchSpec], Path], spec: ArchSpec) -> None:
    with kvg.Model(architecture(spec), device="cpu") as model:
        with open_context(model, **OPTIONS) as ctx:
            text = kvg.Sequence(ctx)
            text.set(IDS)
            text.remove(30, 60, repair=len(IDS))
            text.link(ctx.read(OTHER[:30]), repair=30)
            assert text.approximate_from is None
            own, anew = behind(text)
            assert nmse(own[None], anew[None]) <= SAME
        with open_context(model, **(OPTIONS | {"swa_full": False})) as ctx:
            text = kvg.Sequence(ctx)
            text.set(IDS)
            before = ctx.kv.cells()
            for call in (
                lambda: text.remove(30, 60),
                lambda: text.replace(5, 8, [9, 9, 9]),
                lambda: ctx.read(IDS),
            ):
                with pytest.raises(kvg.UnsupportedError, match="swa_full=True"):
                    call()
            assert same_cells(ctx.kv.cells(), before)
            assert text.ids.tolist() == IDS


def test_states_are_edited_without_repair(recurrent: kvg.Model) -> None:
    with open_context(recurrent, **(OPTIONS | {"swa_full": False})) as ctx:
        text = kvg.Sequence(ctx)
        text.set(IDS[:60])
        calls: list[Callable[[], object]] = [
            lambda: text.remove(10, 20),
            lambda: text.replace(10, 20, OTHER[:5]),
            lambda: text.repair([(10, 20)]),
            lambda: text.link(ctx.read(OTHER[:5])),
        ]
        for call in calls:
            with pytest.raises(kvg.UnsupportedError):
                call()
        assert text.ids.tolist() == IDS[:60]
        text.remove(40, 60)  # an end: that is going back
        assert text.ids.tolist() == IDS[:40]
        assert text.approximate_from is None
        own, anew = behind(text)
        assert nmse(own[None], anew[None]) <= SAME


def test_documents(ctx: kvg.Context, small: kvg.Model) -> None:
    text, document = kvg.Sequence(ctx), ctx.read(OTHER[:50])
    assert (len(document), ctx.kv.n_used) == (50, 50)
    text.link(document)
    assert ctx.kv.n_used == 50  # shared, where it begins a text
    assert text.approximate_from is None
    text.link(document, repair=50)
    assert (ctx.kv.n_used, text.approximate_from) == (100, None)
    own, anew = behind(text)
    assert nmse(own[None], anew[None]) <= SAME
    document.release()
    with pytest.raises(kvg.InvalidArgumentError, match="released"):
        text.link(document)
    text.go_back(0)
    assert ctx.kv.n_used == 0
    with (
        open_context(small, **OPTIONS) as other,
        pytest.raises(kvg.InvalidArgumentError, match="another context"),
    ):
        text.link(other.read(IDS[:5]))


def test_documents_that_were_read_behind_others(ctx: kvg.Context, small: kvg.Model) -> None:
    front, ids = IDS[:20], OTHER[:40]
    text, document = kvg.Sequence(ctx), ctx.read(ids, behind=front)
    text.set(front)
    assert (len(document), ctx.kv.n_used) == (40, 60 + 20)
    text.link(document)
    assert (ctx.kv.n_used, text.approximate_from) == (80, None)  # its cells are shared
    own, anew = behind(text)
    assert nmse(own[None], anew[None]) <= SAME

    text.go_back(60)
    text.link(document, repair=0)
    assert (text.ids.tolist(), text.approximate_from) == ([*front, *ids, *ids], 60)
    with open_context(small, **{**OPTIONS, "n_batch": 60}) as other:  # the same by hand
        for seq in (0, 1):
            decode(other, run_of([*front, *ids], 0, (seq,)))
        other.kv.seq_rm(1, 0, 20)
        other.kv.seq_add(1, 20, -1, 40)
        other.kv.seq_cp(1, 0, -1, -1)
        by_hand = decode(other, run_of([7], 100))[-1]
    assert nmse(text.append(7).logits[None], by_hand[None]) <= SAME

    text.go_back(0)
    text.link(document, repair=0)
    assert (text.ids.tolist(), text.approximate_from) == (ids, 0)
    text.go_back(0)
    text.link(document, repair=40)
    assert text.approximate_from is None
    own, anew = behind(text)
    assert nmse(own[None], anew[None]) <= SAME

    ctx.kv.seq_cp(0, 1, 0, -1)
    last = kvg.Sequence(ctx, seq=2)  # the only empty one
    last.link(document, repair=0)
    assert ctx.kv.seq_count(2, 0, -1).n_cells == len(last) == 40


def test_no_room(small: kvg.Model) -> None:
    """Nothing is changed; nor by numbers that are none."""
    with open_context(small, **(OPTIONS | {"n_ctx": 64, "n_seq_max": 2})) as ctx:
        text = kvg.Sequence(ctx)
        text.set(IDS[:40])
        document = ctx.read(OTHER[:20])
        before = ctx.kv.cells()
        calls: list[Callable[[], object]] = [
            lambda: text.link(document),
            lambda: text.replace(5, 6, OTHER[:10]),
            lambda: text.remove(5, 6, repair=20),
        ]
        for call in calls:
            with pytest.raises(kvg.CacheFullError):
                call()
        wrong: list[Callable[[], object]] = [
            lambda: text.remove(5, 5),
            lambda: text.remove(-1, 5),
            lambda: text.remove(5, 41),
            lambda: text.remove(5, 8, repair=-1),
            lambda: text.replace(8, 5, [3]),
            lambda: text.replace(5, 8, [N_VOCAB]),
            lambda: text.repair([(3, 41)]),
            lambda: text.repair([(5, 3)]),
            lambda: text.repair([3]),  # type: ignore[list-item]
            lambda: text.repair(3),  # type: ignore[arg-type]
            lambda: text.link(OTHER),  # type: ignore[arg-type]
            lambda: ctx.read([]),
        ]
        for call in wrong:
            with pytest.raises(kvg.InvalidArgumentError):
                call()
        decode(ctx, run_of(IDS[:1], 0, (1,)))
        for call in (lambda: ctx.read(OTHER[:2]), lambda: text.link(document, repair=0)):
            with pytest.raises((kvg.InvalidArgumentError, kvg.CacheFullError)):
                call()
        ctx.kv.seq_rm(1, -1, -1)
        assert sorted(ctx.kv.cells().pos.tolist()) == sorted(before.pos.tolist())
        assert text.ids.tolist() == IDS[:40]
        assert text.approximate_from is None


@pytest.mark.parametrize("n", [4, 10, 20])
def test_a_replacement_that_fails(ctx: kvg.Context, n: int) -> None:
    """In its first batch: the text is what it was, or lacks what was shorter; and it goes on."""
    text = kvg.Sequence(ctx)
    text.set(IDS[:60])
    with fault("compute", 1), pytest.raises(kvg.DeviceError):
        text.replace(20, 30, OTHER[:n])
    left = IDS[:60] if n >= 10 else [*IDS[:24], *IDS[30:60]]
    assert text.ids.tolist() == left
    assert ctx.kv.seq_pos_max(0) + 1 == ctx.kv.n_used == len(left)
    text.replace(20, 30, OTHER[:n], repair=60)
    assert text.approximate_from is None
    own, anew = behind(text)
    assert nmse(own[None], anew[None]) <= SAME


def test_a_replacement_that_fails_later(ctx: kvg.Context) -> None:
    """In its second batch: the text ends before it."""
    text = kvg.Sequence(ctx)
    text.set(IDS[:60])
    with fault("compute", 5), pytest.raises(kvg.DeviceError):  # three micro-batches, then one of the next
        text.replace(20, 30, OTHER[:50])
    assert text.ids.tolist() == IDS[:20]
    text.append(7)
    assert (len(text), ctx.kv.n_used) == (21, 21)


class Interrupted:
    """A cache to whose n-th change Ctrl-C comes: before it, or right after it."""

    def __init__(self, kv: Any, n: int, after: bool) -> None:
        self.kv, self.left, self.after = kv, n, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.kv, name)
        return partial(self.call, found) if name in ("seq_rm", "seq_add", "seq_cp", "update") else found

    def call(self, function: Callable[..., object], *arguments: Any) -> object:
        self.left -= 1
        if self.left == 0 and not self.after:
            raise KeyboardInterrupt
        result = function(*arguments)
        if self.left == 0:
            raise KeyboardInterrupt
        return result


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("n", range(1, 5))
@pytest.mark.parametrize("op", ["remove", "replace", "link"])
def test_ctrl_c(ctx: kvg.Context, monkeypatch: pytest.MonkeyPatch, op: str, n: int, after: bool) -> None:
    """The text knows what it has, and goes on behind that."""
    document, text = ctx.read(OTHER[:12]), kvg.Sequence(ctx)
    text.set(IDS[:60])
    calls: dict[str, Callable[[], None]] = {
        "remove": lambda: text.remove(20, 30),
        "replace": lambda: text.replace(20, 30, OTHER[:15]),
        "link": lambda: text.link(document),
    }
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(document, "_kv", known := Interrupted(ctx.kv, n, after))
        patch.setattr(ctx, "kv", known)
        calls[op]()
    for seq in (1, 2):  # where it was linked, if Ctrl-C came to what cleans up
        ctx.kv.seq_rm(seq, -1, -1)
    text.append(7)
    view = ctx.kv.cells()
    assert sorted(view.pos[view.seq[:, 0]].tolist()) == list(range(len(text)))
    assert text.ids.tolist()[:20] == IDS[:20]


def test_an_index_of_prefixes_gets_what_is_exact(ctx: kvg.Context) -> None:
    """Coming back to an edited text decodes it again, unless all of it was repaired."""
    for k, is_exact in ((8, False), (200, True)):
        ctx.kv.clear()
        text = kvg.Sequence(ctx, earlier=earlier_texts(ctx))
        text.set(IDS)
        text.remove(20, 40, repair=k)
        edited = text.ids.tolist()
        assert (text.approximate_from is None) == is_exact
        text.set(OTHER)
        change = text.set([*edited, 7])
        assert change.n_kept == (len(edited) if is_exact else 0)
        assert nmse(change.last.logits[None], read_anew(ctx.model, [*edited, 7])[None]) <= SAME
        assert text.approximate_from is None


def test_grouped_tokens(ctx: kvg.Context) -> None:
    """Several on a position can't be told apart; those around them can be edited."""
    text = kvg.Sequence(ctx)
    text.set(IDS[:60])
    for n_grp in (0, 2.5):
        with pytest.raises(kvg.InvalidArgumentError, match="n_grp"):
            text.group(10, 30, n_grp)  # type: ignore[arg-type]
        assert text.ids.tolist() == IDS[:60]
    text.group(10, 30, 4)
    assert text.approximate_from == 10
    with pytest.raises(kvg.InvalidArgumentError, match="shares position 10"):
        text.repair([(12, 13)])
    for begin, end in ((12, 14), (5, 8), (28, 33)):
        with pytest.raises(kvg.InvalidArgumentError, match="share a position"):
            text.replace(begin, end, OTHER[:5])
    assert text.ids.tolist() == IDS[:60]
    text.replace(40, 42, OTHER[:5], repair=3)
    assert text.ids.tolist() == [*IDS[:40], *OTHER[:5], *IDS[42:60]]
    assert ctx.kv.seq_pos_max(0) + 1 == text.positions.of(len(text))
    assert np.isfinite(text.append(7).logits).all()


def test_a_text_whose_cells_are_gone(ctx: kvg.Context) -> None:
    """No edit takes what is left for the text; set() decodes it again."""
    text = kvg.Sequence(ctx)
    document = ctx.read(OTHER[:10])
    losses: list[Callable[[], object]] = [partial(ctx.kv.seq_rm, 0, 30, -1), ctx.kv.clear]
    for lose in losses:
        text.set(IDS[:50])
        lose()
        edits: list[Callable[[], object]] = [
            lambda: text.remove(5, 9),
            lambda: text.replace(5, 9, [3]),
            lambda: text.link(document),
            lambda: text.repair([(5, 9)]),
        ]
        for edit in edits:
            with pytest.raises(kvg.InvalidArgumentError, match="has lost cells of this text"):
                edit()
    text.set(IDS[:50])
    text.remove(5, 9, repair=100)
    assert text.approximate_from is None
