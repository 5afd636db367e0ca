"""The token loop on models small enough to say something at once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.engines import Token, decode, open_context, run_of
from support.judge import nmse

import pykvgraph as kvg

OPENING = "Once upon a time"


@pytest.fixture(scope="module")
def story_model(stories: Path) -> Iterator[kvg.Model]:
    with kvg.Model(stories, device="cpu") as model:
        yield model


@pytest.fixture
def ctx(story_model: kvg.Model) -> Iterator[kvg.Context]:
    with open_context(story_model, n_ctx=512) as ctx:
        yield ctx


def text_of(pieces: list[kvg.Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_temperature_zero_is_argmax(ctx: kvg.Context) -> None:
    pieces = list(kvg.generate(ctx, OPENING, max_tokens=20))
    with open_context(ctx.model, n_ctx=512) as by_hand:
        ids = ctx.model.tokenizer.encode(OPENING)
        logits = decode(by_hand, run_of(ids))[-1]
        for i, piece in enumerate(pieces):
            assert piece.token == int(logits.argmax())
            exact = logits.astype(np.float64)
            assert piece.logprob == pytest.approx(exact[piece.token] - np.log(np.exp(exact).sum()), abs=1e-4)
            logits = decode(by_hand, [Token(piece.token, len(ids) + i)])[0]


def test_max_tokens(ctx: kvg.Context) -> None:
    pieces = list(kvg.generate(ctx, OPENING, max_tokens=7))
    assert len(pieces) == 7
    assert [piece.finish_reason for piece in pieces] == [None] * 6 + ["length"]


@pytest.mark.parametrize("stop", [["loved"], ["e loved to pl"], ["never said", "park", "outside"], "outside"])
def test_stop_strings(ctx: kvg.Context, golden_story: str, stop: list[str] | str) -> None:
    """Whole, across several tokens, the first of several: the text ends right before it."""
    pieces = list(kvg.generate(ctx, "", max_tokens=100, stop=stop))
    wanted = [stop] if isinstance(stop, str) else stop
    first = min(golden_story.index(s) for s in wanted if s in golden_story)
    assert text_of(pieces) == golden_story[:first]
    assert pieces[-1].finish_reason == "stop"
    assert all(piece.finish_reason is None for piece in pieces[:-1])


def test_text_that_only_looks_like_a_stop_string_is_not_lost(ctx: kvg.Context, golden_story: str) -> None:
    pieces = list(
        kvg.generate(ctx, "", max_tokens=60, stop=["playing", "Lily. She loved to eat", "upon a timf"])
    )
    assert golden_story.startswith(text_of(pieces))
    assert pieces[-1].finish_reason == "length"


def test_goes_on_where_it_ended(ctx: kvg.Context) -> None:
    """Two calls say what one says: nothing is cleared, the cache has the last token pending."""
    whole = list(kvg.generate(ctx, OPENING, max_tokens=30))
    ctx.reset()
    first = list(kvg.generate(ctx, OPENING, max_tokens=12))
    n_used = ctx.kv.n_used
    second = list(kvg.generate(ctx, "", max_tokens=18))
    assert ctx.kv.n_used == n_used + 18
    assert [piece.token for piece in first + second] == [piece.token for piece in whole]
    assert text_of(first + second) == text_of(whole)


def test_sequences_are_apart(story_model: kvg.Model) -> None:
    with open_context(story_model, n_ctx=512, n_seq_max=2) as ctx:
        alone = list(kvg.generate(ctx, OPENING, seq=1, max_tokens=20))
        ctx.reset()
        list(kvg.generate(ctx, "The big dog", seq=0, max_tokens=20))
        among = list(kvg.generate(ctx, OPENING, seq=1, max_tokens=20))
    assert [piece.token for piece in among] == [piece.token for piece in alone]


def test_full_context_is_an_error(story_model: kvg.Model) -> None:
    with open_context(story_model, n_ctx=32) as ctx:
        pieces = kvg.generate(ctx, OPENING, max_tokens=100)
        with pytest.raises(kvg.CacheFullError):
            list(pieces)
        assert ctx.kv.n_used == 32
        with pytest.raises(kvg.CacheFullError):
            list(kvg.generate(ctx, OPENING, max_tokens=1))


def test_context_shift_goes_on(story_model: kvg.Model) -> None:
    reports: list[kvg.ShiftReport] = []
    n_ctx, n_keep, n_tokens = 128, 8, 400
    with open_context(story_model, n_ctx=n_ctx) as ctx:
        shift = kvg.ContextShift(n_keep=n_keep, on_shift=reports.append)
        pieces = list(kvg.generate(ctx, OPENING, max_tokens=n_tokens, on_full=shift))
        assert len(pieces) == n_tokens
        assert ctx.kv.n_used <= n_ctx
        assert sorted(ctx.kv.cells().pos[: ctx.kv.n_kv]) == list(range(ctx.kv.n_used))
    discard = (n_ctx - n_keep) // 2
    assert {report.n_discard for report in reports} == {discard}
    assert len(reports) == 1 + (n_tokens - n_ctx) // discard
    assert all(report.stats.shifted_cells == n_ctx - n_keep - discard for report in reports)


def test_shifted_generation_is_what_the_operations_by_hand_say(story_model: kvg.Model) -> None:
    n_ctx, n_keep, n_discard, n_tokens = 64, 4, 20, 100
    options = {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}
    with open_context(story_model, n_ctx=n_ctx, **options) as ctx:
        shift = kvg.ContextShift(n_keep=n_keep, n_discard=n_discard)
        tokens = [piece.token for piece in kvg.generate(ctx, OPENING, max_tokens=n_tokens, on_full=shift)]
    with open_context(story_model, n_ctx=n_ctx, **options) as by_hand:
        kv = by_hand.kv
        logits = decode(by_hand, run_of(story_model.tokenizer.encode(OPENING)))[-1]
        for token in tokens:
            assert token == int(logits.argmax())
            if kv.n_used == n_ctx:
                kv.seq_rm(0, n_keep, n_keep + n_discard)
                kv.seq_add(0, n_keep + n_discard, -1, -n_discard)
            logits = decode(by_hand, [Token(token, kv.seq_pos_max(0) + 1)])[0]


def test_a_prompt_longer_than_the_cache(story_model: kvg.Model) -> None:
    """What is free is filled before anything is given up."""
    ids = [5 + i for i in range(40)]
    shifts: list[kvg.ShiftReport] = []
    with (
        open_context(story_model, n_ctx=32, n_batch=24) as ctx,
        open_context(story_model, n_ctx=32) as by_hand,
    ):
        shift = kvg.ContextShift(n_keep=4, n_discard=8, on_shift=shifts.append)
        (piece,) = kvg.generate(ctx, ids, max_tokens=1, on_full=shift)
        assert [report.n_past for report in shifts] == [24]
        decode(by_hand, run_of(ids[:24]))
        decode(by_hand, run_of(ids[24:32], 24))
        by_hand.kv.seq_rm(0, 4, 12)
        by_hand.kv.seq_add(0, 12, -1, -8)
        logits = decode(by_hand, run_of(ids[32:], 24))
        assert piece.token == int(logits[-1].argmax())
        assert np.allclose(ctx.logits()[-1], logits[-1], atol=1e-3)


def test_threads_make_room_on_one_context(story_model: kvg.Model) -> None:
    """Neither can be left without tokens to give up: one alone doesn't fill the cache, both do."""
    n_ctx, n_tokens = 64, 45
    with open_context(story_model, n_ctx=n_ctx, n_seq_max=2) as ctx:

        def speak(seq: int) -> int:
            shift = kvg.ContextShift(n_keep=4, n_discard=1)  # full again at once: they meet often
            pieces = kvg.generate(ctx, OPENING, seq=seq, max_tokens=n_tokens, on_full=shift)
            return len(list(pieces))

        for _ in range(10):
            ctx.reset()
            with ThreadPoolExecutor(2) as pool:
                assert list(pool.map(speak, range(2))) == [n_tokens] * 2


