"""Composite cells: whose rows they have, what attention sees of them, and that they stay or go as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.architectures import ArchSpec
from support.engines import Logits, decode, ids_of, open_context, random_ids, run_of
from support.faults import fault
from support.judge import nmse
from support.kv_types import EVEN_BLOCKS
from support.models import N_VOCAB, SMALL, TWO_GROUPS, ModelSpec
from support.naive_llama import Floats, Rows, naive_logits
from support.naive_scores import attention, cells_of, keydiff_of_head, keys_of, kvzip, snapkv
from support.streams import connect, travel

import pykvgraph as kvg
from pykvgraph import stream
from pykvgraph.context.forgetting import N_RECENT, N_SINKS, close_gaps
from pykvgraph.context.repetition import asked_ids, n_of_part
from pykvgraph.kv_cache.composite import Composition, compose

N, N_GONE = 140, 30
MAY_GO = range(N_SINKS, N - N_RECENT)
N_KEPT = len(MAY_GO) - N_GONE
LAST = MAY_GO[-1]
IDS, NEXTS = random_ids(N, N_VOCAB), random_ids(8, N_VOCAB, 2)
OPTIONS: dict[str, Any] = {"n_ctx": 300, "n_batch": 80, "n_ubatch": 32, "type_k": "f32", "type_v": "f32"}
SAME = 1e-6


@pytest.fixture
def ctx(small: kvg.Model) -> Iterator[kvg.Context]:
    with open_context(small, n_seq_max=3, **OPTIONS) as ctx:
        yield ctx


def text_of(ctx: kvg.Context, ids: list[int] = IDS) -> kvg.Sequence:
    text = kvg.Sequence(ctx)
    text.set(ids)
    return text


def forgotten(ctx: kvg.Context) -> kvg.Sequence:
    text = text_of(ctx)
    text.forget(N_GONE, composite=True)
    return text


def positions(ctx: kvg.Context, group: int = 0, seq: int = 0) -> list[int]:
    return [pos for pos, _ in cells_of(ctx, group, seq)]


def best(scores: list[float], n: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda i: scores[i])[-n:])


def head_bytes(ctx: kvg.Context, group: int, cells: list[int]) -> list[npt.NDArray[np.uint8]]:
    """K and V of each layer of a group, as they are stored: (n_cells, n_head_kv, bytes of a head)."""
    info = ctx.kv._group(group)
    raw, found = ctx.kv.read_rows(cells, group=group).data, []
    for size in [info.k_row_bytes, info.v_row_bytes] * info.n_layer:
        rows, raw = np.split(raw, [len(cells) * size])
        found.append(rows.reshape(len(cells), info.n_head_kv, -1))
    return found


@pytest.mark.parametrize("types", [("f32", "f32"), ("f16", "q8_0"), ("q4_0", "bf16"), ("q5_1", "q4_1")])
@pytest.mark.parametrize("spec", [EVEN_BLOCKS, TWO_GROUPS], ids=["blocks", "groups"])
def test_each_head_keeps_its_best_rows(
    model_file: Callable[[ModelSpec], Path], spec: ModelSpec, types: tuple[str, str]
) -> None:
    """Byte by byte; what may not be forgotten stays as it was."""
    if spec is TWO_GROUPS and types[0] != "f32":
        pytest.skip("its heads are narrower than blocks")
    options = {**OPTIONS, "type_k": types[0], "type_v": types[1]}
    with kvg.Model(model_file(spec), device="cpu") as model, open_context(model, **options) as ctx:
        text = text_of(ctx)
        scores = {
            layer: [
                keydiff_of_head(keys_of(ctx, layer, g)[:, head])[MAY_GO.start : MAY_GO.stop]
                for head in range(spec.heads_of(layer))
            ]
            for g, group in enumerate(ctx.kv.groups)
            for layer in group.layers
        }
        groups = range(len(ctx.kv.groups))
        before = [head_bytes(ctx, g, [cell for _, cell in cells_of(ctx, g)]) for g in groups]
        report = text.forget(N_GONE, composite=True)
        assert (report.n_cells, report.n_left) == (N_GONE, N - N_GONE)
        assert report.positions == tuple(MAY_GO[:-1])
        kept = [*range(N_SINKS), *[LAST] * N_KEPT, *range(MAY_GO.stop, N)]
        for g in groups:
            assert positions(ctx, g) == kept
            after = head_bytes(ctx, g, [cell for _, cell in cells_of(ctx, g)])
            for i, (was, now) in enumerate(zip(before[g], after, strict=True)):
                for head, of_head in enumerate(scores[ctx.kv.groups[g].layers[i // 2]]):
                    rows = [N_SINKS + row for row in best(of_head, N_KEPT)]
                    expected = was[[*range(N_SINKS), *rows, *range(MAY_GO.stop, N)], head]
                    assert np.array_equal(now[:, head], expected)


@pytest.fixture(scope="module")
def naive() -> list[Rows]:
    """What is left of each layer by the definitions: sinks, the best of each head, and the last tokens."""
    rows: list[Rows] = []
    naive_logits(SMALL, IDS, rows=rows)
    left = []
    for k, v in rows:
        chosen = [
            [
                *range(N_SINKS),
                *(N_SINKS + i for i in best(keydiff_of_head(k[:, h])[MAY_GO.start : MAY_GO.stop], N_KEPT)),
                *range(MAY_GO.stop, N),
            ]
            for h in range(k.shape[1])
        ]
        heads = [(k[chosen[h], h], v[chosen[h], h]) for h in range(k.shape[1])]
        left.append((np.stack([h[0] for h in heads], axis=1), np.stack([h[1] for h in heads], axis=1)))
    return left


def next_logits(past: list[Rows]) -> Logits:
    """Of NEXTS, which follow on the whole text and see this of it."""
    return naive_logits(SMALL, NEXTS, past=past, pos0=N).astype(np.float32)


def test_the_next_tokens_by_the_definitions(ctx: kvg.Context, naive: list[Rows]) -> None:
    forgotten(ctx)
    expected = next_logits(naive)
    assert nmse(decode(ctx, run_of(NEXTS, N)), expected) < SAME


@pytest.mark.parametrize("policy", ["snapkv", "tova"])
def test_what_each_head_attends_to(ctx: kvg.Context, policy: str) -> None:
    """By the definitions, too: query heads that read one head of K and V have one choice."""
    attended: list[Floats] = []
    rows: list[Rows] = []
    naive_logits(SMALL, IDS, attended, rows=rows)
    n_observed, group = (64, 2) if policy == "snapkv" else (1, 2)
    text_of(ctx).forget(N_GONE, policy, composite=True)
    cells = [cell for pos, cell in cells_of(ctx) if pos == LAST]
    assert len(cells) == N_KEPT
    for layer, shares in enumerate(attended):
        for head in range(SMALL.n_head_kv):
            of_head = [shares[group * head : group * (head + 1)]]
            scores = snapkv(of_head) if policy == "snapkv" else attention(of_head, n_observed)
            kept = [N_SINKS + i for i in best(list(scores[MAY_GO.start : MAY_GO.stop]), N_KEPT)]
            v = ctx.kv.read_v(layer)[cells, head]
            assert v == pytest.approx(rows[layer][1][kept, head], abs=1e-4)


@pytest.mark.parametrize("spec", [SMALL, TWO_GROUPS], ids=["one", "two groups"])
def test_what_it_takes_to_repeat_the_text(model_file: Callable[[ModelSpec], Path], spec: ModelSpec) -> None:
    """By the definition of KVzip, for each head: the highest attention of its query heads."""
    rows: list[Rows] = []
    naive_logits(spec, IDS, rows=rows)
    with kvg.Model(model_file(spec), device="cpu") as model, open_context(model, **OPTIONS) as ctx:
        asked = asked_ids(ctx)
        n_part = n_of_part(ctx, N) - N  # once the text is there
        parts: list[list[Floats]] = [[] for _ in range(0, N, n_part)]
        for p, layers in zip(range(0, N, n_part), parts, strict=True):
            naive_logits(spec, [*IDS, *asked, *IDS[max(p - 8, 0) : p], *IDS[p : p + n_part]], layers)
        text_of(ctx).forget(N_GONE, "kvzip", composite=True)
        for g, info in enumerate(ctx.kv.groups):
            cells = [cell for pos, cell in cells_of(ctx, g) if pos == LAST]
            assert len(cells) == N_KEPT
            for layer in info.layers:
                queries = spec.n_head // spec.heads_of(layer)
                for head in range(spec.heads_of(layer)):
                    of_head = [[part[layer][queries * head : queries * (head + 1)]] for part in parts]
                    scores = list(kvzip(of_head, N, 1)[MAY_GO.start : MAY_GO.stop])
                    kept = [N_SINKS + i for i in best(scores, N_KEPT)]
                    v = ctx.kv.read_v(layer)[cells, head]
                    assert v == pytest.approx(rows[layer][1][kept, head], abs=1e-4)


def test_gaps_are_closed_before_the_span_alone(ctx: kvg.Context, naive: list[Rows]) -> None:
    """The rows of the span keep their distances: the next tokens see the same."""
    forgotten(ctx)
    close_gaps(ctx, 0)
    assert positions(ctx) == [
        *range(N_SINKS),
        *[N_SINKS] * N_KEPT,
        *range(N_SINKS + 1, N_SINKS + 1 + N_RECENT),
    ]
    ctx.kv.seq_rm(0, 0, N_SINKS)  # whose distance to the others is another one now
    past = [(k[N_SINKS:], v[N_SINKS:]) for k, v in naive]
    expected = next_logits(past)
    assert nmse(decode(ctx, run_of(NEXTS, ctx.kv.seq_pos_max(0) + 1)), expected) < SAME


@pytest.mark.parametrize("way", ["save", "stream", "copy", "defrag", "sort", "hold"])
def test_what_becomes_of_them(ctx: kvg.Context, naive: list[Rows], way: str) -> None:
    forgotten(ctx)
    expected = next_logits(naive)
    seq = 0
    if way == "save":
        blob, seq = ctx.kv.save(0), 1
        ctx.kv.seq_rm(0, -1, -1)
        ctx.kv.load(blob, 1)
    elif way == "stream":
        travel(ctx, 0, ctx, 1, connect(ctx.model.n_layer))
        ctx.kv.seq_rm(0, -1, -1)
        seq = 1
    elif way == "copy":  # which moves there and back again
        ctx.kv.seq_cp(0, 1, -1, -1)
        ctx.kv.seq_add(1, 0, -1, 40)
        ctx.kv.update()
        before = positions(ctx, seq=1)
        assert before == [pos + 40 for pos in positions(ctx)]
        ctx.kv.seq_rm(0, -1, -1)
        ctx.kv.seq_add(1, 0, -1, -40)
        seq = 1
    elif way == "hold":
        close_gaps(ctx, 0)
        holds = [ctx.kv.hold(0, a, b) for a, b in ((0, N_SINKS), (N_SINKS, N_SINKS + 1), (N_SINKS + 1, -1))]
        expected = decode(ctx, run_of(NEXTS, ctx.kv.seq_pos_max(0) + 1))
        ctx.kv.seq_rm(0, -1, -1)
        assert ctx.kv.n_used == N - N_GONE
        for hold in holds:
            ctx.kv.attach(hold, 2)
        seq = 2
    else:
        ctx.kv.seq_cp(0, 1, 0, 2)
        ctx.kv.defrag("sort" if way == "sort" else "fill")
        assert ctx.kv.update().moved_cells
    ours = decode(ctx, run_of(NEXTS, ctx.kv.seq_pos_max(seq) + 1, (seq,)))
    assert nmse(ours, expected) < SAME


def test_a_part_with_composite_cells_is_no_part_of_a_stream(ctx: kvg.Context) -> None:
    forgotten(ctx)
    ends = connect(ctx.model.n_layer)
    with pytest.raises(kvg.UnsupportedError, match="share a position"):
        stream.scatter(ctx, 0, ends.out[0], 0, -1)


def test_forgetting_again(ctx: kvg.Context) -> None:
    """Earlier composite cells are rows like others; all become one span again."""
    text = forgotten(ctx)
    ids = [*IDS, *NEXTS]
    assert text.set(ids).n_decoded == len(NEXTS)
    last = LAST + len(NEXTS)
    before = [(pos, cell) for pos, cell in cells_of(ctx) if N_SINKS <= pos <= last]
    scores = [keydiff_of_head(keys_of(ctx, 1)[:, head])[N_SINKS : N_SINKS + len(before)] for head in (0, 1)]
    v = ctx.kv.read_v(1)[[cell for _, cell in before]]
    report = text.forget(20, composite=True)
    assert report.n_left == len(ids) - N_GONE - 20
    cells = [cell for pos, cell in cells_of(ctx) if pos == last]
    assert len(cells) == len(before) - 20
    for head in (0, 1):
        assert np.array_equal(ctx.kv.read_v(1)[cells, head], v[best(scores[head], len(cells)), head])


def test_a_pending_shift_comes_before(ctx: kvg.Context, naive: list[Rows]) -> None:
    """Half of what is composed owes a rotation, and the other half doesn't."""
    text_of(ctx)
    ctx.kv.seq_add(0, 20, -1, 5)
    ctx.kv.update()
    ctx.kv.seq_add(0, 25, -1, -5)
    forgotten_text = kvg.Sequence(ctx)
    forgotten_text.record(IDS)
    forgotten_text.forget(N_GONE, composite=True)
    expected = next_logits(naive)
    assert nmse(decode(ctx, run_of(NEXTS, N)), expected) < SAME


