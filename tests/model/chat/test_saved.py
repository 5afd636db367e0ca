"""A conversation in a file: it goes on where it ended, and files from anywhere do no harm."""

from __future__ import annotations

import json
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support import chance
from support.talk import GREEDY, SYSTEM, ask, opened, require_rows_of

import pykvgraph as kvg
from pykvgraph.chat import Conversation


def saved(model: kvg.Model, path: Path, n_ctx: int = 1024) -> tuple[list[tuple[str, str]], str]:
    """A conversation of two turns in a file: its turns, and the answer to the next message."""
    with opened(model, n_ctx=n_ctx) as ctx:
        conversation = Conversation(ctx, system=SYSTEM)
        for message in ("Hello.", "Who is Lily?"):
            ask(conversation, message)
        conversation.save(path)
        turns = conversation.turns
        return turns, ask(conversation, "And then?")


def test_nothing_is_decoded_again(model: kvg.Model, tmp_path: Path) -> None:
    turns, following = saved(model, tmp_path / "talk")
    with opened(model) as ctx:
        conversation = Conversation(ctx, system="Another.")
        ask(conversation, "What was there before?")
        conversation.load(tmp_path / "talk")
        assert (conversation.turns, conversation.system) == (turns, SYSTEM)
        held = ctx.kv.seq_pos_max(0) + 1
        assert held == len(conversation.ids) - 1  # the last token of an answer is decoded with the next turn
        assert ask(conversation, "And then?") == following
        assert conversation.change is not None
        assert conversation.change[:2] == (held, held)
        list(conversation.regenerate(GREEDY))
        assert conversation.change.n_decoded == 1


def test_what_was_given_up_stays_so(stories_model: kvg.Model, tmp_path: Path) -> None:
    with opened(stories_model, n_ctx=200) as ctx:
        conversation = Conversation(ctx, system=SYSTEM)
        for i in range(8):
            ask(conversation, f"Tell me of number {i}.")
        conversation.save(tmp_path / "talk")
    with opened(stories_model, n_ctx=200) as ctx:
        other = Conversation(ctx)
        other.load(tmp_path / "talk")
        assert other.n_forgotten == conversation.n_forgotten > 0
        require_rows_of(other, ctx, stories_model)
        ask(other, "And then?")
        require_rows_of(other, ctx, stories_model)


def test_cells_that_are_not_the_text_s_are_decoded_again(stories_model: kvg.Model, tmp_path: Path) -> None:
    """As somebody may have written the file: what its texts say counts."""
    saved(stories_model, tmp_path / "talk")
    rewrite(tmp_path / "talk", held=[1, 2, 3])
    with opened(stories_model) as ctx:
        conversation = Conversation(ctx)
        conversation.load(tmp_path / "talk")
        ask(conversation, "And then?")
        require_rows_of(conversation, ctx, stories_model)


def rewrite(path: Path, compress: bool = False, **changes: Any) -> None:
    with zipfile.ZipFile(path) as archive:
        said = json.loads(archive.read("conversation.json")) | changes
        cells = archive.read("cells.kvgstate")
    kind = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr("conversation.json", json.dumps(said))
        archive.writestr("cells.kvgstate", cells)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"system": 5},
        {"front": [1, 512]},
        {"front": "text"},
        {"held": [-1]},
        {"head": [3, 2]},
        {"head": [0] * 5000},
        {"turns": [{"user": "a"}]},
        {"turns": [{"user": 1, "prompt": [], "n_header": 0, "said": []}]},
        {"turns": [{"user": "a", "prompt": [5], "n_header": 2, "said": []}]},
        {"turns": 7},
        {"n_forgotten": -1},
        {"n_forgotten": 1e300},
        {"compress": True},
    ],
    ids=str,
)
def test_wrong_files_change_nothing(stories_model: kvg.Model, tmp_path: Path, change: dict[str, Any]) -> None:
    saved(stories_model, tmp_path / "talk")
    rewrite(tmp_path / "talk", **change)
    require_refused(stories_model, tmp_path / "talk")


def require_refused(model: kvg.Model, path: Path) -> None:
    with opened(model) as ctx:
        conversation = Conversation(ctx)
        answer = ask(conversation, "Hello.")
        with pytest.raises(kvg.StateError):
            conversation.load(path)
        assert conversation.turns == [("Hello.", answer)]
        held = ctx.kv.seq_pos_max(0) + 1
        ask(conversation, "And?")
        assert conversation.change is not None and conversation.change.n_kept == held


def test_damaged_files(stories_model: kvg.Model, tmp_path: Path) -> None:
    """Cut short anywhere, or with a byte changed: refused, or as it was where nothing looks."""
    turns, _ = saved(stories_model, tmp_path / "talk")
    data = (tmp_path / "talk").read_bytes()
    rng = random.Random(chance.seed(1))
    n_refused = 0
    with opened(stories_model) as ctx:
        for _ in range(60):
            at = rng.randrange(len(data))
            changed = (
                data[:at] if rng.random() < 0.3 else data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]
            )
            (tmp_path / "talk").write_bytes(changed)
            conversation = Conversation(ctx)
            try:
                conversation.load(tmp_path / "talk")
                assert conversation.turns == turns
            except kvg.StateError:
                n_refused += 1
        assert n_refused > 40


def test_the_state_of_another_model(
    stories_model: kvg.Model, states_model: kvg.Model, tmp_path: Path
) -> None:
    saved(states_model, tmp_path / "talk")
    require_refused(stories_model, tmp_path / "talk")


def test_a_missing_file(stories_model: kvg.Model, tmp_path: Path) -> None:
    with opened(stories_model) as ctx, pytest.raises(FileNotFoundError):
        Conversation(ctx).load(tmp_path / "none")