@pytest.mark.parametrize("shifts", [False, True])
def test_a_decode_between_the_count_of_cells_and_the_own_one(
    story_model: kvg.Model, monkeypatch: pytest.MonkeyPatch, shifts: bool
) -> None:
    """Another thread's takes the last cells: there is a policy for that, or it is an error."""
    with open_context(story_model, n_ctx=32, n_seq_max=2) as ctx:
        call = ctx._handle.call
        taken: list[int] = []

        def late(function: Any, *arguments: Any) -> Any:
            if function == ctx._append and not taken and ctx.kv.n_free < 8:
                taken.append(ctx.kv.n_free)
                decode(ctx, [Token(5, i, (1,)) for i in range(taken[0])])
            return call(function, *arguments)

        monkeypatch.setattr(ctx._handle, "call", late)
        pieces = kvg.generate(
            ctx, OPENING, max_tokens=40, on_full=kvg.ContextShift(n_keep=4) if shifts else None
        )
        if shifts:
            assert len(list(pieces)) == 40
            assert sorted(ctx.kv.cells().pos[ctx.kv.cells().seq[:, 1]].tolist()) == list(range(taken[0]))
        else:
            with pytest.raises(kvg.CacheFullError):
                list(pieces)
        assert taken == [7]


def test_nothing_to_discard(story_model: kvg.Model) -> None:
    with open_context(story_model, n_ctx=32) as ctx, pytest.raises(kvg.CacheFullError):
        list(kvg.generate(ctx, OPENING, max_tokens=100, on_full=kvg.ContextShift(n_keep=32)))


