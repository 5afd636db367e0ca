"""The token that generate handed out last: what decodes it, what carries it, what drops it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engines import Token, decode, open_context, run_of

import pykvgraph as kvg

OPENING = "Once upon a time"
N_TOKENS = 12


@pytest.fixture(scope="module")
def story_model(stories: Path) -> Iterator[kvg.Model]:
    with kvg.Model(stories, device="cpu") as model:
        yield model


@pytest.fixture
def ctx(story_model: kvg.Model) -> Iterator[kvg.Context]:
    with open_context(story_model, n_ctx=256, n_seq_max=3) as ctx:
        yield ctx


def text_of(pieces: list[kvg.Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def tokens_of(pieces: list[kvg.Piece]) -> list[int]:
    return [piece.token for piece in pieces]


def begun(ctx: kvg.Context) -> int:
    """Says a few tokens in sequence 0; the last one is pending."""
    pieces = list(kvg.generate(ctx, OPENING, max_tokens=N_TOKENS))
    assert ctx.kv.pending_token(0) == pieces[-1].token
    return pieces[-1].token


def test_a_text_that_is_left_at_any_piece_goes_on(ctx: kvg.Context) -> None:
    whole = list(kvg.generate(ctx, OPENING, max_tokens=30))
    for n in (1, 2, 17):
        ctx.reset()
        said = []
        for piece in kvg.generate(ctx, OPENING, max_tokens=30):
            said.append(piece)
            if len(said) == n:
                break
        assert ctx.kv.pending_token(0) == said[-1].token
        said += kvg.generate(ctx, "", max_tokens=30 - n)
        assert tokens_of(said) == tokens_of(whole)
        assert text_of(said) == text_of(whole)


def test_a_prompt_comes_behind_it(ctx: kvg.Context) -> None:
    """The second prompt's cells are those of all the text in one, and there is no second space."""
    tokenizer = ctx.model.tokenizer
    first = list(kvg.generate(ctx, OPENING, max_tokens=N_TOKENS))
    more = "ly, and then"
    ids = [
        *tokenizer.encode(OPENING),
        *tokens_of(first),
        *tokenizer.encode(more, False, add_space_prefix=False),
    ]
    second = list(kvg.generate(ctx, more, max_tokens=8))
    assert ctx.kv.seq_pos_max(0) == len(ids) + 6
    with open_context(ctx.model, n_ctx=256) as other:
        assert tokens_of(list(kvg.generate(other, ids, max_tokens=8))) == tokens_of(second)
    assert tokenizer.decode(ids).startswith(OPENING + text_of(first) + more)


def test_text_that_goes_on_has_no_space_of_its_own(ctx: kvg.Context) -> None:
    """By libllama's own tokens: those of the whole text, where a word begins anew behind the joint."""
    tokenizer = ctx.model.tokenizer
    for text in (" the cat", "the cat", "\n", "", "\u2581x", "\u00e9", "s. The"):
        ids = tokenizer.encode(text, False, add_space_prefix=False)
        assert b"".join(map(tokenizer.token_to_piece, ids)) == text.replace("\u2581", " ").encode()
        special = tokenizer.encode(text, add_space_prefix=False)
        assert special == [tokenizer.bos, *ids]
    assert tokenizer.encode("the cat", False) == tokenizer.encode(" the cat", False, add_space_prefix=False)


def test_what_stops_a_text_is_not_pending(ctx: kvg.Context) -> None:
    *_, last = kvg.generate(ctx, OPENING, max_tokens=100, stop="park")
    assert last.finish_reason == "stop"
    assert ctx.kv.pending_token(0) is None


Change = Callable[[kvg.Context], object]