def test_rows_that_wait_are_rotated_before(model_file: Callable[[ModelSpec], Path]) -> None:
    """K of quantized cells that wait, and of such that don't, become rows of one cell."""
    options = {**OPTIONS, "type_k": "q8_0", "n_ctx": 400}
    with kvg.Model(model_file(EVEN_BLOCKS), device="cpu") as model, open_context(model, **options) as ctx:
        text = text_of(ctx, random_ids(250, N_VOCAB))
        ctx.kv.seq_add(0, 60, -1, 7)
        assert ctx.kv.update().waiting_cells == 190
        keys = ctx.kv.read_k(0)[[cell for _, cell in cells_of(ctx)]]
        of_heads = [keydiff_of_head(keys[:, h].astype(np.float64))[N_SINKS:-N_RECENT] for h in (0, 1)]
        text.forget(100, composite=True)
        cells = [cell for pos, cell in cells_of(ctx) if pos == 250 + 7 - N_RECENT - 1]
        assert len(cells) == 250 - N_SINKS - N_RECENT - 100
        assert not ctx.kv.cells().shift[cells].any()
        now = ctx.kv.read_k(0)[cells]
        for head, scores in enumerate(of_heads):
            rows = [N_SINKS + row for row in best(scores, len(cells))]
            assert np.abs(now[:, head] - keys[rows, head]).max() < 0.02 * np.abs(keys).max()


