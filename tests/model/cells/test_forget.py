"""Cells that are forgotten: which ones, what is left, and what nobody may take for the whole text."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import naive_scores
from support.architectures import ArchSpec
from support.engines import decode, ids_of, open_context, random_ids, run_of
from support.faults import fault
from support.judge import nmse
from support.models import N_VOCAB, SMALL, TWO_GROUPS, ModelSpec
from support.naive_llama import Floats, naive_logits
from support.naive_scores import cells_of, keydiff, lowest
from support.referee import Referee

import pykvgraph as kvg
from pykvgraph.context.cell_scores import POLICIES, TextCells
from pykvgraph.context.forgetting import N_RECENT, N_SINKS, chosen, close_gaps
from pykvgraph.context.repetition import ASKED, repeated
from pykvgraph.sequence.sequence import TokenSequence, earlier_texts

N = 160
IDS, OTHER = random_ids(N, N_VOCAB), random_ids(N, N_VOCAB, 1)
NEXTS = random_ids(8, N_VOCAB, 2)
OPTIONS: dict[str, Any] = {"n_ctx": 400, "n_batch": 80, "n_ubatch": 32, "type_k": "f32", "type_v": "f32"}
SAME = 1e-6
WINDOW = 24
WINDOWS = ArchSpec("gemma3", n_layer=6, window=WINDOW, period=3)


@pytest.fixture
def ctx(small: kvg.Model) -> Iterator[kvg.Context]:
    with open_context(small, n_seq_max=2, **OPTIONS) as ctx:
        yield ctx


def text_of(ctx: kvg.Context, ids: list[int] = IDS) -> kvg.Sequence:
    text = kvg.Sequence(ctx)
    text.set(ids)
    return text


def positions(ctx: kvg.Context, group: int = 0, seq: int = 0) -> list[int]:
    return [pos for pos, _ in cells_of(ctx, group, seq)]


def fresh(model: kvg.Model, ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The last token's logits in a context that reads nothing else."""
    with open_context(model, n_seq_max=2, **OPTIONS) as ctx:
        return kvg.Sequence(ctx).set(ids).last.logits


@pytest.mark.parametrize(
    "spec",
    [SMALL, TWO_GROUPS, ArchSpec("qwen3", n_layer=3), WINDOWS],
    ids=["llama", "groups", "qwen3", "windows"],
)
def test_keydiff_by_its_definition(
    model_file: Callable[[ModelSpec], Path],
    architecture: Callable[[ArchSpec], Path],
    spec: ModelSpec | ArchSpec,
) -> None:
    """Scores of each head of each layer that sees everything; the lowest go."""
    path = model_file(spec) if isinstance(spec, ModelSpec) else architecture(spec)
    with kvg.Model(path, device="cpu") as model, open_context(model, **OPTIONS) as ctx:
        text = text_of(ctx)
        group = next(index for index, group in enumerate(ctx.kv.groups) if group.kind == "full")
        expected = keydiff(ctx)
        assert POLICIES["keydiff"].score(TextCells(ctx, 0)) == pytest.approx(expected, abs=1e-5)
        report = text.forget(40, "keydiff")
        assert report.positions == tuple(lowest(expected, 40))
        assert (report.seq, report.n_cells, report.n_left) == (0, 40, N - 40)
        assert positions(ctx, group) == sorted(set(range(N)) - set(report.positions))


@functools.cache
def attended() -> list[Floats]:
    """What each token of IDS attends to, layer by layer."""
    layers: list[Floats] = []
    naive_logits(SMALL, IDS, layers)
    return layers


@pytest.mark.parametrize("n_free", [0, 200])
@pytest.mark.parametrize("policy", ["snapkv", "tova"])
def test_attention_by_its_definition(small: kvg.Model, policy: str, n_free: int) -> None:
    """The last tokens are decoded once more in their own cells, though none is empty; the text goes on."""
    layers = attended()
    expected = naive_scores.snapkv(layers) if policy == "snapkv" else naive_scores.attention(layers, 1)
    expected = np.concatenate([expected, np.full(N - len(expected), np.inf)])
    with open_context(small, **{**OPTIONS, "n_ctx": N + n_free}) as ctx:
        text = text_of(ctx)
        ctx.kv.set_pending_token(0, 9)
        report = text.forget(40, policy)
        assert report.positions == tuple(lowest(expected, 40))
        assert positions(ctx) == sorted(set(range(N)) - set(report.positions))
        assert (text.ids.tolist(), ctx.kv.pending_token(0)) == (IDS, 9)
        assert text.set([*IDS, 7]).n_decoded == 1


