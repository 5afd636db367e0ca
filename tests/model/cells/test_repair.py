"""decode(repair=True): tokens in the middle of a text see what is before them, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import where
from support.architectures import ArchSpec
from support.engines import Logits, Token, decode, open_context, random_ids, repair, run_of
from support.faults import fault, set_fault
from support.judge import EXACT, nmse
from support.kv_rows import contents, same_cells
from support.models import N_VOCAB, WINDOW

import pykvgraph as kvg
from pykvgraph._native.library import lib

IDS = random_ids(90, N_VOCAB)
CUT, N_TEXT = range(20, 30), 60
EDITED = IDS[: CUT.start] + IDS[CUT.stop : N_TEXT]
BEHIND = IDS[N_TEXT : N_TEXT + 12]
OPTIONS: dict[str, Any] = {
    "n_ctx": 256,
    "n_batch": 64,
    "n_ubatch": 16,
    "n_seq_max": 4,
    "type_k": "f32",
    "type_v": "f32",
    "defrag_threshold": -1,
    "swa_full": True,
}
SPECS = [
    ArchSpec("llama", n_layer=2),
    ArchSpec("gemma3", n_layer=4, window=24, period=4),
    ArchSpec("gpt-oss", n_layer=4, n_expert=4, window=24),
    ArchSpec("deepseek2", 2, n_head_kv=1, n_expert=4, n_ff_shared=96, rank=48, q_rank=40),
]


def cut(ctx: kvg.Context) -> None:
    """A text that lacks a part, which the tokens behind that have read."""
    decode(ctx, run_of(IDS[:N_TEXT]))
    ctx.kv.seq_rm(0, CUT.start, CUT.stop)
    ctx.kv.seq_add(0, CUT.stop, -1, -len(CUT))


def tokens(begin: int, end: int, seqs: tuple[int, ...] = (0,)) -> list[Token]:
    """Those of the edited text."""
    return run_of(EDITED[begin:end], begin, seqs)


def all_cells(ctx: kvg.Context) -> list[kvg.CellsView]:
    return [ctx.kv.cells(group) for group in range(len(ctx.kv.groups))]


def unchanged(ctx: kvg.Context, before: list[kvg.CellsView]) -> bool:
    return all(same_cells(ctx.kv.cells(group), view) for group, view in enumerate(before))


@pytest.fixture(scope="module", params=SPECS, ids=str)
def model(request: pytest.FixtureRequest, architecture: Callable[[ArchSpec], Path]) -> Any:
    with kvg.Model(architecture(request.param), device=where.device) as opened:
        yield opened


def by_hand(model: kvg.Model, n: int, **options: Any) -> tuple[Logits, Logits]:
    """Of the n tokens behind the cut, and of more behind the text, where nothing was repaired.

    Sequence 1 is the text before the cut, and goes on as any other. Then it gets what is left of sequence 0:
    copies at their new positions, which have read what they had read.
    """
    with open_context(model, **(OPTIONS | options)) as ctx:
        decode(ctx, run_of(IDS[:N_TEXT]))
        ctx.kv.seq_cp(0, 1, 0, CUT.start)
        rows = decode(ctx, tokens(CUT.start, CUT.start + n, (1,)))
        ctx.kv.seq_cp(0, 2, CUT.stop + n, N_TEXT)
        ctx.kv.seq_add(2, 0, -1, -len(CUT))
        ctx.kv.seq_cp(2, 1, 0, -1)
        return rows, decode(ctx, run_of(BEHIND, len(EDITED), (1,)))


@pytest.mark.parametrize("n", [1, 7])
def test_a_token_sees_the_cells_before_it(model: kvg.Model, n: int) -> None:
    """And what comes later sees it: beside a text that is put together of sequences."""
    expected = by_hand(model, n)
    with open_context(model, **OPTIONS) as ctx:
        cut(ctx)
        rows = repair(ctx, tokens(CUT.start, CUT.start + n))
        assert nmse(rows, expected[0]) <= EXACT
        assert nmse(decode(ctx, run_of(BEHIND, len(EDITED))), expected[1]) <= EXACT
        assert ctx.kv.n_used == len(EDITED) + len(BEHIND)


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "q8_0", "q4_0"])
def test_caches_of_other_types(holder: Callable[[tuple[str, str]], kvg.Model], kv_type: str) -> None:
    options = {"type_k": kv_type, "type_v": kv_type}
    model = holder((kv_type, kv_type))
    expected = by_hand(model, 5, **options)
    with open_context(model, **(OPTIONS | options)) as ctx:
        cut(ctx)
        rows = repair(ctx, tokens(CUT.start, CUT.start + 5))
        assert nmse(rows, expected[0]) <= 1e-6
        assert nmse(decode(ctx, run_of(BEHIND, len(EDITED))), expected[1]) <= 1e-6


def test_all_repaired_is_all_decoded(model: kvg.Model) -> None:
    with open_context(model, **OPTIONS) as ctx:
        decode(ctx, tokens(0, CUT.start))
        expected = decode(ctx, tokens(CUT.start, len(EDITED)))
        behind = decode(ctx, run_of(BEHIND, len(EDITED)))
        k = {layer: ctx.kv.read_k(layer)[: len(EDITED)] for group in ctx.kv.groups for layer in group.layers}
        ctx.reset()
        cut(ctx)
        assert nmse(repair(ctx, tokens(CUT.start, len(EDITED))), expected) <= EXACT
        assert nmse(decode(ctx, run_of(BEHIND, len(EDITED))), behind) <= EXACT
        for index, group in enumerate(ctx.kv.groups):
            pos = ctx.kv.cells(index).pos
            cells = [int(np.flatnonzero(pos == p).item()) for p in range(len(EDITED))]
            for layer in group.layers:
                assert nmse(ctx.kv.read_k(layer)[cells], k[layer]) <= EXACT


def test_in_one_batch_with_what_goes_on(small: kvg.Model) -> None:
    """Spans of two texts, and what comes behind them, as in three batches."""
    spans = [tokens(20, 24), tokens(33, 36), tokens(20, 22, (1,))]
    ends = [run_of(BEHIND, len(EDITED)), run_of(BEHIND[:3], len(EDITED), (1,))]
    with open_context(small, **OPTIONS) as ctx, open_context(small, **OPTIONS) as other:
        for each in (ctx, other):
            cut(each)
            each.kv.seq_cp(0, 1, 0, -1)
        one = repair(ctx, [*spans[0], *spans[1], *ends[0], *spans[2], *ends[1]])
        parts = [repair(other, span) for span in spans]
        parts += [decode(other, end) for end in ends]
        expected = np.concatenate([parts[0], parts[1], parts[3], parts[2], parts[4]])
        assert nmse(one, expected) <= EXACT


@pytest.mark.parametrize("held", [False, True])
def test_others_keep_what_they_see(small: kvg.Model, held: bool) -> None:
    """Sequences and holds; only replaced cells are copied."""
    with open_context(small, **OPTIONS) as ctx:
        decode(ctx, run_of(IDS[:40], 0, (0, 1)))
        hold = ctx.kv.hold(0, 0, 40) if held else None
        before, own = contents(ctx.kv, 0), contents(ctx.kv, 1)
        repair(ctx, run_of(BEHIND[:6], 10, (1,)))
        assert contents(ctx.kv, 0) == before
        assert ctx.kv.n_used == 46
        after = contents(ctx.kv, 1)
        assert {pos for _, pos, _ in own - after} == {pos for _, pos, _ in after - own} == {*range(10, 16)}
        if hold is not None:
            ctx.kv.seq_rm(-1, -1, -1)
            ctx.kv.attach(hold, 2)
            assert contents(ctx.kv, 2) == before


def test_a_token_of_several_texts(small: kvg.Model) -> None:
    """Where they see the same cells before it, though not behind it."""
    with open_context(small, **OPTIONS) as ctx:
        decode(ctx, run_of(IDS[:30], 0, (0, 1)))
        decode(ctx, run_of(IDS[30:40], 30, (1,)))
        expected = repair(ctx, run_of(BEHIND[:4], 10, (0, 1)))
        assert ctx.kv.n_used == 40
        ctx.reset()
        decode(ctx, run_of(IDS[:10]))
        assert nmse(decode(ctx, run_of(BEHIND[:4], 10)), expected) <= EXACT
        ctx.reset()
        decode(ctx, run_of(IDS[:5], 0, (0, 1)))
        for seq in (0, 1):
            decode(ctx, run_of(IDS[5:20], 5, (seq,)))
        with pytest.raises(kvg.InvalidArgumentError, match="different cells before it"):
            repair(ctx, run_of(BEHIND[:4], 10, (0, 1)))


def test_a_gap_is_filled(small: kvg.Model) -> None:
    with open_context(small, **OPTIONS) as ctx:
        decode(ctx, run_of(IDS[:40]))
        ctx.kv.seq_rm(0, 10, 14)
        repair(ctx, run_of(IDS[10:14], 10))
        filled = decode(ctx, run_of(BEHIND, 40))
        ctx.reset()
        decode(ctx, run_of(IDS[:40]))
        assert nmse(decode(ctx, run_of(BEHIND, 40)), filled) <= EXACT


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([Token(5, 12), Token(5, 11)], "must rise"),
        ([Token(5, 12), Token(5, 12)], "must rise"),
        ([Token(5, 40)], "several cells at position 40"),
        ([Token(N_VOCAB, 12)], "has id"),
        ([Token(5, 12, (9,))], "has sequence 9"),
    ],
)
def test_refused(small: kvg.Model, batch: list[Token], message: str) -> None:
    with open_context(small, **OPTIONS) as ctx:
        decode(ctx, run_of(IDS[:44]))
        ctx.kv.seq_div(0, 40, 42, 41)
        ctx.kv.seq_add(0, 1, 2, 39)
        ctx.kv.seq_add(0, 42, 43, -2)
        before = all_cells(ctx)
        with pytest.raises(kvg.InvalidArgumentError, match=message):
            repair(ctx, batch)
        assert unchanged(ctx, before)


def test_it_takes_empty_cells(small: kvg.Model) -> None:
    """The old ones are needed until the call is over."""
    with open_context(small, **(OPTIONS | {"n_ctx": 48})) as ctx:
        decode(ctx, run_of(IDS[:44]))
        held = contents(ctx.kv, 0)
        with pytest.raises(kvg.CacheFullError):
            repair(ctx, run_of(IDS[10:15], 10))
        assert contents(ctx.kv, 0) == held
        repair(ctx, run_of(IDS[10:14], 10))
        assert ctx.kv.n_used == 44


def test_windows_that_have_lost_nothing_of_it(mixed: kvg.Model) -> None:
    """Beside a context that loses nothing; where something is gone, nothing changes."""
    with (
        open_context(mixed, **(OPTIONS | {"swa_full": False, "n_batch": 12})) as ctx,
        open_context(mixed, **OPTIONS) as full,
    ):
        for begin in range(0, 48, 12):
            for each in (ctx, full):
                decode(each, run_of(IDS[begin : begin + 12], begin))
        lost = ctx.kv._lost(1, 0)
        first = lost + WINDOW + 2  # two cells that it does not see are there, for two tokens
        assert lost >= 0 and first < 47
        rows = repair(ctx, run_of(BEHIND[:2], first))
        assert nmse(rows, repair(full, run_of(BEHIND[:2], first))) <= EXACT
        assert nmse(decode(ctx, run_of(IDS[60:64], 48)), decode(full, run_of(IDS[60:64], 48))) <= EXACT
        before = all_cells(ctx)
        with pytest.raises(kvg.UnsupportedError, match="swa_full=True"):
            repair(ctx, run_of(BEHIND[:2], ctx.kv._lost(1, 0) + WINDOW - 1))
        assert unchanged(ctx, before)


def test_a_window_reuses_nothing_that_a_repair_sees(mixed: kvg.Model) -> None:
    """The cells that it would take for the batch are those that the batch's first token needs."""
    with open_context(mixed, **(OPTIONS | {"swa_full": False, "n_batch": 12, "n_seq_max": 1})) as ctx:
        for begin in range(0, 48, 12):
            decode(ctx, run_of(IDS[begin : begin + 12], begin))
        first = ctx.kv._lost(1, 0) + WINDOW
        before, lost = all_cells(ctx), ctx.kv._lost(1, 0)
        for n in range(12, 0, -1):
            try:
                repair(ctx, run_of(IDS[first : min(first + n, 48)], first))
                break
            except kvg.CacheFullError:
                assert unchanged(ctx, before)
        assert ctx.kv._lost(1, 0) == lost