DROPPING: dict[str, Change] = {
    "clear": lambda ctx: ctx.kv.clear(),
    "reset": lambda ctx: ctx.reset(),
    "seq_rm of all": lambda ctx: ctx.kv.seq_rm(0, -1, -1),
    "seq_rm of every sequence": lambda ctx: ctx.kv.seq_rm(-1, 0, -1),
    "seq_rm of the end": lambda ctx: ctx.kv.seq_rm(0, ctx.kv.seq_pos_max(0), -1),
    "seq_rm of nothing but it": lambda ctx: ctx.kv.seq_rm(0, ctx.kv.seq_pos_max(0) + 1, -1),
    "seq_keep of another": lambda ctx: ctx.kv.seq_keep(1),
    "rewind": lambda ctx: ctx.kv.rewind(0, 7),
    "rewind to the end": lambda ctx: ctx.kv.rewind(0, ctx.kv.seq_pos_max(0) + 1),
    "append": lambda ctx: ctx.append(5, 0),
    "decode": lambda ctx: decode(ctx, [Token(5, ctx.kv.seq_pos_max(0) + 1)]),
    "load": lambda ctx: ctx.kv.load(saved_without(ctx), seq=0),
    "set": lambda ctx: ctx.kv.set_pending_token(0, None),
    "seq_cp of other cells": lambda ctx: copy_others(ctx),
    "attach": lambda ctx: attach(ctx),
}
KEEPING: dict[str, Change] = {
    "seq_rm before it": lambda ctx: ctx.kv.seq_rm(0, 3, 7),
    "seq_rm of another": lambda ctx: ctx.kv.seq_rm(1, -1, -1),
    "seq_keep": lambda ctx: ctx.kv.seq_keep(0),
    "a shift": lambda ctx: kvg.ContextShift(n_keep=2).apply(ctx.kv, 0),
    "self-extend": lambda ctx: kvg.self_extend(ctx.kv, 0, 2, -1 & 0x7FFFFFFF, 2),
    "decoding another": lambda ctx: decode(ctx, [Token(5, 0, (1,))]),
    "rewind beyond it": lambda ctx: ctx.kv.rewind(0, 200),
    "saving": lambda ctx: ctx.kv.save(0),
    "a copy of it": lambda ctx: ctx.kv.seq_cp(0, 1, -1, -1),
    "a refused decode": lambda ctx: refused(ctx),
}


def saved_without(ctx: kvg.Context) -> bytes:
    decode(ctx, [Token(5, 0, (2,))])
    return ctx.kv.save(2)


def copy_others(ctx: kvg.Context) -> None:
    decode(ctx, run_of([5] * 40, 0, (1,)))
    ctx.kv.seq_cp(1, 0, 30, -1)


def refused(ctx: kvg.Context) -> None:
    with pytest.raises(kvg.InvalidArgumentError):
        ctx.append(10**6, 0)


def attach(ctx: kvg.Context) -> None:
    end = ctx.kv.seq_pos_max(0) + 1
    decode(ctx, run_of([5] * (end + 3), 0, (1,)))
    ctx.kv.attach(ctx.kv.hold(1, end, end + 3), 0)


@pytest.mark.parametrize("name", DROPPING)
def test_dropped(ctx: kvg.Context, name: str) -> None:
    begun(ctx)
    DROPPING[name](ctx)
    assert ctx.kv.pending_token(0) is None


@pytest.mark.parametrize("name", KEEPING)
def test_kept(ctx: kvg.Context, name: str) -> None:
    token = begun(ctx)
    KEEPING[name](ctx)
    assert ctx.kv.pending_token(0) == token


def test_a_copy_goes_on_as_well(ctx: kvg.Context) -> None:
    begun(ctx)
    ctx.kv.seq_cp(0, 1, -1, -1)
    ctx.kv.seq_cp(0, 2, -1, 7)
    assert ctx.kv.pending_token(2) is None
    one, other = (tokens_of(list(kvg.generate(ctx, "", seq=seq, max_tokens=9))) for seq in (0, 1))
    assert one == other


@pytest.mark.parametrize("whole", [False, True])
def test_saved_and_loaded(ctx: kvg.Context, whole: bool) -> None:
    token = begun(ctx)
    blob = ctx.kv.save(None if whole else 0)
    expected = tokens_of(list(kvg.generate(ctx, "", max_tokens=9)))
    with open_context(ctx.model, n_ctx=256, n_seq_max=3) as other:
        begun(other)
        seq = 0 if whole else 2
        other.kv.load(blob, None if whole else seq)
        assert other.kv.pending_token(seq) == token
        assert tokens_of(list(kvg.generate(other, "", seq=seq, max_tokens=9))) == expected