@pytest.mark.parametrize("n_free", [120, 300])
def test_kvzip_by_its_definition(small: kvg.Model, n_free: int) -> None:
    """The text is repeated in as many parts as the empty cells want, which are empty again afterwards."""
    asked = asked_ids_of(small)
    n_part = min(n_free - len(asked) - 8, 512)
    parts: list[list[Floats]] = [[] for _ in range(0, N, n_part)]
    for p, layers in zip(range(0, N, n_part), parts, strict=True):
        naive_logits(SMALL, [*IDS, *asked, *IDS[max(p - 8, 0) : p], *IDS[p : p + n_part]], layers)
    expected = naive_scores.kvzip(parts, N, SMALL.n_head_kv)
    with open_context(small, **{**OPTIONS, "n_ctx": N + n_free}) as ctx:
        text = text_of(ctx)
        ctx.kv.set_pending_token(0, 9)
        scored = TextCells(ctx, 0)
        scored.repeated = repeated(ctx, 0, IDS)
        assert POLICIES["kvzip"].score(scored) == pytest.approx(expected, abs=1e-5)
        report = text.forget(40, "kvzip")
        assert report.positions == tuple(lowest(expected, 40))
        assert positions(ctx) == sorted(set(range(N)) - set(report.positions))
        assert (text.ids.tolist(), ctx.kv.pending_token(0)) == (IDS, 9)
        assert text.set([*IDS, 7]).n_decoded == 1


def asked_ids_of(model: kvg.Model) -> list[int]:
    return model.tokenizer.encode(ASKED, add_special=False) if model.has_tokenizer else []


def test_repetitions_that_fail(ctx: kvg.Context, delta_net: kvg.Model) -> None:
    """The text is as it was."""
    text = text_of(ctx)
    with fault("compute", 3), pytest.raises(kvg.DeviceError):
        text.forget(10, "kvzip")
    assert (text.ids.tolist(), positions(ctx)) == (IDS, list(range(N)))
    text.set([*IDS, *OTHER])
    ctx.kv.seq_cp(0, 1, -1, -1)
    with pytest.raises(kvg.CacheFullError, match="may be"):
        text.forget(1, "kvzip")
    ctx.kv.seq_rm(1, -1, -1)
    text.set([*IDS, *OTHER, *IDS[:60]])
    with pytest.raises(kvg.CacheFullError, match="to repeat a text"):
        text.forget(10, "kvzip")
    assert text.set([*IDS, *OTHER, *IDS[:60], 7]).n_decoded == 1
    with open_context(delta_net, **OPTIONS) as other:
        text = text_of(other, ids_of(delta_net, N, 1))
        with pytest.raises(kvg.UnsupportedError, match="recurrent layers"):
            text.forget(10, "kvzip")
        assert len(text) == N
    with pytest.raises(kvg.InvalidArgumentError, match="too full"):
        kvg.Forget(100, "kvzip")


def test_second_readings_that_fail(ctx: kvg.Context, delta_net: kvg.Model) -> None:
    """The text goes to where it can go on, and says so; nothing is changed where it is known before."""
    text = text_of(ctx)
    with fault("compute"), pytest.raises(kvg.DeviceError):
        text.forget(10, "snapkv")
    assert text.ids.tolist() == IDS[: N - N_RECENT]
    assert text.set(IDS).n_decoded == N_RECENT
    ctx.kv.seq_cp(0, 1, -1, -1)
    ctx.kv.seq_rm(0, N - 10, -1)
    text = kvg.Sequence(ctx)
    text.record(IDS[:-10])
    with pytest.raises(kvg.CacheFullError):  # all cells are another's, too
        text.forget(10, "snapkv")
    with open_context(delta_net, **OPTIONS) as other:
        text = text_of(other, ids_of(delta_net, N, 1))
        with pytest.raises(kvg.UnsupportedError, match="recurrent layers"):
            text.forget(10, "snapkv")
        assert len(text) == N
        assert text.forget(10, "keydiff").n_cells == 10