def test_seeds(ctx: kvg.Context) -> None:
    def speak(seed: int, **sampling: float) -> list[int]:
        ctx.reset()
        return [
            piece.token
            for piece in kvg.generate(ctx, OPENING, max_tokens=40, temperature=1.0, seed=seed, **sampling)  # type: ignore[arg-type]
        ]

    first = speak(1)
    assert speak(1) == first
    assert len({tuple(speak(seed)) for seed in (1, 2, 3)}) > 1
    greedy = speak(1, top_k=1)
    assert speak(2, top_k=1) == greedy
    assert speak(2, top_p=0.0) == greedy
    assert speak(2, min_p=1.0) == greedy


def test_grammar(ctx: kvg.Context) -> None:
    """What is said is of the grammar, greedily or not; the end of its text ends the generation."""
    for sampling in ({}, {"temperature": 1.5, "seed": 3}, {"temperature": 1.0, "seed": 1, "mirostat": 2}):
        ctx.reset()
        arguments: dict[str, Any] = {"grammar": 'root ::= " " [0-9] [0-9] " cats"', **sampling}
        pieces = list(kvg.generate(ctx, OPENING, max_tokens=30, **arguments))
        assert re.fullmatch(r" [0-9]{2} cats", text_of(pieces))
        assert pieces[-1].finish_reason == "stop"


def test_json_schema(ctx: kvg.Context) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}, "yes": {"type": "boolean"}}}
    schema["required"] = ["n", "yes"]
    said = json.loads(text_of(list(kvg.generate(ctx, OPENING, max_tokens=60, json_schema=schema))))
    assert said["n"] in (1, 2)
    assert isinstance(said["yes"], bool)


def test_long_strings_and_lists_of_a_schema(ctx: kvg.Context) -> None:
    schema = {"type": "string", "maxLength": 1000}
    assert text_of(list(kvg.generate(ctx, OPENING, max_tokens=5, json_schema=schema))).startswith('"')
    ctx.reset()
    schema = {"type": "array", "items": {"type": "integer"}, "maxItems": 1000}
    assert text_of(list(kvg.generate(ctx, OPENING, max_tokens=5, json_schema=schema))).startswith("[")


