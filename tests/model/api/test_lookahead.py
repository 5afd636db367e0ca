"""Drafts of generate() and of conversations: what is said, and what the cache has then, are as without."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pytest
from click.testing import CliRunner
from support import where
from support.architectures import ArchSpec
from support.crafted_heads import crafted
from support.engines import open_context
from support.models import N_VOCAB
from support.recurrent import DELTA_NET
from support.soak import F32

import pykvgraph as kvg
from pykvgraph.chat import Conversation
from pykvgraph.cli import main
from pykvgraph.context.way_back import WayBack
from pykvgraph.sequence.lookahead import Lookahead

HEAD = ArchSpec("glm4moe", n_rot=16, n_expert=8, n_ff_shared=96, draft_head=True)
RECURRENT = ArchSpec("qwen35", 4, period=4, state_heads=4, n_rot=8, n_head=8, draft_head=True)
PROMPT = [1, *range(5, 25)]
CHOICES: list[dict[str, Any]] = [
    {"max_tokens": 40},
    {"max_tokens": 40, "temperature": 0.8, "seed": 4},
    {"max_tokens": 40, "repeat_penalty": 1.3},
]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Lookahead]:
    """Those that are made."""
    found: list[Lookahead] = []
    init = Lookahead.__init__

    def make(lookahead: Lookahead, *arguments: Any) -> None:
        init(lookahead, *arguments)
        found.append(lookahead)

    monkeypatch.setattr(Lookahead, "__init__", make)
    return found


def look(ctx: kvg.Context) -> tuple[Any, ...]:
    """The positions in use, and the token that is pending."""
    view = ctx.kv.cells()
    return sorted(view.pos[view.seq[:, 0]].tolist()), ctx.kv.pending_token(0)


def said(
    model: kvg.Model,
    draft: kvg.Model | Literal["mtp"] | None,
    n_ctx: int,
    choice: dict[str, Any],
    **more: Any,
) -> Any:
    """What generate() says twice, the second time going on; and what the cache has then."""
    shift = kvg.ContextShift(n_keep=4)
    with open_context(model, n_ctx=n_ctx, n_batch=32, **F32) as ctx:
        if draft is None:
            return _twice(ctx, shift, choice, **more)
        if isinstance(draft, str):
            return _twice(ctx, shift, choice, draft=draft, **more)
        with open_context(draft, n_ctx=n_ctx, n_batch=32, **F32) as second:
            return _twice(ctx, shift, choice, draft=second, **more)


def _twice(ctx: kvg.Context, shift: kvg.ContextShift, choice: dict[str, Any], **more: Any) -> Any:
    pieces, looks = [], []
    for prompt in (PROMPT, [7, 8]):
        for piece in kvg.generate(ctx, prompt, on_full=shift, **choice, **more):
            pieces.append((piece.token, piece.finish_reason))
        looks.append(look(ctx))
    return pieces, *looks


@pytest.mark.parametrize("n_ctx", [256, 48])
@pytest.mark.parametrize("choice", CHOICES, ids=["greedy", "drawn", "penalty"])
def test_the_same_is_said(
    small: kvg.Model, other: kvg.Model, made: list[Lookahead], n_ctx: int, choice: dict[str, Any]
) -> None:
    """With good drafts and bad ones; with 48 cells the text is shifted on its way."""
    plain = said(small, None, n_ctx, choice)
    assert said(small, small, n_ctx, choice) == plain
    assert said(small, other, n_ctx, choice) == plain
    good, _, bad, _ = made
    if choice is CHOICES[0]:
        assert 25 <= good.n_accepted < 40  # of 40; those behind a shift are decoded alone
        assert good.n_drafted > 16
    assert bad.n_accepted <= 2 < good.n_accepted
    assert 4 <= bad.n_drafted <= 16  # with pauses, where nothing holds
    assert said(small, small, n_ctx, choice, draft_max=1) == plain


def test_a_generator_that_is_left_has_nothing_ahead(small: kvg.Model) -> None:
    """As without drafts: the last token said is pending, those before it are in the cache."""
    with (
        open_context(small, n_ctx=128, **F32) as ctx,
        open_context(small, n_ctx=128, **F32) as draft,
    ):
        for n in range(1, 12):
            ctx.reset()
            stream = kvg.generate(ctx, PROMPT, draft=draft)
            pieces = [next(stream) for _ in range(n)]
            stream.close()  # type: ignore[attr-defined]
            assert look(ctx) == (list(range(len(PROMPT) + n - 1)), pieces[-1].token)


def test_a_text_that_stops_has_nothing_pending(stories: Path, made: list[Lookahead]) -> None:
    """At a stop string, behind tokens that were known ahead."""
    with (
        kvg.Model(stories, device=where.device) as model,
        open_context(model, n_ctx=256, **F32) as ctx,
        open_context(model, n_ctx=256, **F32) as draft,
    ):
        for stop in ("was", "girl", "Lily", "love", "play", "outside", "park", "day", "red", "ball"):
            looks = []
            for second in (None, draft):
                ctx.reset()
                *_, last = kvg.generate(ctx, "Once upon a time", max_tokens=200, stop=stop, draft=second)
                assert last.finish_reason == "stop"
                looks.append(look(ctx))
            assert looks[0] == looks[1]
            assert looks[0][1] is None
        assert made[-1].n_accepted > 5


def test_what_is_refused(small: kvg.Model, stories: Path, architecture: Callable[[ArchSpec], Path]) -> None:
    with (
        open_context(small, n_ctx=64, n_seq_max=2) as ctx,
        kvg.Model(stories) as strange,
        kvg.Context(strange, n_ctx=64) as draft,
    ):
        with pytest.raises(kvg.InvalidArgumentError, match="draft: its vocabulary has"):
            kvg.generate(ctx, PROMPT, draft=draft)
        with pytest.raises(kvg.InvalidArgumentError, match="draft must be"):
            kvg.generate(ctx, PROMPT, draft=small)  # type: ignore[arg-type]
        with pytest.raises(kvg.InvalidArgumentError, match="draft: drafts are for one prompt"):
            kvg.generate(ctx, [PROMPT, PROMPT], draft=ctx)
    with (
        kvg.Model(architecture(DELTA_NET)) as recurrent,
        kvg.Context(recurrent, n_ctx=64) as ctx,
        kvg.Context(recurrent, n_ctx=64) as draft,
        pytest.raises(kvg.UnsupportedError, match="recurrent"),
    ):
        kvg.generate(ctx, PROMPT, draft=draft)


def talk(model: kvg.Model, n_ctx: int, left: int = 0, **drafts: Any) -> list[Any]:
    """Answers, with what is left of one, said again and edited; and what the cache has after each."""
    params = kvg.SamplingParams(max_tokens=24)
    with open_context(model, n_ctx=n_ctx, n_batch=32, **F32) as ctx:
        conversation = Conversation(ctx, system="Be kind.", **drafts)
        found: list[Any] = []

        def answer(stream: Iterator[kvg.Piece]) -> None:
            found.append([piece.token for piece in stream])
            found.append(look(ctx)[0])

        answer(conversation.ask("Hello", params))
        stream = conversation.ask("Who?", params)
        found.append([next(stream).token for _ in range(5)])
        if left:
            del stream
        answer(conversation.ask("And then?", params))
        answer(conversation.regenerate(dataclasses.replace(params, temperature=0.9, seed=3)))
        answer(conversation.edit("Why?", params))
        conversation.reset()
        answer(conversation.ask("Hello", params))
        return found


def test_an_encoder_drafts_nothing(architecture: Callable[[ArchSpec], Path]) -> None:
    """It is refused, and not asked in vain at every token."""
    with (
        kvg.Model(architecture(ArchSpec("bert", head_dim=16, n_head_kv=4)), device="cpu") as encoder,
        kvg.Model(architecture(ArchSpec("qwen3")), device="cpu") as model,
        kvg.Context(model, n_ctx=64) as ctx,
        kvg.Context(encoder, n_ctx=64) as draft,
        pytest.raises(kvg.UnsupportedError, match="is an encoder"),
    ):
        kvg.generate(ctx, PROMPT, draft=draft)


@pytest.mark.parametrize(("n_ctx", "left"), [(512, 0), (512, 1), (96, 0)])
def test_a_conversation(stories: Path, made: list[Lookahead], n_ctx: int, left: int) -> None:
    """With 96 cells old turns are given up."""
    with kvg.Model(stories, device=where.device) as model:
        plain = talk(model, n_ctx, left)
        with open_context(model, n_ctx=n_ctx, n_batch=32, **F32) as draft:
            assert talk(model, n_ctx, left, draft=draft) == plain
            assert made[-1].n_accepted > 20
            with open_context(model, n_ctx=64) as ctx, pytest.raises(kvg.InvalidArgumentError, match="draft"):
                Conversation(ctx, self_extend=2, draft=draft)


def test_a_draft_that_fails_is_none(small: kvg.Model, made: list[Lookahead]) -> None:
    """The second context has no room for the prompt."""
    plain = said(small, None, 256, CHOICES[0])
    with open_context(small, n_ctx=256, n_batch=32, **F32) as ctx, open_context(small, n_ctx=8) as draft:
        found = [p.token for p in kvg.generate(ctx, PROMPT, draft=draft, **CHOICES[0])]
    assert found == [token for token, _ in plain[0][:40]]
    assert made[-1].n_drafted == 0


@pytest.mark.parametrize("n_ctx", [256, 48])
@pytest.mark.parametrize(("noise", "least"), [(0.0, 25), (0.02, 8), (0.5, 0)])
def test_drafts_by_the_models_own_head(
    architecture: Callable[[ArchSpec], Path],
    tmp_path: Path,
    made: list[Lookahead],
    n_ctx: int,
    noise: float,
    least: int,
) -> None:
    """The same is said, whether the head knows what comes next, most of it, or hardly anything."""
    path = crafted(architecture(HEAD), tmp_path / "crafted.gguf", noise)
    choice = CHOICES[0]
    with (
        kvg.Model(path, device=where.device) as plain,
        kvg.Model(path, device=where.device, draft_heads=True) as model,
    ):
        assert said(model, "mtp", n_ctx, choice) == said(plain, None, n_ctx, choice)
        with (
            open_context(plain, n_ctx=64) as ctx,
            pytest.raises(kvg.UnsupportedError, match="draft_heads=True"),
        ):
            kvg.generate(ctx, PROMPT, draft="mtp")
    assert least <= made[0].n_accepted <= made[0].n_drafted


def test_the_command_has_drafts_by_the_head(
    architecture: Callable[[ArchSpec], Path], tmp_path: Path, made: list[Lookahead]
) -> None:
    path = crafted(architecture(HEAD), tmp_path / "crafted.gguf", 0.0)
    arguments = ["generate", "-m", str(path), "-dev", "none", "-t", "1", "-p", "a", "-n", "20", "--temp", "0"]
    plain = CliRunner().invoke(main, arguments)
    drafted = CliRunner().invoke(main, [*arguments, "--spec-type", "draft-mtp"])
    assert (drafted.exit_code, drafted.stdout) == (0, plain.stdout), drafted.output
    assert len(made) == 1 and made[0].n_accepted > 10
    refused = CliRunner().invoke(main, [*arguments, "--spec-type", "ngram-simple"])
    assert refused.exit_code == 2 and "serve and batch" in refused.output


def drafts_of(
    texts: dict[int, list[int]], begin: int, rng: random.Random
) -> Callable[[kvg.Context, Any], list[list[int]]]:
    """In place of Context.draft: what texts, by sequence, go on with behind `begin`, right to some token."""

    def draft(ctx: kvg.Context, asked: list[tuple[int, int, int]]) -> list[list[int]]:
        found = []
        for seq, token, n in asked:
            at = ctx.kv.seq_pos_max(seq) + 1 - begin
            assert texts[seq][at] == token
            coming = texts[seq][at + 1 : at + 1 + n]
            n_right = rng.randint(0, n)
            found.append([*coming[:n_right], *((each + 1) % N_VOCAB for each in coming[n_right:])])
        return found

    return draft


def interleaved(ctx: kvg.Context, n_texts: int, choice: dict[str, Any], **drafts: Any) -> list[list[int]]:
    """Texts that are said by turns, each by a generator of its own."""
    prompts = [[token + seq for token in PROMPT] for seq in range(n_texts)]
    streams = [kvg.generate(ctx, each, seq=seq, **choice, **drafts) for seq, each in enumerate(prompts)]
    said: list[list[int]] = [[] for _ in streams]
    for _ in range(choice["max_tokens"]):
        for each, stream in zip(said, streams, strict=True):
            each.extend(piece.token for piece in islice(stream, 1))
    return said


@pytest.mark.parametrize("n_texts", [1, 2])
@pytest.mark.parametrize("choice", CHOICES[:2], ids=["greedy", "drawn"])
def test_recurrent_layers_go_back(
    architecture: Callable[[ArchSpec], Path],
    monkeypatch: pytest.MonkeyPatch,
    made: list[Lookahead],
    n_texts: int,
    choice: dict[str, Any],
) -> None:
    """Drafts hold up to some token. Of two texts each drops states that the other would go back to."""
    n_again, again = 0, WayBack._again

    def counted(*arguments: Any) -> None:
        nonlocal n_again
        n_again += 1
        again(*arguments)

    monkeypatch.setattr(WayBack, "_again", counted)
    path, sizes = architecture(RECURRENT), {"n_ctx": 256, "n_seq_max": n_texts, **F32}
    with kvg.Model(path, device=where.device) as plain, open_context(plain, **sizes) as ctx:
        without = interleaved(ctx, n_texts, choice)
        looks = [(ctx.kv.seq_pos_max(seq), ctx.kv.pending_token(seq)) for seq in range(n_texts)]
    texts = dict(enumerate(without))
    monkeypatch.setattr(kvg.Context, "draft", drafts_of(texts, len(PROMPT), random.Random(3)))
    with kvg.Model(path, device=where.device, draft_heads=True) as model, open_context(model, **sizes) as ctx:
        assert interleaved(ctx, n_texts, choice, draft="mtp") == without
        assert [(ctx.kv.seq_pos_max(seq), ctx.kv.pending_token(seq)) for seq in range(n_texts)] == looks
    for each in made:
        assert 5 < each.n_accepted < each.n_drafted
    assert (n_again > 0) == (n_texts > 1)


def test_a_recurrent_models_own_head(architecture: Callable[[ArchSpec], Path], made: list[Lookahead]) -> None:
    """It guesses hardly anything: texts go back behind each draft, also in a cache that has to be shifted."""
    path = architecture(RECURRENT)
    with (
        kvg.Model(path, device=where.device) as plain,
        kvg.Model(path, device=where.device, draft_heads=True) as model,
    ):
        for n_ctx in (256, 48):
            assert said(model, "mtp", n_ctx, CHOICES[1]) == said(plain, None, n_ctx, CHOICES[1])
        assert all(each.n_drafted > 0 for each in made)
        with (
            open_context(model, n_ctx=64, checkpoint_bytes=0) as ctx,
            pytest.raises(kvg.UnsupportedError, match="larger checkpoint_bytes"),
        ):
            kvg.generate(ctx, PROMPT, draft="mtp")


def test_a_head_that_mostly_holds_drafts_in_most_steps(made: list[Lookahead]) -> None:
    """Of two tokens each; a guess that doesn't hold is no reason for a pause."""
    path = Path(__file__).parents[2] / "data" / "stories260K-mtp.gguf"
    with (
        kvg.Model(path, device=where.device, draft_heads=True) as model,
        open_context(model, n_ctx=256, **F32) as ctx,
    ):
        said = []
        choices: list[dict[str, Any]] = [{}, {"draft": "mtp", "draft_max": 2}]
        for more in choices:
            ctx.kv.clear()
            pieces = kvg.generate(ctx, "The dog was", max_tokens=150, temperature=0.0, **more)
            said.append([piece.token for piece in pieces])
    assert said[0] == said[1]
    assert made[-1].n_accepted > 67  # of 150