@pytest.mark.parametrize("policy", [name for name, each in POLICIES.items() if each.reads])
def test_attention_that_nobody_knows(small: kvg.Model, policy: str) -> None:
    with open_context(small, **{**OPTIONS, "flash_attn": "on"}) as ctx:
        text = text_of(ctx)
        with pytest.raises(kvg.UnsupportedError, match=r"the CPU computes attention.*another policy"):
            text.forget(10, policy)
        assert positions(ctx) == list(range(N))
        assert text.forget(10, "keydiff").n_cells == 10


@pytest.mark.parametrize("policy", [name for name, each in POLICIES.items() if each.reads])
def test_cells_of_a_model_that_tells_distances(architecture: Callable[[ArchSpec], Path], policy: str) -> None:
    """ALiBi: what its tokens attend to is known."""
    with (
        kvg.Model(architecture(ArchSpec("bloom")), device="cpu") as model,
        open_context(model, **OPTIONS) as ctx,
    ):
        assert text_of(ctx, ids_of(model, N, 1)).forget(10, policy).n_cells == 10


def test_what_no_text_can_do_is_said_at_once(small: kvg.Model, delta_net: kvg.Model) -> None:
    """Not when the first text is full, in the middle of what it says."""
    texts_that_go_on: list[Callable[[kvg.Context, kvg.Forget], object]] = [
        lambda ctx, forget: kvg.generate(ctx, [7], on_full=forget),
        lambda ctx, forget: kvg.LongReader(ctx, on_full=forget),
    ]
    cases: list[tuple[kvg.Model, kvg.Forget, dict[str, Any], str]] = [
        (small, kvg.Forget(None, "snapkv"), {"flash_attn": "on"}, "the CPU computes attention"),
        (delta_net, kvg.Forget(None, "tova"), {}, "recurrent layers"),
        (small, kvg.Forget(composite=True), {"type_k": "f32:f16@64", "type_v": "f32:f16@64"}, "one type"),
    ]
    for model, forget, options, said in cases:
        with open_context(model, **{**OPTIONS, **options}) as ctx:
            for begin in texts_that_go_on:
                with pytest.raises(kvg.UnsupportedError, match=said):
                    begin(ctx, forget)


def test_window_takes_the_oldest(ctx: kvg.Context) -> None:
    text = text_of(ctx)
    assert text.forget(30, "window").positions == tuple(range(N_SINKS, N_SINKS + 30))
    assert text.forget(5, "window").positions == tuple(range(N_SINKS + 30, N_SINKS + 35))


@pytest.mark.parametrize("closed", [False, True])
def test_as_libllama(small: kvg.Model, model_file: Callable[[ModelSpec], Path], closed: bool) -> None:
    """The next tokens' logits, behind the cells that are left; libllama is told which, one by one."""
    with open_context(small, **OPTIONS) as ctx:
        gone = text_of(ctx).forget(60, "keydiff").positions
        if closed:
            close_gaps(ctx, 0)
            assert positions(ctx) == list(range(N - 60))
        ours = decode(ctx, run_of(NEXTS, ctx.kv.seq_pos_max(0) + 1))
    with Referee(model_file(SMALL), flash=False, kv_type="f32") as libllama:
        libllama.decode(run_of(IDS))
        for p in reversed(gone):
            libllama.seq_rm(0, p, p + 1)
            if closed:
                libllama.seq_add(0, p + 1, -1, -1)
        theirs = libllama.decode(run_of(NEXTS, N - 60 if closed else N))
    assert nmse(ours, theirs) <= 1e-6


