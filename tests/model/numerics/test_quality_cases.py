"""What the cases of `pykvgraph quality` do to a cache, beside libllama doing the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support.engines import Logits, Token, open_context, run_of
from support.judge import nmse
from support.real import divergences, log_probabilities
from support.referee import Referee

import pykvgraph as kvg
from pykvgraph.demos import quality
from pykvgraph.demos.quality import N_NEXT, CaseResult, Quality
from pykvgraph.demos.quality_cases import (
    APART,
    FULL,
    TEXT,
    ForgottenText,
    Passage,
    append,
    parse_case,
)
from pykvgraph.errors import InvalidArgumentError

PAGE = (Path(__file__).parents[3] / "docs" / "glossary.md").read_text(encoding="utf-8")
N_CTX, N_BATCH = 256, 16


@pytest.fixture(scope="module")
def model(stories: Path) -> kvg.Model:
    return kvg.Model(stories, device="cpu")


@pytest.fixture(scope="module")
def passage(model: kvg.Model) -> Passage:
    ids = model.tokenizer.encode(PAGE)
    return Passage(ids[:100], ids[0], ids[400:450])


def positions(ctx: kvg.Context) -> list[int]:
    view = ctx.kv.cells()
    return sorted(view.pos[view.seq[:, TEXT]].tolist())


def behind(ctx: kvg.Context, ids: list[int]) -> Logits:
    batch = kvg.Batch()
    batch.extend(ids, ctx.kv.seq_pos_max(TEXT) + 1, (TEXT,), "all")
    ctx.decode(batch)
    return ctx.logits()


Do = Callable[[Referee, Passage], int]  # returns the next position


def full(libllama: Referee, passage: Passage) -> int:
    for begin in range(0, len(passage.ids), N_BATCH):
        libllama.decode(silent(passage.ids[begin : begin + N_BATCH], begin))
    return len(passage.ids)


def silent(ids: object, pos0: int, seq: int = 0) -> list[Token]:
    return [token._replace(logits=False) for token in run_of(ids, pos0, (seq,))]  # type: ignore[arg-type]


def edited(libllama: Referee, passage: Passage) -> int:
    """Positions 20 to 49 are other tokens, and go."""
    ids = [*passage.ids[:20], *passage.other[:30], *passage.ids[20:]]
    libllama.decode(silent(ids, 0))
    libllama.seq_rm(0, 20, 50)
    libllama.seq_add(0, 50, -1, -30)
    return len(passage.ids)


def linked(libllama: Referee, passage: Passage) -> int:
    """The last 60 tokens in three parts, each behind BOS in the beginning."""
    libllama.decode(silent(passage.ids[:40], 0))
    for p in (40, 60, 80):
        libllama.decode(silent([passage.bos, *passage.ids[p : p + 20]], 0, 1))
        libllama.seq_rm(1, 0, 1)
        libllama.seq_add(1, 1, -1, p - 1)
        libllama.seq_cp(1, 0, p, p + 20)
        libllama.seq_rm(1, 0, -1)
    return len(passage.ids)


def shifted(libllama: Referee, passage: Passage) -> int:
    """In 64 cells: the first 4 stay, the next 30 go."""
    n = 0
    for begin in range(0, len(passage.ids), N_BATCH):
        part = passage.ids[begin : begin + N_BATCH]
        if n + len(part) > 64:
            libllama.seq_rm(0, 4, 34)
            libllama.seq_add(0, 34, -1, -30)
            n -= 30
        libllama.decode(silent(part, n))
        n += len(part)
    return n


@pytest.mark.parametrize(
    ("case", "do"),
    [
        ("full", full),
        ("edit 20:50", edited),
        ("link 3x20", linked),
        ("shift keep=4 discard=30 cells=64", shifted),
    ],
)
def test_as_libllama(model: kvg.Model, stories: Path, passage: Passage, case: str, do: Do) -> None:
    """The next tokens' logits, and positions without a gap."""
    nexts = model.tokenizer.encode("little girl named Lily", False)
    with open_context(model, n_ctx=N_CTX, n_batch=N_BATCH, n_seq_max=3) as ctx:
        parse_case(case).way.read(ctx, passage)
        n = ctx.kv.seq_pos_max(TEXT) + 1
        assert positions(ctx) == list(range(n))
        assert ctx.kv.n_used == n
        assert ctx.kv.seq_pos_max(APART) == -1
        ours = behind(ctx, nexts)
    with Referee(stories, flash=False, n_ctx=N_CTX, n_seq_max=2) as libllama:
        assert do(libllama, passage) == n
        theirs = libllama.decode(run_of(nexts, n))
    assert nmse(ours, theirs) <= 1e-5


