"""Ctrl-C at any moment of a conversation: it goes on, and the cells have what was said."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from support import chance
from support.storm import Storm, seconds
from support.talk import GREEDY, SYSTEM, ask, greedy, opened, require_rows_of

import pykvgraph as kvg
from pykvgraph.chat import Conversation

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="3.10 looks for signals when a function has returned"
)


@pytest.fixture
def storm() -> Iterator[Storm]:
    storm = Storm(2)
    yield storm
    storm.end()


def strike(storm: Storm, conversation: Conversation, rng: random.Random, longest: float) -> bool:
    """A message, another answer or another message, cut off somewhere; whether it was done before."""

    def work() -> None:
        how = rng.choice([0, 0, 1, 2]) if conversation.turns else 0
        text = f"Tell me of number {rng.randrange(100)}."
        if how == 0:
            list(conversation.ask(text, GREEDY))
        elif how == 1:
            list(conversation.regenerate(GREEDY))
        else:
            list(conversation.edit(text, GREEDY))

    return storm.returned(work, rng.uniform(1e-5, longest))


def require_whole(ctx: kvg.Context, conversation: Conversation) -> None:
    """One cell at each position, others are held. A shift that was cut off may leave a gap for a while."""
    view = ctx.kv.cells()
    seen = view.seq[:, 0]
    assert len(np.unique(view.pos[seen])) == seen.sum()
    assert (seen | (view.held > 0)).sum() == ctx.kv.n_used
    for user, _ in conversation.turns:
        assert user.startswith("Tell me of number")


@pytest.mark.slow
def test_answers_go_on_as_if_nothing_had_been(model: kvg.Model, storm: Storm) -> None:
    """The next answer is that of the same conversation in a context where nothing was cut off."""
    rng = random.Random(chance.seed(1))
    with opened(model, n_ctx=2048) as ctx:
        conversation = Conversation(ctx, system=SYSTEM)
        longest = seconds(lambda: ask(conversation, "Tell me of number 0."))
        n_cut = 0
        for i in range(100):
            done = strike(storm, conversation, rng, longest)
            longest *= 0.95 if done else 1.05  # about half of them are cut off, however busy the machine is
            n_cut += not done
            require_whole(ctx, conversation)
            if i % 10 == 9:
                tokens = [piece.token for piece in conversation.ask("Tell me of number 5.", GREEDY)][:4]
                n = conversation.borders[-2] + len(conversation._turns[-1].prompt)
                assert tokens == greedy(model, conversation.ids[:n], len(tokens))
                conversation.reset()
        assert n_cut > 30


@pytest.mark.slow
def test_cells_of_a_full_cache_are_those_of_the_text(stories_model: kvg.Model, storm: Storm) -> None:
    """Where turns are given up all the time."""
    rng = random.Random(chance.seed(1))
    with opened(stories_model, n_ctx=150) as ctx:
        conversation = Conversation(ctx, system=SYSTEM)
        longest = 2 * seconds(lambda: ask(conversation, "Tell me of number 0."))
        n_cut = 0
        for _ in range(100):
            done = strike(storm, conversation, rng, longest)
            longest *= 0.95 if done else 1.05
            n_cut += not done
            require_whole(ctx, conversation)
            ask(conversation, "Tell me of number 5.", kvg.SamplingParams(max_tokens=2))
            require_rows_of(conversation, ctx, stories_model)
        assert n_cut > 15  # half of them, where nothing else runs
        assert conversation.n_forgotten > 50
        conversation.reset()
        assert ctx.kv.n_used == conversation.borders[0]  # nothing is held for good