def test_the_text_stays_and_can_be_made_whole(ctx: kvg.Context, small: kvg.Model) -> None:
    text = text_of(ctx)
    gone = text.forget(50).positions
    assert text.ids.tolist() == IDS
    assert text.approximate_from == gone[0]
    change = text.set([*IDS, *NEXTS])
    assert (change.n_kept, change.n_decoded) == (N, len(NEXTS))
    assert nmse(change.last.logits, fresh(small, [*IDS, *NEXTS])) > 1e-4
    text.repair([(gone[0], len(text))])
    assert text.approximate_from is None
    assert positions(ctx) == list(range(N + len(NEXTS)))
    assert nmse(text.append(7).logits, fresh(small, [*IDS, *NEXTS, 7])) < SAME


def test_back_to_where_all_is_forgotten(ctx: kvg.Context, small: kvg.Model) -> None:
    """A text can't end at a hole: what is left of it is exact again."""
    text = text_of(ctx)
    text.forget(60, "window")
    assert text.go_back(N_SINKS + 30) == N_SINKS
    assert text.approximate_from is None
    whole = [*IDS[:N_SINKS], *OTHER]
    assert nmse(text.set(whole).last.logits, fresh(small, whole)) < SAME


@pytest.mark.parametrize("inside", [False, True])
def test_a_removal_beside_what_is_forgotten(ctx: kvg.Context, inside: bool) -> None:
    """Tokens that are cut out may be forgotten already, all or some."""
    text = text_of(ctx)
    text.forget(40, "window")
    begin, end = (N_SINKS + 10, N_SINKS + 20) if inside else (N_SINKS + 30, N_SINKS + 50)
    text.remove(begin, end, repair=0)
    ids = [*IDS[:begin], *IDS[end:]]
    assert text.ids.tolist() == ids
    assert positions(ctx) == [*range(N_SINKS), *range(N_SINKS + 30, len(ids))]
    assert text.set([*ids, 7]).n_decoded == 1


def test_an_index_of_prefixes_never_gets_it(small: kvg.Model) -> None:
    """Back to the text that had forgotten: its cells aren't taken for those of the whole."""
    with open_context(small, **OPTIONS) as ctx:
        text = TokenSequence(ctx, earlier=earlier_texts(ctx))
        text.set(IDS)
        first = text.forget(40, "keydiff").positions[0]
        text.set(OTHER)
        change = text.set([*IDS, 7])
        assert change.n_kept <= first
        assert nmse(change.last.logits, fresh(small, [*IDS, 7])) < SAME


def test_cells_that_others_have_stay(ctx: kvg.Context) -> None:
    """Another sequence has the first 60 tokens, a hold 10 more: neither is any use to forget."""
    text = text_of(ctx)
    ctx.kv.seq_cp(0, 1, 0, 60)
    hold = ctx.kv.hold(0, 70, 80)
    before = ctx.kv.n_free
    report = text.forget(20, "window")
    assert report.positions == (*range(60, 70), *range(80, 90))
    assert ctx.kv.n_free == before + 20
    assert positions(ctx, seq=1) == list(range(60))
    with pytest.raises(kvg.CacheFullError, match=f"7 cells .* {N - N_RECENT - 90} may be"):
        text.forget(7)
    assert len(positions(ctx)) == N - 20
    hold.release()
    assert text.forget(7, "window").positions == tuple(range(70, 77))


def test_windows_forget_by_themselves(architecture: Callable[[ArchSpec], Path]) -> None:
    """What a window sees isn't forgotten anywhere, and the next token is what libllama says."""
    path = architecture(WINDOWS)
    with kvg.Model(path, device="cpu") as model, open_context(model, **OPTIONS) as ctx:
        text = text_of(ctx)
        gone = text.forget(70, "keydiff").positions
        assert gone[-1] < N - max(WINDOW, N_RECENT)
        ours = decode(ctx, run_of(NEXTS, N))
    with Referee(path, flash=False, kv_type="f32", swa_full=True) as libllama:
        libllama.decode(run_of(IDS))
        for p in gone:
            libllama.seq_rm(0, p, p + 1)
        theirs = libllama.decode(run_of(NEXTS, N))
    assert nmse(ours, theirs) <= 1e-5