def test_self_extend(model: kvg.Model, passage: Passage) -> None:
    """Two of each position, but for the last batch."""
    with open_context(model, n_ctx=N_CTX, n_batch=N_BATCH, n_seq_max=3) as ctx:
        parse_case("self-extend 2").way.read(ctx, passage)
        assert positions(ctx) == [*sorted([*range(48)] * 2), *range(48, 52)]


def test_a_sentence_that_is_erased(model: kvg.Model, passage: Passage) -> None:
    """In place of what the case says; to the bit what the case cuts there itself."""
    nexts = list(passage.ids[:5])
    rows = []
    with open_context(model, n_ctx=N_CTX, n_batch=N_BATCH, n_seq_max=3) as ctx:
        for case, cut in (("edit 20:50", None), ("edit 1:3", (20, passage.other[:30]))):
            ctx.reset()
            parse_case(case).way.read(ctx, Passage(passage.ids, passage.bos, passage.other, cut))
            rows.append(behind(ctx, nexts))
    assert np.array_equal(rows[0], rows[1])


def test_parsed() -> None:
    case = parse_case("  ctk Q8_0  ctv q4_0   edit 3:7 ")
    assert (case.text, case.type_k, case.type_v, case.policy) == (
        "ctk Q8_0 ctv q4_0 edit 3:7",
        "q8_0",
        "q4_0",
        "ctk q8_0 ctv q4_0 edit",
    )
    assert parse_case("full") == FULL
    assert parse_case("ctk q8_0").policy == "ctk q8_0"
    assert parse_case("shift keep=1 discard=2").policy == parse_case("shift keep=9 discard=8 cells=17").policy
    assert parse_case("link 2x3 repair=0").way.n_extra() == 1
    assert parse_case("edit 20:50").way.n_extra() == parse_case("edit 20:50 repair=8").way.n_extra() == 30
    assert parse_case("ctk q8_0 forget window 0.5").policy == "ctk q8_0 forget window"
    composite = parse_case("forget keydiff cells=80 composite")
    assert (composite.policy, composite.way) == (
        "forget keydiff composite",
        ForgottenText("keydiff", None, 80, True),
    )
    asked = parse_case("ctk q8_0 asked")
    assert (asked.text, asked.policy, asked.way) == ("ctk q8_0 asked", "ctk q8_0 asked", FULL.way)
    assert (asked.asked, parse_case("full").asked) == (True, False)
    assert parse_case("edit 20:50 repair=70").way.n_extra() == parse_case("link 2x99 repair=70").way.n_extra()


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "  ",
            "ctk",
            "ctk q9_0",
            "ctk q8_0 ctk",
            "fulll",
            "full 1",
            "shift",
            "shift keep=1",
            "shift 1 2",
        ),
        *("shift keep=1 discard=0", "shift keep=-1 discard=2", "shift keep=3 discard=6 cells=8"),
        *("self-extend", "self-extend 0", "edit 5"),
        *("edit 5:5", "edit 7:3", "edit -1:3", "link 0x3", "link 3x0", "link 3", "edit 1:999999999999"),
        *("forget", "forget keydiff", "forget keydiff 1.5", "forget lru 0.5", "forget window cells=68"),
        *("forget window 0.5 composite", "forget keydiff 0.5 composites", "forget keydiff composite"),
        *("asked", "full asked 1"),
    ],
)
def test_what_is_no_case(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_case(text)


@pytest.mark.parametrize(("case", "n_behind"), [("edit 20:50", 80), ("link 3x20", 20)])
def test_repaired(model: kvg.Model, passage: Passage, case: str, n_behind: int) -> None:
    """With all tokens behind a seam it is the text itself; with half of them nearer to it than with none."""
    nexts = model.tokenizer.encode("little girl named Lily", False)
    rows = []
    for text in ("full", case, f"{case} repair={n_behind // 2}", f"{case} repair={n_behind}"):
        with open_context(model, n_ctx=N_CTX, n_batch=N_BATCH, n_seq_max=3) as ctx:
            parse_case(text).way.read(ctx, passage)
            assert positions(ctx) == list(range(100))
            rows.append(behind(ctx, nexts))
    full, shifted, half, whole = rows
    assert nmse(whole, full) <= 1e-6
    assert nmse(whole, full) < nmse(half, full) < nmse(shifted, full)


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("edit 0:5", InvalidArgumentError),  # before BOS
        ("edit 101:105", InvalidArgumentError),
        ("link 5x20", InvalidArgumentError),
        ("shift keep=40 discard=11", InvalidArgumentError),  # of 100 tokens half have cells
        ("self-extend 400", None),
        ("shift keep=63 discard=1 cells=64", None),
    ],
)
def test_texts_that_are_too_short(
    model: kvg.Model, passage: Passage, case: str, error: type[Exception] | None
) -> None:
    with open_context(model, n_ctx=N_CTX, n_batch=N_BATCH, n_seq_max=3) as ctx:
        way = parse_case(case).way
        if error is None:
            way.read(ctx, passage)
            return
        with pytest.raises(error):
            way.read(ctx, passage)