def test_a_grammar_that_allows_nothing(ctx: kvg.Context) -> None:
    """libllama would end the process: no token spells what the grammar wants, and bytes are forbidden."""
    forbidden = dict.fromkeys(range(ctx.model.n_vocab), -np.inf)
    with pytest.raises(kvg.KVGraphError, match="no token may follow"):
        list(kvg.generate(ctx, OPENING, grammar="root ::= [a-z]+", logit_bias=forbidden))


def test_logit_bias_and_penalties(ctx: kvg.Context) -> None:
    def said(**sampling: Any) -> list[int]:
        ctx.reset()
        return [piece.token for piece in kvg.generate(ctx, OPENING, max_tokens=40, **sampling)]

    plain = said()
    assert said(logit_bias={plain[0]: -np.inf})[0] != plain[0]
    assert said(logit_bias={7: 1e6})[:3] == [7, 7, 7]
    longest = max(plain.count(token) for token in plain)
    for penalty in ({"repeat_penalty": 5.0}, {"frequency_penalty": 50.0}, {"presence_penalty": 50.0}):
        punished = said(**penalty)
        assert max(punished.count(token) for token in punished) == 1 < longest
        assert said(**penalty, penalty_last_n=0) == plain


@pytest.mark.parametrize(
    "params", [{"presence_penalty": 50.0}, {"dry_multiplier": 50.0, "dry_allowed_length": 0}]
)
def test_penalties_of_a_prompt_go_with_a_grammar(ctx: kvg.Context, params: dict[str, Any]) -> None:
    """The grammar begins behind the prompt, of which the penalties and DRY hear."""
    tokens = ctx.model.tokenizer.encode(OPENING)
    logits = np.zeros(ctx.model.n_vocab, np.float32)
    logits[tokens[-1]] = logits[tokens[2]] = 1.0
    fresh, sampler = (
        kvg.Sampler(grammar="root ::= [a-z ]+", tokenizer=ctx.model.tokenizer, **params) for _ in range(2)
    )
    sampler.begin(np.array([*tokens, *tokens], np.int32))
    assert fresh.sample(logits) in (tokens[-1], tokens[2])
    assert sampler.copy().sample(logits) not in (tokens[-1], tokens[2])
    assert sampler.sample(logits) not in (tokens[-1], tokens[2])


def test_temperature_shapes_the_distribution(ctx: kvg.Context) -> None:
    """The first token of many draws follows softmax(logits / temperature)."""
    ids = ctx.model.tokenizer.encode(OPENING + ", there was a")
    logits = decode(ctx, run_of(ids))[-1]
    temperature, n_draws = 1.5, 2000
    sampler = kvg.Sampler(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=7)
    counts = np.bincount([sampler.sample(logits) for _ in range(n_draws)], minlength=len(logits))
    weights = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    expected = weights / weights.sum()
    likely = expected > 0.02
    assert likely.sum() >= 3
    deviation = np.abs(counts[likely] / n_draws - expected[likely])
    assert (deviation <= 5 * np.sqrt(expected[likely] / n_draws)).all()