def test_states_alone_have_nothing_to_forget(architecture: Callable[[ArchSpec], Path]) -> None:
    spec = ArchSpec("gemma3", n_layer=2, window=WINDOW, period=4)  # no layer sees everything
    with kvg.Model(architecture(spec), device="cpu") as model, open_context(model, **OPTIONS) as ctx:
        text = text_of(ctx)
        with pytest.raises(kvg.UnsupportedError, match="forget by themselves"):
            text.forget(1)


@pytest.mark.parametrize("n_grp", [1, 2])
def test_tokens_that_share_a_position_go_together(ctx: kvg.Context, n_grp: int) -> None:
    text = text_of(ctx)
    text.group(10, 40, n_grp)
    report = text.forget(9, "window")
    assert report.n_cells == (9 if n_grp == 1 else 10)  # 6 alone, then pairs
    assert len(positions(ctx)) == N - report.n_cells


@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if not policy.repeats])
def test_generate_within_a_budget(ctx: kvg.Context, small: kvg.Model, policy: str) -> None:
    """Never more cells than that; the beginning and the end are there; positions stay."""
    reports: list[kvg.ForgetReport] = []
    most = [0]

    def told(report: kvg.ForgetReport) -> None:
        reports.append(report)
        assert 0 < report.n_left < 100

    forget = kvg.Forget(100, policy, on_forget=told)
    for _ in kvg.generate(ctx, IDS, max_tokens=60, on_full=forget):
        most[0] = max(most[0], ctx.kv.n_used)
    assert most[0] == 100
    left, n = positions(ctx), ctx.kv.seq_pos_max(0) + 1
    assert n > N + 20
    assert left[:N_SINKS] == list(range(N_SINKS))
    assert left[-N_RECENT:] == list(range(n - N_RECENT, n))
    assert sum(report.n_cells for report in reports) == n - len(left)
    assert small.n_ctx_train > n


def test_positions_that_training_has_not_seen(model_file: Callable[[ModelSpec], Path]) -> None:
    """Gaps are closed before a position would be beyond; the text goes on."""
    with kvg.Model(model_file(SMALL), device="cpu", kv_overrides={"llama.context_length": 140}) as model:
        assert model.n_ctx_train == 140
        with open_context(model, **OPTIONS) as ctx:
            ends = []
            for _ in kvg.generate(ctx, IDS[:90], max_tokens=150, on_full=kvg.Forget(100)):
                ends.append(ctx.kv.seq_pos_max(0))
            assert max(ends) < 140
            assert len(ends) == 150
            assert ctx.kv.n_used <= 100


def test_texts_side_by_side(ctx: kvg.Context) -> None:
    """Each within its own budget."""
    said = list(kvg.generate(ctx, [IDS, OTHER], max_tokens=30, on_full=kvg.Forget(100, "window")))
    assert len(said) == 60
    for seq in (0, 1):
        assert len(positions(ctx, seq=seq)) <= 100
        assert positions(ctx, seq=seq)[-1] == N + 28


def test_whichever_has_most_cells_makes_room(ctx: kvg.Context) -> None:
    """The cache is full of both: one that has forgotten has the later position, and fewer cells."""
    told: list[kvg.ForgetReport] = []
    on_full = kvg.Forget(on_forget=told.append)
    said = list(kvg.generate(ctx, [IDS, IDS[:100]], max_tokens=250, on_full=on_full))
    assert sum(piece.finish_reason is not None for piece in said) == 2
    assert {report.seq for report in told} == {0, 1}
    assert ctx.kv.n_used <= ctx.kv.n_cells < ctx.kv.seq_pos_max(0) + ctx.kv.seq_pos_max(1)


def test_drafts_within_a_budget(ctx: kvg.Context, small: kvg.Model) -> None:
    """All that is proposed holds, and there are many more cells than the budget's."""
    most = 0
    with open_context(small, **OPTIONS) as draft:
        for _ in kvg.generate(ctx, IDS[:90], max_tokens=100, on_full=kvg.Forget(100), draft=draft):
            most = max(most, ctx.kv.n_used)
    assert most == 100