def test_states_are_refused(recurrent: kvg.Model) -> None:
    with open_context(recurrent, **(OPTIONS | {"swa_full": False})) as ctx:
        decode(ctx, run_of(IDS[:40]))
        before = all_cells(ctx)
        with pytest.raises(kvg.UnsupportedError, match="checkpoint"):
            repair(ctx, run_of(IDS[10:12], 10))
        assert unchanged(ctx, before)
        rows = repair(ctx, run_of(IDS[40:50], 40))  # at the end it is a batch like any other
        ctx.reset()
        decode(ctx, run_of(IDS[:40]))
        assert nmse(decode(ctx, run_of(IDS[40:50], 40)), rows) <= EXACT


@pytest.mark.parametrize("site", ["cells", "replace", "build", "alloc", "compute"])
def test_a_fault_leaves_all_as_it_was(mixed: kvg.Model, site: str) -> None:
    set_fault(site, 0)
    options = OPTIONS | {"n_ubatch": 4}
    batch = [*tokens(20, 26), *tokens(40, 43), *run_of(BEHIND, len(EDITED))]
    with open_context(mixed, **options) as untroubled:
        prepare(untroubled)
        expected = repair(untroubled, batch)
    for countdown in range(1, 20):
        with open_context(mixed, **options) as ctx:
            prepare(ctx)
            before, held = all_cells(ctx), [contents(ctx.kv, seq) for seq in (0, 1)]
            try:
                with fault(site, countdown):
                    repair(ctx, batch)
            except kvg.DeviceError:
                assert unchanged(ctx, before)
                assert [contents(ctx.kv, seq) for seq in (0, 1)] == held
                assert nmse(repair(ctx, batch), expected) <= EXACT
                continue
        break
    assert countdown - 1 >= {"cells": 1, "replace": 2, "build": 1, "alloc": 1, "compute": 5}[site]