def test_the_text_stays_and_goes_as_a_whole(ctx: kvg.Context, small: kvg.Model) -> None:
    text = forgotten(ctx)
    assert (text.ids.tolist(), text.approximate_from) == (IDS, N_SINKS)
    edits: list[Callable[[], object]] = [
        lambda: text.repair([(50, 60)]),
        lambda: text.repair([(50, N)]),
        lambda: text.remove(50, 60),
        lambda: text.remove(2, 4, repair=1),
        lambda: text.replace(50, 60, [5]),
        lambda: text.replace(50, 50, [5]),
        lambda: text.discard(0, 20),
        lambda: text.group(N_SINKS, 100, 2),
    ]
    before = positions(ctx)
    for edit in edits:
        with pytest.raises(kvg.InvalidArgumentError, match=f"tokens {N_SINKS} to {LAST} share composite"):
            edit()
    assert (positions(ctx), text.ids.tolist()) == (before, IDS)
    text.repair([(N_SINKS, N)])
    assert text.approximate_from is None
    assert positions(ctx) == list(range(N))
    with open_context(small, **OPTIONS) as other:
        expected = kvg.Sequence(other).set([*IDS, 7]).last.logits
        assert nmse(text.append(7).logits, expected) < SAME


def test_a_repair_without_room_leaves_them(small: kvg.Model) -> None:
    with open_context(small, n_seq_max=2, **OPTIONS) as ctx:
        text = forgotten(ctx)
        kvg.Sequence(ctx, 1).set(IDS[: ctx.kv.n_free - 4])
        before = positions(ctx)
        with pytest.raises(kvg.CacheFullError, match="share composite cells: to decode them"):
            text.repair([(N_SINKS, N)])
        assert (positions(ctx), text.approximate_from) == (before, N_SINKS)
        ctx.kv.seq_rm(1, -1, -1)
        text.repair([(N_SINKS, N - N_RECENT)])
        assert positions(ctx) == list(range(N))