@pytest.mark.parametrize("policy", ["snapkv", "kvzip"])
def test_a_text_that_lost_its_end(ctx: kvg.Context, policy: str) -> None:
    """Its last tokens aren't decoded in places that aren't theirs."""
    text = text_of(ctx)
    ctx.kv.seq_rm(0, N - 30, -1)
    before = [ctx.kv.read_k(layer) for layer in range(2)]
    with pytest.raises(kvg.InvalidArgumentError, match="has lost cells of this text"):
        text.forget(10, policy)
    assert all(np.array_equal(ctx.kv.read_k(layer), k) for layer, k in enumerate(before))
    assert text.set(IDS).n_decoded == N
    assert text.forget(10, policy).n_left == N - 10


def test_a_long_reader_that_forgets(small: kvg.Model) -> None:
    with open_context(small, **{**OPTIONS, "n_ctx": 120, "n_batch": 16}) as ctx:
        reader = kvg.LongReader(ctx, on_full=kvg.Forget(100, "window"))
        reader.read([*IDS, *OTHER])
        left = positions(ctx)
        assert left == [*range(N_SINKS), *range(2 * N - len(left) + N_SINKS, 2 * N)]
        assert 100 - 32 < len(left) <= 100
        for wrong, said in ((kvg.Forget(80), "can't hold"), ("keydiff", "on_full must be")):
            with pytest.raises(kvg.InvalidArgumentError, match=said):
                kvg.LongReader(ctx, on_full=wrong)  # type: ignore[arg-type]
        with pytest.raises(kvg.InvalidArgumentError, match="n_grp"):
            kvg.LongReader(ctx, on_full=kvg.Forget(100), n_grp=2)


def test_too_small_a_budget_leaves_all(ctx: kvg.Context) -> None:
    text_of(ctx)
    ctx.kv.seq_cp(0, 1, -1, -1)
    with pytest.raises(kvg.CacheFullError, match="may be"):
        next(kvg.generate(ctx, [7], on_full=kvg.Forget(100)))
    assert positions(ctx) == list(range(N))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("68",), "budget must be"),
        ((68,), "budget must be"),
        ((100, "oldest"), "policy must be one of window, keydiff, snapkv, tova"),
        ((100, "window", 3), "on_forget must be a function"),
    ],
)
def test_what_is_no_policy(arguments: tuple[Any, ...], said: str) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match=said):
        kvg.Forget(*arguments)


@pytest.mark.parametrize(("n", "policy"), [(0, "window"), (1, "lru"), (1, None), (1.5, "window")])
def test_what_is_no_forgetting(ctx: kvg.Context, n: Any, policy: Any) -> None:
    text = text_of(ctx)
    with pytest.raises(kvg.InvalidArgumentError):
        text.forget(n, policy)
    assert chosen(ctx, 0, lambda _: 1, "window").tolist() == [N_SINKS]
    assert positions(ctx) == list(range(N))


@pytest.mark.parametrize(
    ("policy", "composite"), [("keydiff", False), ("tova", False), ("tova", True), ("kvzip", False)]
)
def test_another_thread_decodes_meanwhile(small: kvg.Model, policy: str, composite: bool) -> None:
    """What is observed is of this text, and cells are where they were."""
    with open_context(small, n_seq_max=2, **{**OPTIONS, "n_ctx": 700}) as ctx:
        expected = text_of(ctx).forget(40, policy, composite).positions
        done, errors = threading.Event(), []

        def append() -> None:
            other = kvg.Sequence(ctx, 1)
            try:
                while not done.is_set():
                    other.set(IDS[:20])
                    for token in IDS[20:60]:
                        other.append(token)
            except kvg.KVGraphError as error:
                errors.append(error)

        thread = threading.Thread(target=append)
        thread.start()
        try:
            for _ in range(2 if policy == "kvzip" else 12):
                ctx.kv.seq_rm(0, -1, -1)
                assert text_of(ctx).forget(40, policy, composite).positions == expected
        finally:
            done.set()
            thread.join()
        assert not errors
