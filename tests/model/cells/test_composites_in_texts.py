"""Which tokens of a text share composite cells, also where tokens share positions."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from support.ctrl_c_at_a_line import ctrl_c_at
from support.engines import open_context, random_ids
from support.models import N_VOCAB
from support.naive_scores import cells_of

import pykvgraph as kvg
from pykvgraph.context.forgetting import N_SINKS
from pykvgraph.sequence import sequence

N = 160
IDS = random_ids(N, N_VOCAB)


@pytest.fixture
def ctx(small: kvg.Model) -> Iterator[kvg.Context]:
    with open_context(small, n_ctx=300, n_batch=80, n_ubatch=32, n_seq_max=2) as ctx:
        yield ctx


def grouped(ctx: kvg.Context) -> kvg.Sequence:
    """Tokens 70 to 95 at positions 70 to 76, two at the last one: tokens 4 to 95 may be forgotten."""
    text = kvg.Sequence(ctx)
    text.set(IDS)
    text.group(70, 96, 4)
    return text


def positions(ctx: kvg.Context) -> list[int]:
    return [pos for pos, _ in cells_of(ctx, 0, 0)]


def test_as_many_cells_as_tokens(ctx: kvg.Context) -> None:
    """A span of two cells at a position that two tokens shared before."""
    text = grouped(ctx)
    text.forget(90, composite=True)
    before = positions(ctx)
    assert before[:7] == [*range(N_SINKS), 76, 76, 77]
    with pytest.raises(kvg.InvalidArgumentError, match="tokens 4 to 95 share composite cells"):
        text.repair([(10, 20)])
    with pytest.raises(kvg.InvalidArgumentError, match="tokens 4 to 95 share composite cells"):
        text.remove(80, 90, repair=0)
    assert positions(ctx) == before
    text.remove(1, 2, repair=0)
    text.replace(100, 102, random_ids(5, N_VOCAB, 1), repair=0)
    with pytest.raises(kvg.InvalidArgumentError, match="tokens 3 to 94 share composite cells"):
        text.repair([(10, 20)])
    text.remove(3, 95, repair=0)
    assert positions(ctx) == list(range(len(text)))
    text.repair([(2, 20)])


def test_fewer_cells_than_tokens(ctx: kvg.Context) -> None:
    """Also where nobody says that they were composed: the text is told of later."""
    text = grouped(ctx)
    tokens_at = text.positions
    ctx.kv.seq_rm(0, 76, -1)  # the last position has four tokens now
    more = random_ids(64, N_VOCAB, 2)
    text = kvg.Sequence(ctx)
    text.record(IDS[:94], tokens_at)
    text.set([*IDS[:94], *more])
    text.forget(88, composite=True)
    assert positions(ctx)[:7] == [*range(N_SINKS), 75, 75, 76]
    told = kvg.Sequence(ctx)
    told.record(text.ids, text.positions)
    told.find_forgotten()
    with pytest.raises(kvg.InvalidArgumentError, match="tokens 4 to 93 share composite cells"):
        told.repair([(10, 20)])


def test_tokens_of_a_span_that_share_a_position(ctx: kvg.Context) -> None:
    """They can't be decoded again: said before their cells go."""
    text = grouped(ctx)
    text.forget(50, composite=True)
    before = positions(ctx)
    with pytest.raises(kvg.InvalidArgumentError, match="token 70 shares position 70"):
        text.repair([(N_SINKS, 96)])
    assert positions(ctx) == before


def test_forgotten_tokens_that_shared_a_position(ctx: kvg.Context) -> None:
    """None of them alone is decoded in place of all."""
    text = grouped(ctx)
    text.forget(92, "window")
    with pytest.raises(kvg.InvalidArgumentError, match="token 71 shares position 70"):
        text.repair([(71, 72)])
    assert 70 not in positions(ctx)


def test_a_span_around_the_cells_of_others(ctx: kvg.Context) -> None:
    """It has tokens before and behind them, and goes with all."""
    text = kvg.Sequence(ctx)
    text.set(IDS)
    hold = ctx.kv.hold(0, 40, 44)
    text.forget(30, composite=True)
    with pytest.raises(kvg.InvalidArgumentError, match="tokens 4 to 95 share composite cells"):
        text.repair([(10, 20)])
    hold.release()
    text.repair([(N_SINKS, N)])
    assert positions(ctx) == list(range(N))
    assert text.approximate_from is None
    text.repair([(10, 20)])


def test_a_span_that_is_forgotten(ctx: kvg.Context) -> None:
    """Nothing of it stands in the way of others at its place."""
    text = kvg.Sequence(ctx)
    text.set(IDS)
    text.forget(60, composite=True)
    text.forget(32, "window")
    assert positions(ctx) == [*range(N_SINKS), *range(N - 64, N)]
    text.repair([(10, 20)])
    assert positions(ctx)[N_SINKS:15] == [*range(10, 20), N - 64]


@pytest.mark.parametrize(("policy", "composite"), [("keydiff", False), ("keydiff", True), ("tova", True)])
def test_interrupted_anywhere(ctx: kvg.Context, policy: str, composite: bool) -> None:
    """Nobody takes for exact what was composed or forgotten, and the text goes on."""
    n = 0
    while True:
        n += 1
        ctx.kv.clear()
        text = kvg.Sequence(ctx)
        text.set(IDS)
        if not ctrl_c_at(n, partial(text.forget, 30, policy, composite), sequence):
            break
        text.set([*IDS, 7])
        whole = positions(ctx) == list(range(N + 1))
        assert whole or text.approximate_from is not None, n
    assert n > 10