def test_edits_beside_them(ctx: kvg.Context) -> None:
    text = forgotten(ctx)
    text.remove(N - 20, N - 10, repair=0)
    text.remove(1, 2, repair=0)
    assert positions(ctx) == [*range(N_SINKS - 1), *[LAST - 1] * N_KEPT, *range(LAST, N - 11)]
    text.remove(N_SINKS - 1, LAST, repair=0)
    assert text.ids.tolist() == [IDS[0], *IDS[2:N_SINKS], *IDS[LAST + 1 : N - 20], *IDS[N - 10 :]]
    assert positions(ctx) == list(range(len(text)))


@pytest.mark.parametrize("n", [N_SINKS, 50, LAST])
def test_back_into_the_span(ctx: kvg.Context, n: int) -> None:
    text = forgotten(ctx)
    assert text.go_back(LAST + 1) == LAST + 1
    assert text.go_back(n) == N_SINKS
    assert text.approximate_from is None
    assert ctx.kv.n_used == N_SINKS


def test_cells_that_others_have_are_left_alone(ctx: kvg.Context) -> None:
    text = text_of(ctx)
    ctx.kv.seq_cp(0, 1, 0, 30)
    hold = ctx.kv.hold(0, 40, 44)
    rows = ctx.kv.read_v(0)
    shared = [cell for pos, cell in cells_of(ctx) if pos < 30 or 40 <= pos < 44]
    text.forget(10, composite=True)
    kept = positions(ctx)
    assert kept[:34] == [*range(30), *range(40, 44)]
    assert kept[34:] == [LAST] * (LAST + 1 - 34 - 10) + list(range(MAY_GO.stop, N))
    assert np.array_equal(ctx.kv.read_v(0)[shared], rows[shared])
    assert positions(ctx, seq=1) == list(range(30))
    hold.release()


