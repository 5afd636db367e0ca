"""A conversation that forgets cells when the cache is full, and no turns."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.talk import GREEDY, SYSTEM, ask, opened

import pykvgraph as kvg
from pykvgraph.chat import Conversation, Discard
from pykvgraph.context.cell_scores import POLICIES


@pytest.mark.parametrize("policy", [name for name, each in POLICIES.items() if not each.repeats])
def test_cells_are_forgotten_in_place_of_turns(stories_model: kvg.Model, policy: str) -> None:
    """The whole conversation stays; of a turn only what is new is decoded; the file knows what is missing."""
    told: list[kvg.ForgetReport] = []
    with opened(stories_model, n_ctx=128) as ctx:
        conversation = Conversation(ctx, system=SYSTEM, forget=policy, on_forget=told.append)
        n = 0
        while len(told) < 3:
            held = ctx.kv.seq_pos_max(0) + 1
            ask(conversation, f"Tell me of number {n}.")
            n += 1
            assert conversation.change is not None and conversation.change.n_kept == held
        assert (len(conversation.turns), conversation.n_forgotten) == (n, 0)
        view = ctx.kv.cells()
        positions = sorted(view.pos[view.seq[:, 0]].tolist())
        assert positions[:4] == [0, 1, 2, 3]
        assert len(positions) <= 128 < positions[-1]
        list(conversation.regenerate(GREEDY))
        change = conversation.change
        assert change is not None and change.n_decoded == 1


def test_trained_positions_end(stories_model: kvg.Model) -> None:
    """Then turns are given up after all, those with few cells left, too."""
    discards: list[Discard] = []
    assert stories_model.n_ctx_train == 512
    with opened(stories_model, n_ctx=128) as ctx:
        conversation = Conversation(ctx, system=SYSTEM, forget="window", on_discard=discards.append)
        n = 0
        while not discards:
            ask(conversation, f"Tell me of number {n}.")
            n += 1
        assert n > 6  # where 128 cells have room for three
        assert ctx.kv.seq_pos_max(0) < 512
        assert discards[0].stats is not None  # what is left wasn't decoded again
        assert "number 0" not in str(conversation.turns)
        ask(conversation, "And then?")
        assert conversation.change is not None and conversation.change.n_kept == conversation.change.n_common


def test_drafts_at_the_end_of_trained_positions(stories_model: kvg.Model) -> None:
    """An answer that reaches it: what is proposed brings the text no further than it comes alone."""
    params = kvg.SamplingParams(max_tokens=600, logit_bias={2: -1000.0})  # which would end it
    said = []
    for drafts in (False, True):
        with opened(stories_model, n_ctx=128) as ctx, opened(stories_model, n_ctx=600) as draft:
            discards: list[Discard] = []
            other = draft if drafts else None
            conversation = Conversation(
                ctx, system=SYSTEM, forget="window", on_discard=discards.append, draft=other
            )
            pieces = []
            for piece in conversation.ask("Tell me of a dog.", params):
                pieces.append(piece.text)
                assert len(conversation.ids) <= stories_model.n_ctx_train + 1  # the last one is decoded next
            assert discards
            said.append("".join(pieces))
    assert said[0] == said[1]


def test_a_file_of_what_was_forgotten(stories_model: kvg.Model, tmp_path: Path) -> None:
    """Nobody takes its cells for those of the whole text, when it has taken leave of it."""
    with opened(stories_model, n_ctx=128) as ctx:
        conversation = Conversation(ctx, system=SYSTEM, forget="keydiff")
        for i in range(6):
            ask(conversation, f"Tell me of number {i}.")
        conversation.save(tmp_path / "talk")
        following = ask(conversation, "And then?")
    with opened(stories_model, n_ctx=128) as ctx:
        other = Conversation(ctx, forget="keydiff")
        other.load(tmp_path / "talk")
        assert other._text._tokens.n_shareable < len(other._text)
        assert ask(other, "And then?") == following


def test_forgetting_is_not_self_extend(stories_model: kvg.Model) -> None:
    with opened(stories_model) as ctx:
        with pytest.raises(kvg.InvalidArgumentError, match="self_extend"):
            Conversation(ctx, forget="window", self_extend=2)
        with pytest.raises(kvg.InvalidArgumentError, match="policy must be one of"):
            Conversation(ctx, forget="all")


def test_a_policy_that_can_not_be_used(stories_model: kvg.Model) -> None:
    """Said before anybody talks, not when the cache is full."""
    with opened(stories_model, flash_attn="on") as ctx:
        with pytest.raises(kvg.UnsupportedError, match="the CPU computes attention"):
            Conversation(ctx, forget="snapkv")
        Conversation(ctx, forget="keydiff")