def test_an_interrupted_decode_leaves_it_pending(ctx: kvg.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C after the native call, before the return: the tokens are taken back, and it is pending again."""
    token = begun(ctx)
    expected = ctx.kv.seq_pos_max(0)

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ctx._outputs, "at", strike)
        next(kvg.generate(ctx, ""))
    assert ctx.kv.seq_pos_max(0) == expected
    assert ctx.kv.pending_token(0) == token


@pytest.mark.parametrize("bad", [-1, 10**9, 2**70, 1.5, "a", True])
def test_no_token(ctx: kvg.Context, bad: object) -> None:
    with pytest.raises(kvg.InvalidArgumentError):
        ctx.kv.set_pending_token(0, bad)  # type: ignore[arg-type]
    with pytest.raises(kvg.InvalidArgumentError):
        ctx.kv.pending_token(bad)  # type: ignore[arg-type]


def test_several_prompts_say_what_each_says_alone(ctx: kvg.Context) -> None:
    prompts: Any = [OPENING, "The big dog", ctx.model.tokenizer.encode("Lily")]
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 4}, {"stop": "."}]
    for arguments in ways:
        alone = []
        for seq, prompt in enumerate(prompts):
            ctx.reset()
            pieces = kvg.generate(ctx, prompt, seq=seq, max_tokens=20, **arguments)
            alone.append([(piece.token, piece.text) for piece in pieces])
        ctx.reset()
        together: list[list[tuple[int, str]]] = [[], [], []]
        for piece in kvg.generate(ctx, prompts, max_tokens=20, **arguments):
            together[piece.seq].append((piece.token, piece.text))
        assert together == alone


@pytest.mark.parametrize("n", range(3, 9))
def test_several_prompts_that_are_left_go_on(ctx: kvg.Context, n: int) -> None:
    prompts = [OPENING, "The big dog", "Lily"]
    whole: list[list[int]] = [[], [], []]
    for piece in kvg.generate(ctx, prompts, max_tokens=12):
        whole[piece.seq].append(piece.token)
    ctx.reset()
    said: list[list[int]] = [[], [], []]
    for i, piece in enumerate(kvg.generate(ctx, prompts, max_tokens=12), 1):
        said[piece.seq].append(piece.token)
        if i == n:
            break
    for piece in kvg.generate(ctx, ["", "", ""], max_tokens=12):
        said[piece.seq].append(piece.token)
    assert [tokens[:12] for tokens in said] == whole


def test_several_prompts_that_dont_fit(ctx: kvg.Context) -> None:
    with pytest.raises(kvg.CacheFullError):
        list(kvg.generate(ctx, [[5] * 100] * 3))
    assert ctx.kv.n_used == 0
    with pytest.raises(kvg.InvalidArgumentError, match="n_seq_max"):
        kvg.generate(ctx, ["a"] * 4)
    wrong: list[Any] = [["a", []], ["a", 5], [[1], ["b"]], [[[1]]]]
    for prompts in wrong:
        with pytest.raises(kvg.InvalidArgumentError):
            kvg.generate(ctx, prompts)


def test_several_prompts_shift(ctx: kvg.Context) -> None:
    """The longest sequence gives up tokens; each says as much as was asked for."""
    counts = [0, 0]
    prompts: Any = [OPENING, [5] * 60]
    for piece in kvg.generate(ctx, prompts, max_tokens=200, on_full=kvg.ContextShift(n_keep=4)):
        counts[piece.seq] += 1
    assert counts == [200, 200]
    assert ctx.kv.n_used <= 256


def test_a_prompt_longer_than_the_context(ctx: kvg.Context) -> None:
    long = [5] * 300
    with pytest.raises(kvg.CacheFullError):
        list(kvg.generate(ctx, long))
    assert ctx.kv.n_used == 0
    assert len(list(kvg.generate(ctx, long, max_tokens=3, on_full=kvg.ContextShift(n_keep=4)))) == 3