def test_where_nothing_would_be_left(ctx: kvg.Context) -> None:
    """One cell of a head each is no use: it goes, too."""
    text = text_of(ctx)
    report = text.forget(len(MAY_GO) - 1, composite=True)
    assert (report.n_cells, report.positions) == (len(MAY_GO), tuple(MAY_GO))
    with pytest.raises(kvg.CacheFullError, match="0 may be"):
        text.forget(1, composite=True)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_device_that_fails_half_way(ctx: kvg.Context, n: int) -> None:
    text = text_of(ctx)
    with fault("compose-rows", n), pytest.raises(kvg.DeviceError):
        text.forget(N_GONE, composite=True)
    with pytest.raises(kvg.DeviceError, match="clear"):
        decode(ctx, run_of(NEXTS, N))
    ctx.kv.clear()
    text = kvg.Sequence(ctx)
    assert text.set(IDS).n_decoded == N
    assert text.forget(N_GONE, composite=True).n_cells == N_GONE


def test_a_rotation_that_fails_before(ctx: kvg.Context) -> None:
    """Nothing is forgotten, and the rotation is still due."""
    text = text_of(ctx)
    ctx.kv.seq_add(0, 20, -1, 5)
    with fault("shift-alloc"), pytest.raises(kvg.DeviceError):
        text.forget(N_GONE, composite=True)
    assert len(positions(ctx)) == N
    assert ctx.kv.cells().shift.any()


