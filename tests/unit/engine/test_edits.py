"""Whose cells a text gets: an edited one's are its session's, and whoever asks for exact ones has these."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import chance
from support.naive_cache import NaiveCache, exact_keys

import pykvgraph as kvg
from pykvgraph.engine import edits
from pykvgraph.engine.admission import Admission
from pykvgraph.engine.entry import Entry
from pykvgraph.engine.readings import Readings
from pykvgraph.engine.request import Request
from pykvgraph.engine.request_sequence import CacheTerms, RequestSequence
from pykvgraph.engine.running_set import RunningSet
from pykvgraph.params.params import SamplingParams

N_CELLS, N_SEQ_MAX, N_BATCH = 640, 3, 48
REPAIR = 3  # tokens behind a seam; so that texts may be short


class Host:
    """An engine without a model: texts enter, are decoded, and leave."""

    def __init__(self, reuse: int = 0) -> None:
        self.kv = NaiveCache(N_CELLS, N_SEQ_MAX)
        model = SimpleNamespace(device="CPU", weight_bytes=0)
        ctx: Any = SimpleNamespace(
            kv=self.kv,
            n_seq_max=N_SEQ_MAX,
            n_batch=N_BATCH,
            n_ubatch=N_BATCH,
            n_ctx=N_CELLS,
            swa_full=False,
            model=model,
        )
        self.running_set = RunningSet(ctx, 0, True)
        admission = Admission(ctx, False, False, 16)
        readings = Readings(ctx, self.running_set, admission)
        self.counts = Counter[str]()
        self.entry = Entry(
            self.running_set, admission, readings, None, spacing=0, reuse=reuse, counts=self.counts
        )

    def enter(self, ids: list[int], session: str, *, edits: bool, salt: bytes = b"") -> RequestSequence:
        params, terms = SamplingParams(max_tokens=4), CacheTerms(salt, session.encode(), edits)
        prompt = np.array(ids, np.int32)
        sequence = RequestSequence(Request(1, lambda _: None), 0, prompt, params, None, salt, terms=terms)
        self.kv.who = f"{salt!r} {session}"
        self.running_set.scheduler.arrive(sequence)
        self.entry.admit()
        assert sequence.runs
        return sequence

    def step(self, sequence: RequestSequence, n: int = N_BATCH) -> int:
        """Decodes so many tokens of it; returns how many that were."""
        n = min(sequence.next_stop(), n)
        places = [at for run in sequence.next_tokens(n) for at in range(*run)]
        assert self.running_set.index.make_room(n)
        self.kv.decode(sequence.seq, sequence.ids.tolist(), places)
        sequence.advance(n)
        self.running_set.keep(sequence, to_end=not sequence.n_todo)
        return n

    def leave(self, sequence: RequestSequence) -> None:
        self.running_set.leave(sequence)
        self.check()

    def check(self) -> None:
        """No cell is lost: what nobody runs with, the index has."""
        if self.running_set.scheduler.running:
            return
        assert all(cell.holds and not cell.seqs for cell in self.kv.cells_used)
        assert not any(root.n_pins for root in self.running_set.index._roots.values())


class Asked(NamedTuple):
    """A request of a history. base: the how many-th last text it goes on from, without `cuts`, with more."""

    base: int
    cuts: list[tuple[int, int, int]]  # where, how many tokens go, how many come
    more: int
    session: str
    edits: bool
    salt: bytes
    n_steps: int  # until it is cancelled; with 9 it ends


cut = st.tuples(st.integers(0, 90), st.integers(1, 20), st.sampled_from([0, 0, 3, 12]))
asked = st.builds(
    Asked,
    base=st.integers(0, 2),
    cuts=st.lists(cut, max_size=2),
    more=st.integers(1, 20),
    session=st.sampled_from(["a", "b", ""]),
    edits=st.sampled_from([True, True, False]),
    salt=st.sampled_from([b"", b"", b"", b"s"]),
    n_steps=st.sampled_from([9, 9, 9, 9, 0, 1]),
)


@settings(max_examples=10_000 if chance.THOROUGH else 60, deadline=None)
@given(st.lists(asked, min_size=2, max_size=10), st.integers(0, 2**16))
def test_nobody_gets_cells_of_anothers_edit(history: list[Asked], seed: int) -> None:
    """Each cell tells what it has read, and for whom it was decoded or moved."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, 50, 130).tolist()]
    with mock.patch.object(edits, "REPAIR", REPAIR):
        host = Host()
        for each in history:
            ids = list(texts[-1 - each.base % len(texts)])[:200]
            for at, n_gone, n_new in each.cuts:
                at = min(at, len(ids))
                ids[at : at + n_gone] = rng.integers(0, 50, n_new).tolist()
            ids += rng.integers(0, 50, each.more).tolist()
            texts.append(ids)
            run(host, each, ids)
        host.running_set.index.clear()
        assert not host.kv.cells_used