def measured(model: kvg.Model, cases: list[str], n_trials: int = 2, **options: object) -> list[CaseResult]:
    job = Quality(model, PAGE, [parse_case(each) for each in cases], n_threads=1, **options)  # type: ignore[arg-type]
    ticks: list[int] = []
    job.run(n_trials, lambda: ticks.append(0))
    assert len(ticks) == n_trials * job.steps_of_trial()
    return job.results()


def test_figures_beside_numpy(model: kvg.Model) -> None:
    """The same trials by hand: the figures are NumPy's of the logits."""
    case, length, n_trials = "edit 20:50", 120, 2
    full, found = measured(model, [case, "full"], n_trials, length=length, seed=5)
    rows: dict[str, list[Logits]] = {"full": [], case: []}
    nexts: list[int] = []
    job = Quality(model, PAGE, [parse_case(case)], length=length, seed=5)
    for i in range(n_trials):
        passage, ids = job._passage(Random(f"5 {i}"))
        nexts += ids[1:].tolist()
        for name in rows:
            with open_context(model, n_ctx=512, n_batch=512, n_seq_max=3) as ctx:
                parse_case(name).way.read(ctx, passage)
                rows[name].append(behind(ctx, ids[:-1].tolist()))
    true, ours = np.concatenate(rows["full"]), np.concatenate(rows[case])
    kl = divergences(true, ours)
    losses = {
        name: -log_probabilities(np.concatenate(each))[np.arange(len(nexts)), nexts]
        for name, each in rows.items()
    }
    assert (full.case, full.kl_mean, full.kl_99, full.same_top, full.n_cells) == ("full", 0, 0, 1, length)
    assert full.perplexity == pytest.approx(np.exp(losses["full"].mean()), rel=1e-3)
    assert found.perplexity == pytest.approx(np.exp(losses[case].mean()), rel=1e-3)
    assert found.kl_mean == pytest.approx(kl.mean(), rel=0.02) and kl.mean() > 1e-4
    assert found.kl_median == pytest.approx(np.median(kl), rel=0.02)
    assert found.kl_99 == pytest.approx(np.quantile(kl, 0.99), rel=0.02)
    assert found.same_top == pytest.approx((true.argmax(1) == ours.argmax(1)).mean(), abs=2 / len(kl))
    assert (found.n_cells, len(kl)) == (length, n_trials * N_NEXT)