@pytest.mark.parametrize(
    "wrong",
    [
        {"seq": 3},
        {"seq": -1},
        {"seq": 1},
        {"compositions": []},
        {"group": 1},
        {"cells": [5, 5, 7]},
        {"cells": [5, 6, 300]},
        {"cells": [5, 6, -1]},
        {"rows": [0, 3]},
        {"rows": [1, 0]},
        {"rows": [1, 1]},
        {"rows": [-1, 1]},
        {"rows": []},
        {"rows": [0, 1, 2, 3]},
        {"cells": [0, 6, 7]},  # held
    ],
    ids=str,
)
def test_what_is_no_composition(ctx: kvg.Context, wrong: dict[str, Any]) -> None:
    """Refused before anything is changed."""
    text_of(ctx)
    hold = ctx.kv.hold(0, 0, 1)
    before, rows = positions(ctx), ctx.kv.read_k(0)
    one = np.array(wrong.get("rows", [0, 2]), np.int32)
    composition = Composition(
        wrong.get("group", 0),
        np.array(wrong.get("cells", [5, 6, 7]), np.int32),
        np.broadcast_to(one, (2, 2, len(one))),
    )
    with pytest.raises(kvg.InvalidArgumentError):
        compose(ctx.kv._handle, wrong.get("seq", 0), wrong.get("compositions", [composition]))
    assert positions(ctx) == before
    assert np.array_equal(ctx.kv.read_k(0), rows)
    hold.release()


def test_a_policy_that_knows_no_heads(ctx: kvg.Context) -> None:
    text = text_of(ctx)
    with pytest.raises(kvg.InvalidArgumentError, match="doesn't score each head"):
        text.forget(3, "window", composite=True)
    with pytest.raises(kvg.InvalidArgumentError, match="doesn't score each head"):
        kvg.Forget(100, "window", composite=True)
    with pytest.raises(kvg.InvalidArgumentError, match="composite must be"):
        kvg.Forget(100, composite=1)  # type: ignore[arg-type]


def test_generate_within_a_budget(ctx: kvg.Context) -> None:
    most = 0
    for _ in kvg.generate(ctx, IDS, max_tokens=60, on_full=kvg.Forget(100, composite=True)):
        most = max(most, ctx.kv.n_used)
    left, n = positions(ctx), ctx.kv.seq_pos_max(0) + 1
    assert (most, n) == (100, N + 59)
    span = left[N_SINKS]
    assert left == [*range(N_SINKS), *[span] * left.count(span), *range(span + 1, n)]
    assert left.count(span) > 2


