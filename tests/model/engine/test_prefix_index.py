"""The index of prefixes against a naive one: what it finds, which cells it keeps, who goes first."""

from __future__ import annotations

import gc
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support import where
from support.architectures import ArchSpec
from support.naive_prefixes import BLOCK, NaivePrefixes, NaiveText
from support.recurrent import DELTA_NET

import pykvgraph as kvg
from pykvgraph.prefix.index import PrefixIndex
from pykvgraph.prefix.match import Found
from pykvgraph.prefix.node import Node, Point

N_SEQ_MAX = 3
N_CELLS = 640
# texts are made of these, so that many begin alike, and part inside of blocks and between them
PIECES = [[token] * n for token in (1, 2) for n in (1, 20, 31, 32, 33, 64)]
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map(
    lambda pieces: list(itertools.chain.from_iterable(pieces))
)


class Texts(RuleBasedStateMachine):
    """Texts come, go on, are kept and go; the cache and the naive index are told the same."""

    model: kvg.Model

    def __init__(self) -> None:
        super().__init__()
        self.ctx = kvg.Context(self.model, n_ctx=N_CELLS, n_batch=256, n_seq_max=N_SEQ_MAX)
        self.index = PrefixIndex(self.ctx.kv)
        self.naive = NaivePrefixes()
        self.texts: dict[int, tuple[NaiveText, Node]] = {}

    def teardown(self) -> None:
        for seq in list(self.texts):
            self.end(seq, False)
        self.index.clear()
        assert self.ctx.kv.n_used == self.index.n_nodes == 0
        self.ctx.close()

    @precondition(lambda self: len(self.texts) < N_SEQ_MAX)
    @rule(ids=TEXTS, salt=st.sampled_from([b"", b"a"]))
    def start(self, ids: list[int], salt: bytes) -> None:
        match = self.index.match(array("i", ids), salt)
        assert match.n == self.naive.n_found(ids, salt)
        n = min(match.n, len(ids) - 1)
        seq = min(set(range(N_SEQ_MAX)) - self.texts.keys())
        last = self.index.attach(Found(match, n, None), seq)
        self.texts[seq] = self.naive.start(ids, salt, n), last
        assert self.ctx.kv.seq_pos_max(seq) == n - 1
        self.decode(seq, len(ids))

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), piece=st.sampled_from(PIECES), to_end=st.booleans())
    def go_on(self, data: Any, piece: list[int], to_end: bool) -> None:
        seq = data.draw(st.sampled_from(sorted(self.texts)))
        text, last = self.texts[seq]
        text.ids += piece
        self.decode(seq, len(text.ids))
        self.naive.extend(text, to_end)
        n = len(text.cells)
        self.texts[seq] = text, self.index.extend(last, array("i", text.ids), n, seq, to_end=to_end)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), keeps=st.booleans())
    def leave(self, data: Any, keeps: bool) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.texts))), keeps)

    @rule(n=st.integers(1, 3))
    def evict(self, n: int) -> None:
        for _ in range(n):
            self.evict_one()

    @invariant()
    def accounts_agree(self) -> None:
        assert self.ctx.kv.n_used == self.naive.n_used
        assert self.index.n_nodes == len(self.naive.nodes)

    def decode(self, seq: int, n: int) -> None:
        """The text up to its first n tokens, as far as there are cells."""
        text, _ = self.texts[seq]
        begin = len(text.cells)
        while self.ctx.kv.n_free < n - begin and self.evict_one():
            pass
        n = min(n, begin + self.ctx.kv.n_free)
        del text.ids[max(n, begin) :]
        if n > begin:
            batch = kvg.Batch()
            batch.extend(text.ids[begin:], begin, (seq,))
            self.ctx.decode(batch)
            self.naive.decode(text, n - begin)

    def end(self, seq: int, keeps: bool) -> None:
        text, last = self.texts.pop(seq)
        if keeps:
            self.naive.extend(text, True)
            last = self.index.extend(last, array("i", text.ids), len(text.cells), seq, to_end=True)
        self.index.unpin(last)
        self.naive.end(text)
        self.ctx.kv.seq_rm(seq, -1, -1)

    def evict_one(self) -> bool:
        """The leaf goes that the naive index names, and nothing else."""
        key = self.naive.next_to_go()
        n_nodes = self.index.n_nodes
        assert self.index.evict() == (key is not None)
        if key is None:
            return False
        del self.naive.nodes[key]
        salt, ids = key
        assert self.index.n_nodes == n_nodes - 1
        assert self.index.match(array("i", ids), salt).n == self.naive.n_found(list(ids), salt)
        return True