def run(host: Host, asked: Asked, ids: list[int]) -> None:
    sequence = host.enter(ids, asked.session, edits=asked.edits, salt=asked.salt)
    who, exact = host.kv.who, exact_keys(ids)
    cells = host.kv.text(sequence.seq)
    n_there, anew = len(cells), set(sequence.anew)
    n_edited = 0
    for cell in cells:
        assert cell.who.split()[0] == who.split()[0], "it is of a text under another salt"
        if cell.pos not in anew and cell.key != exact[cell.pos]:
            n_edited += 1
            assert asked.edits
            # what is exact where it was decoded is anybody's, and stays where it is if it need not move
            assert cell.who == who or cell.was_exact
    assert asked.edits or not anew
    assert sequence.use.edited >= n_edited
    assert sequence.n_cached == n_there - len([cell for cell in cells if cell.pos in anew])
    assert sum(sequence.use[:4]) == sequence.n_cached
    n_steps = 0
    while sequence.n_todo and n_steps < asked.n_steps:
        host.step(sequence, 20 if asked.n_steps < 9 else N_BATCH)
        n_steps += 1
    if not sequence.n_todo:
        check_text(host, sequence, ids, exact)
    host.leave(sequence)


def check_text(host: Host, sequence: RequestSequence, ids: list[int], exact: list[int]) -> None:
    """All tokens are there, in their places; those that were decoded have read the text as it is."""
    cells = host.kv.text(sequence.seq)
    assert [cell.pos for cell in cells] == list(range(len(ids)))
    if not sequence.use.edited:
        assert [cell.key for cell in cells] == exact


def test_what_a_cut_takes_by_hand() -> None:
    """300 tokens, of which 40 go and 10 come in place of others: 10 and 32 behind each of the two seams."""
    host = Host()
    old = list(range(300))
    first = host.enter(old, "a", edits=True)
    while first.n_todo:
        host.step(first)
    host.leave(first)
    new = [*old[:50], *old[90:180], *range(1000, 1010), *old[185:300], *range(2000, 2040)]
    second = host.enter(new, "a", edits=True)
    seams = [*range(50, 82), *range(140, 150 + 32)]
    assert list(second.anew) == seams
    assert second.n_decoded == len(new) - 40
    assert second.use[:4] == (50, 0, 0, 90 - 32 + 115 - 32)
    assert second.use.miss == (50, "edited", None, None)
    n_decoded = 0
    while second.n_todo:
        n_decoded += host.step(second)
    assert n_decoded == len(seams) + 40
    check_text(host, second, new, [])
    exact = exact_keys(new)
    keys = [cell.key for cell in host.kv.text(second.seq)]
    assert keys[:82] == exact[:82] and keys[82] != exact[82]
    host.leave(second)


def test_the_same_conversation_finds_its_edited_text_again() -> None:
    host = Host()
    old = list(range(300))
    new = [*old[:50], *old[90:300], 7]
    for ids in (old, new):
        text = host.enter(ids, "a", edits=True)
        while text.n_todo:
            host.step(text)
        host.leave(text)
    later = [*new, *range(400, 440)]
    for session, wants_edits, n in (("b", True, 50), ("", True, 50), ("a", False, 50), ("a", True, len(new))):
        text = host.enter(later, session, edits=wants_edits)
        assert text.n_cached == n, session
        assert text.use.edited == (n - 50 - 32 if n > 50 else 0)
        host.leave(text)


def test_a_cell_is_copied_only_where_others_have_it() -> None:
    """With no room for copies the earlier text gives up its cells, and they move."""
    host = Host()
    old = list(range(400))
    text = host.enter(old, "a", edits=True)
    while text.n_todo:
        host.step(text)
    host.leave(text)
    assert host.kv.n_free == N_CELLS - 400
    new = [*old[:10], *old[20:400], *range(500, 560)]
    text = host.enter(new, "a", edits=True)
    assert text.n_cached == 390 - 32
    while text.n_todo:
        host.step(text)
    check_text(host, text, new, [])
    host.leave(text)


def read(host: Host, ids: list[int], session: str = "a") -> RequestSequence:
    """A text that may be edited; it has left again."""
    text = host.enter(ids, session, edits=True)
    while text.n_todo:
        host.step(text)
    check_text(host, text, ids, exact_keys(ids))
    host.leave(text)
    return text


def test_parts_that_can_not_move_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device fails amid the move: the text begins with what the index has, and nothing is lost."""
    host = Host()
    old = list(range(300))
    new = [*old[:50], *old[90:180], *old[200:300], *range(400, 440)]
    read(host, old)
    seq_add, calls = host.kv.seq_add, []

    def fails(*given: int) -> None:
        calls.append(given)
        if len(calls) == 2:
            raise kvg.DeviceError("broken")
        seq_add(*given)

    monkeypatch.setattr(host.kv, "seq_add", fails)
    assert read(host, new).use[:4] == (50, 0, 0, 0)
    assert len(calls) == 2
    assert read(host, old).use[:4] == (299, 0, 0, 0)


def test_an_edit_for_which_others_need_the_cells() -> None:
    """A text that runs may take half of the cells; the other half has room for the prompt, read as it is."""
    host = Host()
    old = list(range(200))
    new = [*old[:20], *old[60:200], *range(300, 340)]
    read(host, old)
    running = host.enter(list(range(1000, 1000 + N_CELLS - 210)), "b", edits=False)
    while running.n_todo:
        host.step(running)
    text = host.enter(new, "a", edits=True)
    while text.n_todo:
        host.step(text)
    check_text(host, text, new, exact_keys(new))
    host.leave(text)
    host.leave(running)