@pytest.mark.parametrize("swa_full", [False, True])
def test_windows_keep_what_they_see(architecture: Callable[[ArchSpec], Path], swa_full: bool) -> None:
    """Layers that see everything compose; what windows see is there, and the text goes on."""
    spec = ArchSpec("gemma3", n_layer=6, window=24, period=3)
    options = {**OPTIONS, "swa_full": swa_full}
    with kvg.Model(architecture(spec), device="cpu") as model, open_context(model, **options) as ctx:
        text = text_of(ctx)
        full = next(index for index, group in enumerate(ctx.kv.groups) if group.kind == "full")
        text.forget(N_GONE, composite=True)
        assert positions(ctx, full).count(LAST) == N_KEPT
        assert positions(ctx, 1 - full)[-24:] == list(range(N - 24, N))
        assert np.isfinite(text.append(7).logits).all()


def test_latent_heads_and_states(architecture: Callable[[ArchSpec], Path], delta_net: kvg.Model) -> None:
    """A model with one latent head a layer, whose V is a part of K, and one with recurrent layers."""
    latent = ArchSpec("deepseek2", n_head_kv=1, n_expert=8, n_ff_shared=96, rank=48, q_rank=40)
    with kvg.Model(architecture(latent), device="cpu") as model:
        models = [model, delta_net]
        for each in models:
            with open_context(each, **{**OPTIONS, "type_k": "f16", "type_v": "f16"}) as ctx:
                text = text_of(ctx, ids_of(each, N, 1))
                assert text.forget(N_GONE, composite=True).n_left == N - N_GONE
                assert positions(ctx).count(LAST) == N_KEPT
                assert np.isfinite(text.append(7).logits).all()


def test_rows_of_two_types_are_refused(small: kvg.Model) -> None:
    """Some of the cells have K and V in other tensors than the rest."""
    options = {**OPTIONS, "type_k": "f32:f16@128", "type_v": "f32:f16@128"}
    with open_context(small, **options) as ctx:
        text = text_of(ctx)
        assert max(cell for _, cell in cells_of(ctx)) >= 128
        with pytest.raises(kvg.UnsupportedError, match="composite cells"):
            text.forget(N_GONE, composite=True)
        assert positions(ctx) == list(range(N))
        assert text.approximate_from is None


def test_distances_by_positions_are_refused(architecture: Callable[[ArchSpec], Path]) -> None:
    with (
        kvg.Model(architecture(ArchSpec("bloom")), device="cpu") as model,
        open_context(model, **OPTIONS) as ctx,
    ):
        text = text_of(ctx, ids_of(model, N, 1))
        with pytest.raises(kvg.UnsupportedError, match="ALiBi"):
            text.forget(N_GONE, composite=True)
        assert positions(ctx) == list(range(N))
        assert text.approximate_from is None


def test_rows_that_age_are_refused(model_file: Callable[[ModelSpec], Path]) -> None:
    """Rows of two types can't be gathered head by head."""
    options = {**OPTIONS, "n_ctx": 512, "type_k": "f16:q8_0@256", "type_v": "f16:q8_0@256"}
    with kvg.Model(model_file(EVEN_BLOCKS), device="cpu") as model, open_context(model, **options) as ctx:
        text = text_of(ctx, random_ids(400, N_VOCAB))
        with pytest.raises(kvg.UnsupportedError, match="composite cells: rows of one type"):
            text.forget(N_GONE, composite=True)
        assert positions(ctx) == list(range(400))
        assert text.approximate_from is None


def test_composite_cells_alone_forget_again(ctx: kvg.Context) -> None:
    """No other token may be forgotten: heads choose among what they have, and no position goes."""
    text = forgotten(ctx)
    exact = text.approximate_from
    report = text.forget(10, composite=True)
    assert (report.positions, report.n_cells, report.n_left) == ((), 10, N - N_GONE - 10)
    assert positions(ctx) == [*range(N_SINKS), *[LAST] * (N_KEPT - 10), *range(MAY_GO.stop, N)]
    assert (text.approximate_from, text.ids.tolist()) == (exact, IDS)
