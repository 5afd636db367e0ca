"""Which worker has which beginnings."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from support import chance

from pykvgraph.cluster.prefixes import BLOCK_BYTES, MOST_BLOCKS, TOKEN_BYTES, Prefixes, blocks_of
from pykvgraph.cluster.router import Router

_PARTS = st.lists(st.binary(max_size=2 * BLOCK_BYTES + 2).map(lambda data: bytes(b % 2 for b in data)))


@given(_PARTS, _PARTS)
def test_equal_keys_are_equal_beginnings(first: list[bytes], second: list[bytes]) -> None:
    """Against the parts themselves, cut with slices."""

    def cut(parts: list[bytes]) -> list[bytes]:
        blocks = []
        for part in parts:
            while part:
                blocks.append(part[:BLOCK_BYTES])
                part = part[BLOCK_BYTES:]
        return blocks

    a, b = blocks_of(b"", first), blocks_of(b"", second)
    cut_a, cut_b = cut(first), cut(second)
    assert [block.end for block in a] == [sum(map(len, cut_a[: i + 1])) for i in range(len(cut_a))]
    for i in range(min(len(a), len(b))):
        assert (a[i].key == b[i].key) == (cut_a[: i + 1] == cut_b[: i + 1])


def test_a_root_and_the_end_of_a_part_count() -> None:
    assert blocks_of(b"key", [b"text"]) != blocks_of(b"other", [b"text"])
    assert blocks_of(b"", [b"ab", b"c"])[-1] != blocks_of(b"", [b"a", b"bc"])[-1]


def test_a_long_text_has_a_bounded_number_of_blocks() -> None:
    assert len(blocks_of(b"", [bytes((MOST_BLOCKS + 5) * BLOCK_BYTES)])) == MOST_BLOCKS


@given(
    st.lists(st.tuples(st.integers(0, 1), st.lists(st.sampled_from(b"abc"), max_size=6))), st.integers(1, 2)
)
def test_each_has_the_newest_blocks(asked: list[tuple[int, list[int]]], most: int) -> None:
    """Each worker has at most so many bytes; of the last text the first `most` are there."""
    prefixes = Prefixes()
    for worker in (0, 1):
        prefixes.begin(worker, most)
    most *= TOKEN_BYTES
    for worker, letters in asked:
        blocks = blocks_of(b"", [bytes([letter]) for letter in letters])
        prefixes.remember(worker, blocks)
        assert prefixes.length(worker, blocks) == min(len(letters), most)
    for worker in (0, 1):
        texts = {bytes(letters[: i + 1]) for w, letters in asked if w == worker for i in range(len(letters))}
        had = {
            text
            for text in texts
            if prefixes.length(worker, blocks_of(b"", [bytes([letter]) for letter in text])) == len(text)
        }
        assert len(had) <= most
        assert all(text[:-1] in had for text in had if len(text) > 1)  # with all that is in front of it
        prefixes.forget(worker)
        assert not any(prefixes.length(worker, blocks_of(b"", [text])) for text in texts)


def beginnings_of(text: list[bytes]) -> list[tuple[bytes, ...]]:
    return [tuple(text[:n]) for n in range(1, len(text) + 1)]


def test_few_keys_find_what_a_central_index_finds() -> None:
    """300 conversations, 8 at a time, on 4 workers; there is room for a sixth of their blocks.

    The naive index keeps every beginning of every text that a worker was asked. A hit: the chosen worker has
    as many parts of the text as the best worker of that index.
    """
    rng = random.Random(chance.seed(5))
    systems = [rng.randbytes(1500) for _ in range(5)]
    n_bytes = 20_000
    router = Router(4)
    for worker in range(4):
        router.add(worker, n_bytes // TOKEN_BYTES)
    index: list[set[tuple[bytes, ...]]] = [set() for _ in range(4)]
    talks: list[list[bytes]] = []
    n_hits = n_begun = 0
    asked: list[list[bytes]] = []
    while n_begun < 300:
        while len(talks) < 8:
            talks.append([rng.choice(systems)])
            n_begun += 1
        talk = rng.choice(talks)
        talk.append(rng.randbytes(rng.randint(20, 900)))
        blocks = blocks_of(b"", talk)
        chosen = router.choose(blocks)
        assert chosen is not None
        router.enter(chosen, blocks, 1).leave()
        beginnings = beginnings_of(talk)
        had = [sum(beginning in own for beginning in beginnings) for own in index]
        index[chosen].update(beginnings)
        n_hits += had[chosen] == max(had)
        asked.append(list(talk))
        if rng.random() < 0.2 or len(talk) > 12:
            talks.remove(talk)
    different = {beginning for text in asked for beginning in beginnings_of(text)}
    assert sum(len(beginning[-1]) for beginning in different) > 6 * 4 * n_bytes
    assert n_hits >= 0.9 * len(asked)