def test_flash_and_plain_tell_the_same(story_model: kvg.Model) -> None:
    rows = []
    for flash_attn in ("on", "off"):
        with open_context(story_model, n_ctx=512, flash_attn=flash_attn) as ctx:
            rows.append(decode(ctx, run_of(story_model.tokenizer.encode(OPENING))))
    assert nmse(rows[0], rows[1]) <= 1e-4


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_tokens": 0},
        {"max_tokens": 2**70},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**70},
        {"stop": [""]},
        {"stop": [1]},
        {"grammar": "root ::= undefined"},
        {"grammar": "no grammar"},
        {"grammar": "other ::= [a]"},
        {"grammar": "root ::= root [a]"},
        {"grammar": 'root ::= "a"{ 5, 2 }'},
        {"grammar": 'root ::= "\\"{" [<{"] "a"{1,0} "}"'},
        {"json_schema": {"type": "string", "maxLength": 10**9}},
        {"json_schema": {"type": "string", "pattern": "^a{1_000_000_000}$"}},
        {"grammar": "root ::= " + "(" * 100_000 + "[a]" + ")" * 100_000},
        {"json_schema": {"type": "nonsense"}},
        {"json_schema": {"$ref": "#/nowhere"}},
        {"logit_bias": {"a": 1}},
        {"repeat_penalty": 0.0},
        {"seq": 1},
        {"seq": -1},
        {"seq": 2**64},
        {"on_full": 32},
    ],
    ids=str,
)
def test_invalid_arguments(ctx: kvg.Context, arguments: dict[str, object]) -> None:
    with pytest.raises(kvg.InvalidArgumentError):
        list(kvg.generate(ctx, OPENING, **arguments))  # type: ignore[arg-type]
    assert ctx.kv.n_used == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"grammar": 'root ::= "' + r"\"" * 400_000},
        {"grammar": "root ::= " + "<" * 1_000_000},
        {"json_schema": {"properties": {"x" * 100_000: {"type": "array", "items": {}, "minItems": 10_000}}}},
        {"json_schema": {"enum": ["a" * (1 << 18)]}},
    ],
    ids=["literal", "tokens", "long name", "long schema"],
)
def test_large_grammars_are_refused_soon(ctx: kvg.Context, arguments: dict[str, Any]) -> None:
    """One that becomes 1 GB, or that a careless search would read for minutes."""
    with pytest.raises(kvg.InvalidArgumentError):
        kvg.generate(ctx, OPENING, **arguments)


def test_repetitions_that_may_be(ctx: kvg.Context) -> None:
    """Numbers within literals, classes and comments repeat nothing."""
    grammar = 'root ::= "\\"{5,2}" [{5,2}] "a"{2,3} # {5,2}'
    said = "".join(piece.text for piece in kvg.generate(ctx, OPENING, max_tokens=20, grammar=grammar))
    assert re.fullmatch(r'"\{5,2\}[{5,2}]a{2,3}', said)


def test_no_tokens_are_refused_at_once(ctx: kvg.Context) -> None:
    """Not at the first piece; of a text, how many tokens it has depends on the cache then."""
    with pytest.raises(kvg.InvalidArgumentError, match="prompt is empty"):
        kvg.generate(ctx, [])
    list(kvg.generate(ctx, OPENING, max_tokens=1))
    ctx.kv.set_pending_token(0, None)
    with pytest.raises(kvg.InvalidArgumentError, match="prompt is empty"):
        kvg.generate(ctx, [])
    pieces = kvg.generate(ctx, "")
    with pytest.raises(kvg.InvalidArgumentError, match="prompt is empty"):
        next(pieces)


def test_end_of_generation(tiny: kvg.Model) -> None:
    """A random model at a high temperature says </s> now and then: that ends the text."""
    eos = tiny.tokenizer.eos
    reasons = set()
    with open_context(tiny, n_ctx=64) as ctx:
        for seed in range(100):
            ctx.reset()
            flat = {"temperature": 5.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
            *before, last = kvg.generate(ctx, [5], max_tokens=20, seed=seed, **flat)  # type: ignore[arg-type]
            assert eos not in [piece.token for piece in before]
            assert (last.finish_reason == "stop") == (last.token == eos)
            reasons.add(last.finish_reason)
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0x7F800000], ids=hex)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_broken_logits(stories: Path, tmp_path: Path, bits: int, temperature: float) -> None:
    """One token's row of the output is no number, or infinite."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(stories.read_bytes())
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path, "r+").tensors}
    output: Any = tensors.get("output.weight", tensors["token_embd.weight"]).data  # in the mapped file
    output.view(np.uint32)[500, :] = bits
    output.flush()
    with (
        kvg.Model(path, device="cpu") as model,
        open_context(model, n_ctx=64) as ctx,
        pytest.raises(kvg.KVGraphError, match="logits are broken"),
    ):
        list(kvg.generate(ctx, [1, 400], max_tokens=5, temperature=temperature))