def prepare(ctx: kvg.Context) -> None:
    """Some cells are shared, and all K is where it will be."""
    cut(ctx)
    ctx.kv.seq_cp(0, 1, 5, 42)
    ctx.kv.update()


def test_cells_that_wait(holder: Callable[[tuple[str, str]], kvg.Model]) -> None:
    """Their K isn't rotated, attention rotates the queries: they wait again when nothing comes of it."""
    options = OPTIONS | {"type_k": "q8_0", "type_v": "q8_0", "n_batch": 200}
    text = random_ids(200, N_VOCAB, 5)
    with open_context(holder(("q8_0", "q8_0")), **options) as ctx:
        decode(ctx, run_of(text))
        ctx.kv.seq_rm(0, 10, 20)
        ctx.kv.seq_add(0, 20, -1, -10)
        ctx.kv.update()
        before, held = all_cells(ctx), contents(ctx.kv, 0)
        assert not where.is_cpu() or before[0].shift.any()
        set_fault("compute", 0)
        with fault("compute"), pytest.raises(kvg.DeviceError):
            repair(ctx, run_of(text[20:30], 10))
        assert unchanged(ctx, before)
        assert contents(ctx.kv, 0) == held
        repaired = repair(ctx, run_of(text[20:30], 10))
        ctx.reset()
        decode(ctx, run_of(text[:10]))
        assert nmse(decode(ctx, run_of(text[20:30], 10)), repaired) <= 1e-6


