"""Recurrent states: shared, kept, come back to, and left alone by everything that only moves cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import where
from support.architectures import ArchSpec
from support.engines import Token, decode, open_context, random_ids, run_of
from support.faults import fault
from support.judge import nmse
from support.models import N_VOCAB
from support.recurrent import (
    DELTA_NET,
    IDS,
    MAMBA2,
    N_BATCH,
    OPTIONS,
    WINDOWED,
    alone,
    fill,
    go_on,
    read_row,
    same,
    state_bytes,
)

import pykvgraph as kvg

pytestmark = pytest.mark.any_device


@pytest.fixture(scope="module")
def mamba2(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(MAMBA2), device=where.device) as model:
        yield model


@pytest.fixture(scope="module")
def windowed(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(WINDOWED), device=where.device) as model:
        yield model


def test_sequences_of_unequal_length_together(recurrent: kvg.Model) -> None:
    """One has a prompt, two go on by a token each, one begins: in batches that cut across all of them."""
    texts = [random_ids(60, N_VOCAB, seed) for seed in range(4)]
    with open_context(recurrent, **OPTIONS) as ctx:
        at = [0, 0, 0, 0]
        last: dict[int, Any] = {}
        for step in range(14):
            tokens: list[Token] = []
            for seq, n in enumerate([(9, 4, 1, 0), (1, 1, 1, 6), (2, 0, 3, 1)][step % 3]):
                tokens += run_of(texts[seq][at[seq] : at[seq] + n], at[seq], (seq,))
                at[seq] += n
            tokens = [tokens[i] for i in sorted(range(len(tokens)), key=lambda i: (tokens[i].pos % 3, i))]
            tokens.sort(key=lambda token: token.pos)  # sequences in turn
            rows = decode(ctx, tokens)
            last |= {token.seq_ids[0]: row for token, row in zip(tokens, rows, strict=True)}
    for seq, n in enumerate(at):
        with open_context(recurrent, **{**OPTIONS, "n_ubatch": 20}) as ctx:
            row = [
                decode(ctx, run_of(texts[seq][i : min(i + N_BATCH, n)], i))[-1] for i in range(0, n, N_BATCH)
            ][-1]
        assert nmse(last[seq], row) <= where.rule(1e-6)


def test_sequences_that_share_tokens_and_part_in_a_batch(recurrent: kvg.Model) -> None:
    with open_context(recurrent, **OPTIONS) as ctx:
        decode(ctx, run_of(IDS[:9], 0, (0, 1, 2)))
        both = run_of(IDS[9:12], 9, (0, 1)) + run_of(IDS[9:11], 9, (2,)) + run_of(IDS[12:16], 12, (0,))
        decode(ctx, both + run_of(IDS[12:14], 12, (1,)))
        for seq, n in ((0, 16), (1, 14), (2, 11)):
            assert same(go_on(ctx, seq), alone(recurrent, n))


def test_a_copy_goes_its_own_way(recurrent: kvg.Model) -> None:
    with open_context(recurrent, **OPTIONS) as ctx:
        fill(ctx, 30)
        used = ctx.kv.groups[-1].n_used
        ctx.kv.seq_cp(0, 1, 0, -1)
        assert ctx.kv.groups[-1].n_used == used
        go_on(ctx, 0, seed=9)
        assert same(go_on(ctx, 1), alone(recurrent, 30))
        ctx.kv.seq_keep(1)
        assert ctx.kv.seq_pos_max(0) == -1
        assert same(go_on(ctx, 1, seed=6), alone_twice(recurrent, 30))


def alone_twice(model: kvg.Model, n: int) -> Any:
    with open_context(model, **OPTIONS) as ctx:
        fill(ctx, n)
        go_on(ctx)
        return go_on(ctx, seed=6)


def test_a_part_can_be_copied_up_to_a_checkpoint(recurrent: kvg.Model) -> None:
    with open_context(recurrent, **{**OPTIONS, "checkpoint_cells": 48}) as ctx:
        fill(ctx, 20)
        assert ctx.kv.checkpoint(0) == 20
        fill(ctx, 45)
        with pytest.raises(kvg.InvalidArgumentError, match="up to a checkpoint"):
            ctx.kv.seq_cp(0, 1, 0, 25)
        with pytest.raises(kvg.InvalidArgumentError, match="as a whole"):
            ctx.kv.seq_cp(0, 1, 5, -1)
        assert ctx.kv.seq_pos_max(1) == -1
        ctx.kv.seq_cp(0, 1, 0, 20)
        assert same(go_on(ctx, 1), alone(recurrent, 20))
        with pytest.raises(kvg.InvalidArgumentError, match="a text of its own"):
            ctx.kv.seq_cp(0, 1, 0, -1)
        assert same(go_on(ctx, 0), alone(recurrent, 45))


def test_a_part_can_be_copied_that_windows_have_left(windowed: kvg.Model) -> None:
    with open_context(windowed, **{**OPTIONS, "checkpoint_cells": 24}) as ctx:
        fill(ctx, 30)
        assert ctx.kv.checkpoint(0) == 30
        fill(ctx, 250)
        for p in (10, 31):
            with pytest.raises(kvg.InvalidArgumentError, match="up to a checkpoint"):
                ctx.kv.seq_cp(0, 1, 0, p)
        ctx.kv.seq_cp(0, 1, 0, 30)
        assert same(go_on(ctx, 1), alone(windowed, 30))
        assert same(go_on(ctx, 0), alone(windowed, 250))


def test_coming_back_is_as_never_having_left(recurrent: kvg.Model) -> None:
    with open_context(recurrent, **{**OPTIONS, "checkpoint_cells": 48}) as ctx:
        fill(ctx, 33)
        ctx.kv.checkpoint(0)
        wanted = go_on(ctx)
        fill(ctx, 80)
        assert ctx.kv.checkpoints(0) == [33]
        with pytest.raises(kvg.InvalidArgumentError, match=r"position 40.*nearest.*33"):
            ctx.kv.seq_rm(0, 40, -1)
        assert ctx.kv.seq_pos_max(0) == 79
        assert ctx.kv.rewind(0, 60) == 33
        assert np.array_equal(go_on(ctx), wanted)
        ctx.kv.seq_rm(0, 33, -1)
        assert np.array_equal(go_on(ctx), wanted)
        assert ctx.kv.rewind(0, 20) == 0
        assert ctx.kv.seq_pos_max(0) == -1
        fill(ctx, 33)
        assert same(go_on(ctx), wanted)


def test_checkpoints_inside_a_batch(recurrent: kvg.Model) -> None:
    """At the cuts of micro-batches, between them and at the end, for sequences beside each other."""
    marks = {0: (3, 7, 14), 1: (2, 6)}
    with open_context(recurrent, **{**OPTIONS, "checkpoint_cells": 200}) as ctx:
        batch = kvg.Batch()
        batch.extend(IDS[:14], 0, (0,), checkpoints=marks[0])
        batch.extend(IDS[20:26], 0, (1,), checkpoints=marks[1])
        ctx.decode(batch)
        for seq, positions in marks.items():
            assert ctx.kv.checkpoints(seq) == list(positions)
            for p in reversed(positions):
                assert ctx.kv.rewind(seq, p) == p
                with open_context(recurrent, **OPTIONS) as fresh:
                    decode(fresh, run_of(IDS[20 * seq : 20 * seq + p], 0, (0,)))
                    wanted = go_on(fresh)
                assert same(go_on(ctx, seq), wanted)


def test_checkpoints_of_a_batch_that_fails(delta_net: kvg.Model) -> None:
    row = state_bytes(DELTA_NET)
    batch = kvg.Batch()
    batch.extend(IDS[:14], 0, (0,), checkpoints=range(1, 15))
    with open_context(delta_net, **{**OPTIONS, "n_seq_max": 1, "checkpoint_bytes": 3 * row}) as ctx:
        with pytest.raises(kvg.CacheFullError, match="checkpoints need 13 states"):
            ctx.decode(batch)
        assert (ctx.kv.groups[-1].n_used, ctx.kv.checkpoints(0), ctx.kv.seq_pos_max(0)) == (0, [], -1)
        batch.clear()
        batch.extend(IDS[:14], 0, (0,), checkpoints=(5, 9))
        for site in ("compute", "state-keep"):
            with fault(site), pytest.raises(kvg.KVGraphError):
                ctx.decode(batch)
            assert (ctx.kv.groups[-1].n_used, ctx.kv.checkpoints(0), ctx.kv.seq_pos_max(0)) == (0, [], -1)
        ctx.decode(batch)
        assert (ctx.kv.groups[-1].n_used, ctx.kv.checkpoints(0)) == (3, [5, 9])
        assert same(go_on(ctx), alone(delta_net, 14))
    with pytest.raises(kvg.InvalidArgumentError, match="checkpoints"):
        batch.extend(IDS[:3], 5, (0,), checkpoints=(9,))


def test_a_resume_point_for_another_sequence(recurrent: kvg.Model) -> None:
    with open_context(recurrent, **{**OPTIONS, "checkpoint_cells": 48}) as ctx:
        fill(ctx, 32)
        prefix, point = ctx.kv.hold(0, 0, 32), ctx.kv.resume_point(0)
        fill(ctx, 70)
        ctx.kv.seq_rm(0, 0, -1)
        ctx.kv.attach(prefix, 2)
        with pytest.raises(kvg.InvalidArgumentError, match="can't go on at position 32"):
            decode(ctx, run_of(IDS[:1], 32, (2,)))
        ctx.kv.attach(point, 2)
        assert same(go_on(ctx, 2), alone(recurrent, 32))
        ctx.kv.attach(prefix, 3)
        ctx.kv.attach(point, 3)
        point.release()
        prefix.release()
        assert same(go_on(ctx, 3), alone(recurrent, 32))
        with pytest.raises(kvg.InvalidArgumentError, match="released"):
            ctx.kv.attach(point, 0)


@pytest.mark.parametrize("site", ["cells", "build", "alloc", "compute", "state-take", "state-keep"])
def test_a_step_that_fails_changes_no_state(recurrent: kvg.Model, site: str) -> None:
    with open_context(recurrent, **OPTIONS) as ctx:
        fill(ctx, 30)
        ctx.kv.checkpoint(0)
        before = ctx.kv.groups[-1].n_used
        with fault(site), pytest.raises(kvg.KVGraphError):
            decode(ctx, run_of(IDS[30:50], 30) + run_of(IDS[:1], 0, (1,)))
        assert ctx.kv.groups[-1].n_used == before
        assert ctx.kv.seq_pos_max(0) == 29
        assert ctx.kv.seq_pos_max(1) == -1
        assert same(go_on(ctx), alone(recurrent, 30))
        assert same(go_on(ctx, 1), alone(recurrent, 0))


def test_defrag_and_shift_leave_states_alone(delta_net: kvg.Model) -> None:
    """After a shift the state still knows what was discarded."""
    with open_context(delta_net, **OPTIONS) as ctx:
        fill(ctx, 60)
        ctx.kv.checkpoint(0)
        ctx.kv.seq_rm(0, 10, 20)
        ctx.kv.seq_add(0, 20, -1, -10)
        assert ctx.kv.checkpoints(0) == [50]
        ctx.kv.defrag("sort")
        ctx.kv.update()
        shifted = go_on(ctx)
        assert ctx.kv.seq_pos_max(0) == 59
        ctx.kv.rewind(0, 50)
        assert same(go_on(ctx), shifted)
        assert nmse(shifted, alone(delta_net, 60)) < 0.5


def test_as_many_as_there_is_room_for(delta_net: kvg.Model) -> None:
    row = state_bytes(DELTA_NET)
    with open_context(delta_net, **{**OPTIONS, "checkpoint_bytes": 3 * row + row // 2}) as ctx:
        group = ctx.kv.groups[-1]
        assert (group.kind, group.n_cells, group.cell_bytes) == ("state", 2 * 4 + 3, row)
        points = []
        for n in (10, 20, 30):
            fill(ctx, n)
            points.append(ctx.kv.resume_point(0))
        fill(ctx, 40)
        with pytest.raises(kvg.CacheFullError, match="3 resume points"):
            ctx.kv.resume_point(0)
        for n in range(41, 60):  # more checkpoints than rows: the least useful go, and no step is refused
            fill(ctx, n)
            ctx.kv.checkpoint(0)
            fill(ctx, 5 + n, seq=1 + n % 3)
        assert 1 <= len(ctx.kv.checkpoints(0)) <= 8
        assert same(go_on(ctx), alone(delta_net, 59))
        for each in points:
            each.release()


def test_the_group_of_states_counts_what_its_cells_show(delta_net: kvg.Model) -> None:
    with open_context(delta_net, **OPTIONS) as ctx:
        for change in (
            lambda: fill(ctx, 10),
            lambda: fill(ctx, 20),
            lambda: ctx.kv.seq_cp(0, 1, 0, -1),
            lambda: ctx.kv.checkpoint(0),
            lambda: fill(ctx, 30),
            lambda: ctx.kv.seq_rm(0, 0, -1),
            lambda: ctx.kv.clear(),
        ):
            change()
            used = np.flatnonzero(ctx.kv.cells(1).pos >= 0)
            assert ctx.kv.groups[1].n_used == len(used)
            assert ctx.kv.groups[1].n_kv == max(used, default=-1) + 1


def test_clear_leaves_no_state_in_memory(delta_net: kvg.Model) -> None:
    with open_context(delta_net, **OPTIONS) as ctx:
        fill(ctx, 10)
        fill(ctx, 20)
        assert read_row(ctx, 0).any() and read_row(ctx, 1).any()
        ctx.kv.clear()
        assert not read_row(ctx, 0).any() and not read_row(ctx, 1).any()


def test_k_of_a_layer_that_does_not_attend(delta_net: kvg.Model) -> None:
    with open_context(delta_net, **OPTIONS) as ctx:
        with pytest.raises(kvg.InvalidArgumentError, match="layer 0 doesn't attend"):
            ctx.kv.read_k(0)
        assert ctx.kv.read_k(3).shape == (300, 2, 32)


def test_parts_that_cannot_be_copied(delta_net: kvg.Model) -> None:
    with open_context(delta_net, **OPTIONS) as ctx:
        fill(ctx, 20)
        ctx.kv.checkpoint(0)
        fill(ctx, 30)
        with pytest.raises(kvg.InvalidArgumentError, match=r"5 to -1 of sequence 0$"):
            ctx.kv.seq_cp(0, 1, 5, -1)
        with pytest.raises(kvg.InvalidArgumentError, match=r"0 to 25 .* nearest checkpoint .* at 20"):
            ctx.kv.seq_cp(0, 1, 0, 25)
        assert ctx.kv.seq_pos_max(1) == -1


def test_a_model_of_states_alone(mamba2: kvg.Model) -> None:
    """Its cells have no layers and no bytes, and tell the positions of sequences as others do."""
    with open_context(mamba2, **{**OPTIONS, "n_ctx": 30}) as ctx:
        kv, (record, states) = ctx.kv, ctx.kv.groups
        assert (record.kind, record.layers, record.cell_bytes, record.n_cells) == ("full", (), 0, 30)
        assert (states.kind, states.layers, kv.bytes) == ("state", (0, 1), states.n_cells * states.cell_bytes)
        fill(ctx, 20)
        kv.seq_rm(0, 4, 10)
        kv.seq_add(0, 10, -1, -6)
        kv.seq_cp(0, 1, 0, -1)
        kv.seq_add(1, 0, -1, 5)  # shared cells: copies that have no rows
        kv.defrag("sort")
        assert kv.update().moved_cells > 0
        assert (kv.seq_pos_min(1), kv.seq_pos_max(1), kv.n_used, kv.n_attended) == (5, 18, 28, 0)
        kv.seq_rm(1, 0, -1)
        kv.defrag("fill")
        kv.update()
        assert kv.cells().pos.tolist() == [*range(14), *[-1] * 16]
        assert kv.read_rows([0, 3]).data.size == 0
        with pytest.raises(kvg.InvalidArgumentError, match="layer 0 doesn't attend"):
            kv.read_k(0)
        assert same(go_on(ctx), alone(mamba2, 20))  # the state has read all of it
        with pytest.raises(kvg.CacheFullError, match=r"7 .*6"):
            decode(ctx, run_of(IDS[:7], 24))
        shift = kvg.ContextShift(n_keep=2, n_discard=10)
        assert kv.can_shift and shift.apply(kv).n_past == 14


@pytest.mark.parametrize(
    "spec",
    [
        ArchSpec("lfm2", head_dim=16, n_layer=1, period=2, state_heads=1, n_taps=3),
        ArchSpec("qwen35", n_layer=3, period=4, state_heads=4),
        ArchSpec("nemotron_h", n_layer=1, state_heads=8),
        replace(DELTA_NET, n_layer=2),
    ],
    ids=str,
)
def test_a_model_without_attention_is_refused(
    architecture: Callable[[ArchSpec], Path], spec: ArchSpec
) -> None:
    with pytest.raises(kvg.UnsupportedError, match=r"none of its \d layers attends"):
        kvg.Model(architecture(spec), device="cpu")


@pytest.mark.parametrize("arch", ["qwen35", "qwen3next"])
def test_a_layer_that_would_only_feed_forward_is_refused(
    architecture: Callable[[ArchSpec], Path], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file says that the last layer, which should attend, has no heads of K and V."""
    n_expert = 4 if arch == "qwen3next" else 0
    spec = replace(DELTA_NET, arch=arch, n_expert=n_expert, n_ff_shared=32 * (n_expert > 0), seed=7)
    heads = [spec.n_head_kv] * (spec.n_layer - 1) + [0]
    monkeypatch.setattr(
        "gguf.GGUFWriter.add_head_count_kv",
        lambda writer, _: writer.add_array(f"{arch}.attention.head_count_kv", heads),
    )
    with pytest.raises(kvg.UnsupportedError, match="layer 3 neither attends nor has a state"):
        kvg.Model(architecture(spec), device="cpu")