def test_every_case_on_one_text(model: kvg.Model) -> None:
    """In one run: cells as they should be, and what is changed less is nearer."""
    cases = [
        "ctk bf16",
        "ctv bf16",
        "shift keep=4 discard=30 cells=64",
        "shift keep=4 discard=10",
        "self-extend 2",
    ]
    cases += ["edit 20:50", "link 3x20", "ctk bf16 link 3x20"]
    _, *others = measured(model, cases, length=120)
    by_case = {each.case: each for each in others}
    assert [each.case for each in others] == cases
    assert all(each.kl_mean > 0 and each.same_top < 1 for each in others if "ctv" not in each.case)
    assert 34 <= by_case["shift keep=4 discard=30 cells=64"].n_cells <= 64
    assert 50 <= by_case["shift keep=4 discard=10"].n_cells <= 60
    assert all(each.n_cells == 120 for each in others if "shift" not in each.case)
    _, aged = measured(model, ["ctk f32:f16@32 ctv f32:f16@32 forget window .25"], 1, length=120)
    assert aged.n_cells == 90
    assert by_case["ctk bf16"].kl_mean < 0.1 * by_case["link 3x20"].kl_mean


def test_a_text_is_decoded_once(model: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all cases of the same types that begin with it; the figures are as if each decoded it."""
    cases = ["forget snapkv .5", "forget keydiff .5 composite", "ctk bf16", "ctk bf16 forget tova .25"]
    options: dict[str, Any] = {"length": 420, "tasks": ["niah_single_1"]}
    decode, counts = kvg.Context.decode, [0]

    def counted(self: kvg.Context, batch: kvg.Batch, *arguments: Any, **others: Any) -> None:
        counts[0] += len(batch)
        decode(self, batch, *arguments, **others)

    def decode_whole(self: Passage, ctx: kvg.Context) -> None:
        append(ctx, TEXT, self.ids)
        lengths.append(len(self.ids))

    monkeypatch.setattr(kvg.Context, "decode", counted)
    once = measured(model, cases, 1, **options)
    n_once, counts[0] = counts[0], 0
    lengths: list[int] = []
    monkeypatch.setattr(Passage, "decode_whole", decode_whole)
    assert measured(model, cases, 1, **options) == once
    assert len(lengths) == 2 * 5 and lengths[0] == 420
    assert counts[0] - n_once == sum(lengths) * 3 // 5  # two types of K


def test_a_question_that_is_read_with_the_text(model: kvg.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but its last token, and each of a text's questions; the same is said where nothing is forgotten."""
    said: list[list[str]] = []
    prompts: list[tuple[int, int]] = []

    def told(ctx: kvg.Context, prompt: list[int], **options: Any) -> Iterator[Any]:
        prompts.append((ctx.kv.n_used, len(prompt)))
        said.append([])
        for piece in kvg.generate(ctx, prompt, **options):
            said[-1].append(piece.text)
            yield piece

    monkeypatch.setattr(quality, "generate", told)
    measured(model, ["full asked", "forget window .5 asked"], 1, length=200, tasks=["erase"])
    (n, n_asked), (_, n_other) = prompts[:2]
    assert said[:2] == said[2:4] and said[0] != said[1]
    assert prompts[2:4] == [(n + n_asked - 1, 1), (n + n_other - 1, 1)] and n_asked > 5
    assert prompts[4:] == [(cells - round(cells / 2), 1) for cells, _ in prompts[2:4]]


def test_a_seed_is_a_text(model: kvg.Model) -> None:
    """The same figures for the same seed, in one run or in two; others for another."""
    once = measured(model, ["edit 20:50"], 2, length=64, seed=3)
    job = Quality(model, PAGE, [parse_case("edit 20:50")], n_threads=1, length=64, seed=3)
    for _ in range(2):
        job.run(1)
    assert job.results() == once
    assert measured(model, ["edit 20:50"], 2, length=64, seed=4) != once


def test_an_interrupted_trial_does_not_count(model: kvg.Model) -> None:
    job = Quality(model, PAGE, [parse_case("edit 20:50")], n_threads=1, length=64)
    with pytest.raises(InvalidArgumentError, match="no trial was done"):
        job.results()
    job.run(1)
    known, ticks = job.results(), []

    def tick() -> None:
        ticks.append(0)
        if len(ticks) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(1, tick)
    assert job.results() == known


def test_a_text_that_is_too_short(model: kvg.Model) -> None:
    with pytest.raises(InvalidArgumentError, match=r"need 331: give a longer one"):
        Quality(model, "Once upon a time", [parse_case("edit 20:50")], length=100)