def test_undone(mixed: kvg.Model) -> None:
    """What a Ctrl-C does that comes when the call is over."""
    with open_context(mixed, **OPTIONS) as ctx:
        prepare(ctx)
        ctx.kv.checkpoint(0)
        before, held = all_cells(ctx), [contents(ctx.kv, seq) for seq in (0, 1)]
        for _ in range(2):
            repair(ctx, [*tokens(20, 26), *run_of(BEHIND, len(EDITED))])
            assert not unchanged(ctx, before)
            for _ in range(2):
                ctx._handle.call(lib().kvg_undo_decode)
                assert unchanged(ctx, before)
                assert [contents(ctx.kv, seq) for seq in (0, 1)] == held


def test_a_pending_token_stays(stories: Path) -> None:
    """It comes behind the text, which ends where it did; not where something is appended."""
    with kvg.Model(stories, device="cpu") as model, open_context(model, n_ctx=256) as ctx:
        ids = model.tokenizer.encode("Once upon a time")
        piece = list(kvg.generate(ctx, ids, max_tokens=5))[-1]
        repair(ctx, run_of(ids))
        assert ctx.kv.pending_token(0) == piece.token
        repair(ctx, [*run_of(ids[1:2], 1), Token(piece.token, ctx.kv.seq_pos_max(0) + 1)])
        assert ctx.kv.pending_token(0) is None


def test_checkpoints_that_would_bring_back_old_cells_go(mixed: kvg.Model) -> None:
    """Others stay: what they keep is what the text has."""
    options = OPTIONS | {"swa_full": False, "checkpoint_cells": 6 * WINDOW}
    with open_context(mixed, **options) as ctx:
        for begin in (0, 20):
            decode(ctx, run_of(IDS[begin : begin + 20], begin))
            ctx.kv.checkpoint(0)
        decode(ctx, run_of(IDS[40:44], 40))
        assert ctx.kv.checkpoints(0) == [20, 40]
        repair(ctx, run_of(BEHIND[:2], 36))
        assert ctx.kv.checkpoints(0) == [20]