def test_it_finds_keeps_and_gives_up_what_a_naive_one_does(tiny: kvg.Model) -> None:
    Texts.model = tiny
    run_state_machine_as_test(Texts, settings=settings(max_examples=40, stateful_step_count=25))


@pytest.fixture(
    scope="module", params=[ArchSpec("gemma3", 3, 32, 2, 1, 16, 32, window=8), DELTA_NET], ids=str
)
def resumer(request: Any, architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    """A model that goes on from resume points only."""
    with kvg.Model(architecture(request.param), device=where.device) as model:
        yield model


class Places:
    """One sequence at a time, whose resume points are kept; all of their prefixes are remembered here."""

    def __init__(self, model: kvg.Model, n_points: int) -> None:
        with kvg.Context(model, n_ctx=64, n_batch=8, n_ubatch=8) as probe:
            state_bytes = sum(group.cell_bytes for group in probe.kv.groups if group.kind == "state")
        self.ctx = kvg.Context(
            model,
            n_ctx=1024,
            n_batch=256,
            n_seq_max=2,
            checkpoint_cells=8 * n_points,
            checkpoint_bytes=n_points * state_bytes,
        )
        self.index = PrefixIndex(self.ctx.kv, n_points)

    def read(self, ids: list[int], places: list[int], spare: Sequence[int] = ()) -> list[bool]:
        """Decodes the text, with points at these positions; then the index keeps it. Which points it has."""
        kept = []
        tokens = array("i", ids)
        last = self.index.attach(self.index.find(array("i"), 0), 0)
        for begin, end in zip([0, *places], [*places, len(ids)], strict=True):
            batch = kvg.Batch()
            batch.extend(ids[begin:end], begin, (0,))
            self.ctx.decode(batch)
            last = self.index.extend(last, tokens, end, 0)
            if end in places:
                kept.append(self.index.add_point(last, tokens, end, 0, is_spare=end in spare))
        self.index.unpin(self.index.extend(last, tokens, len(ids), 0, to_end=True))
        self.ctx.kv.seq_rm(0, -1, -1)
        return kept

    def best(self, ids: list[int]) -> int:
        """How far a text can be shared; the cells and the point are shown to a sequence, too."""
        tokens = array("i", ids)
        match = self.index.match(tokens)
        point = self.index.best_point(tokens, match, len(ids) - 1)
        n = point.p if point else 0
        last = self.index.attach(Found(match, n, point), 1)
        assert self.ctx.kv.seq_pos_max(1) == n - 1
        self.index.unpin(last)
        self.ctx.kv.seq_rm(1, -1, -1)
        return n


def test_the_highest_place_below_what_two_texts_share_is_found(resumer: kvg.Model) -> None:
    """Inside of blocks, at their ends, and at the beginning; never where the tokens differ."""
    text = [token % 7 + 1 for token in range(150)]
    marks = [5, 32, 40, 64, 100, 128]
    places = Places(resumer, 8)
    places.read(text, marks)
    for n in (1, 5, 6, 31, 32, 33, 39, 40, 41, 63, 64, 65, 99, 100, 101, 127, 128, 129, 150):
        expected = max((mark for mark in marks if mark <= n), default=0)
        assert places.best([*text[:n], 9, 9]) == expected
    assert places.best(text[:64]) == 40  # the last token is to be decoded
    assert places.best([9, *text]) == 0


def test_the_place_that_was_used_longest_ago_goes_first(resumer: kvg.Model) -> None:
    texts = [[n + 1] * 50 for n in range(4)]
    places = Places(resumer, 3)
    for text in texts[:3]:
        places.read(text, [40])
    assert places.best(texts[0]) == 40
    places.read(texts[3], [40])
    assert [places.best(text) for text in texts] == [40, 0, 40, 40]


def test_spare_places_go_first_and_take_no_other_place(resumer: kvg.Model) -> None:
    texts = [[n + 1] * 50 for n in range(4)]
    places = Places(resumer, 3)
    assert places.read(texts[0], [10, 20, 40], spare=[10, 20]) == [True, True, True]
    assert places.read(texts[1], [40]) == [True]  # in the place of the older spare one
    assert [places.best(texts[0][:n]) for n in (15, 25, 45)] == [0, 20, 40]
    assert places.read(texts[2], [30], spare=[30]) == [True]  # in the place of the other
    assert [places.best(texts[0][:n]) for n in (25, 45)] == [0, 40]
    assert places.read(texts[3], [40]) == [True]
    assert places.read(texts[2], [20], spare=[20]) == [False]
    assert [places.best(text) for text in texts] == [40, 40, 0, 40]


def test_a_spare_place_that_is_wanted_for_good_stays(resumer: kvg.Model) -> None:
    places = Places(resumer, 2)
    places.read([1] * 50, [20], spare=[20])
    places.read([1] * 50, [20])
    places.read([2] * 50, [30, 40], spare=[30])
    assert (places.best([1] * 50), places.best([2] * 50)) == (20, 40)


def test_a_place_goes_with_the_cells_below_it(resumer: kvg.Model) -> None:
    places = Places(resumer, 4)
    places.read([1] * 100, [10, 64, 90])
    found = []
    while places.index.evict():
        found.append((places.index.n_points, places.best([1] * 100)))
    # the last 4 tokens, then the blocks of 32, the last one first
    assert found == [(3, 90), (2, 64), (1, 10), (0, 0)]
    assert places.ctx.kv.n_used == 0


def test_nothing_is_left_of_salts_whose_texts_are_gone(tiny: kvg.Model) -> None:
    before = {id(each): each for each in nodes_and_points()}  # a server's, of an earlier test
    with kvg.Context(tiny, n_ctx=64, n_batch=64) as ctx:
        index = PrefixIndex(ctx.kv)
        for n in range(50):
            index.unpin(index.attach(index.find(array("i", [1]), 0, b"%d" % n), 0))
        assert [each for each in nodes_and_points() if id(each) not in before] == []


def nodes_and_points() -> list[Node | Point]:
    """All of this process."""
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, Node | Point)]


def test_what_a_text_adds_is_found_after_all_others_of_its_salt_went(tiny: kvg.Model) -> None:
    ids = array("i", range(1, 65))
    with kvg.Context(tiny, n_ctx=128, n_batch=64, n_seq_max=2) as ctx:
        index = PrefixIndex(ctx.kv)
        for seq in (0, 1):
            batch = kvg.Batch()
            batch.extend(ids[32 * seq :], 0, (seq,))
            ctx.decode(batch)
        last = index.attach(index.find(ids, 0), 0)
        other = index.attach(index.find(ids[32:], 0), 1)
        index.unpin(index.extend(other, ids[32:], 32, 1))
        index.clear()
        index.extend(last, ids, 64, 0)
        assert index.match(ids).n == 64


def test_a_long_chain_of_blocks_is_found_whole(tiny: kvg.Model) -> None:
    ids = [token % 251 for token in range(30 * BLOCK)]
    with kvg.Context(tiny, n_ctx=1024, n_batch=1024, n_seq_max=2) as ctx:
        index = PrefixIndex(ctx.kv)
        last = index.attach(index.find(array("i", ids), 0), 0)
        batch = kvg.Batch()
        batch.extend(ids, 0)
        ctx.decode(batch)
        index.extend(last, array("i", ids), len(ids), 0)
        assert index.match(array("i", ids)).n == 30 * BLOCK
        index.attach(index.find(array("i", ids), 700), 1)
        assert ctx.kv.seq_pos_max(1) == 699
        assert ctx.kv.n_used == 30 * BLOCK
