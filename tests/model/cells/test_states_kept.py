"""What is kept of recurrent states: how much, in which order it goes, and that a failure takes none of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import where
from support.architectures import ArchSpec
from support.engines import decode, open_context, random_ids, run_of
from support.faults import fault
from support.kv_rows import allowed_drift, cells_at
from support.models import N_VOCAB
from support.recurrent import (
    DELTA_NET,
    IDS,
    MAMBA2,
    OPTIONS,
    SPECS,
    WINDOWED,
    alone,
    fill,
    go_on,
    same,
    standing,
    state_bytes,
)
from support.restored import next_tokens

import pykvgraph as kvg

Architecture = Callable[[ArchSpec], Path]
TESTS = Path(__file__).parents[2]
ROW = state_bytes(DELTA_NET)
GRANITE = ArchSpec("granitehybrid", n_layer=3, period=3, state_heads=8)


@pytest.fixture(scope="module")
def windowed(architecture: Architecture) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(WINDOWED), device=where.device) as model:
        yield model


# ---- how much, and in which order it goes ----


@pytest.mark.parametrize("spec", [*SPECS, GRANITE], ids=str)
def test_states_take_the_bytes_that_were_asked_for(architecture: Architecture, spec: ArchSpec) -> None:
    row = state_bytes(spec)
    with kvg.Model(architecture(spec), device=where.device) as model:
        taken = []
        for asked in (0, 5 * row, 6 * row - 1):
            with open_context(model, **{**OPTIONS, "checkpoint_bytes": asked}) as ctx:
                group = ctx.kv.groups[-1]
                assert (group.kind, group.cell_bytes) == ("state", row)
                assert group.layers == tuple(filter(spec.has_state, range(spec.n_layer)))
                assert group.n_cells == 2 * 4 + asked // row
                taken.append(ctx.kv.bytes)
        assert [n - taken[0] for n in taken] == [0, 5 * row, 5 * row]


def least_useful(kept: dict[int, int]) -> int:
    """Of positions and when they were used: the one nearest to a neighbour or to 0, then the older one."""
    return min(kept, key=lambda p: (min([p, *(abs(p - q) for q in kept if q != p)]), kept[p]))


@pytest.mark.parametrize("seed", range(3))
def test_the_least_useful_checkpoint_goes_first(delta_net: kvg.Model, seed: int) -> None:
    """With one sequence and five states: its own, a spare one, and three kept."""
    rng = np.random.default_rng(seed)
    options = {**OPTIONS, "n_seq_max": 1, "checkpoint_bytes": 3 * ROW}
    kept: dict[int, int] = {}
    n = 0
    with open_context(delta_net, **options) as ctx:
        for clock in range(60):
            if clock % 7 == 6:
                back = int(rng.choice([*kept]))
                ctx.kv.seq_rm(0, back, -1)
                n, kept = back, {p: used for p, used in kept.items() if p <= back} | {back: clock}
                assert ctx.kv.checkpoints(0) == sorted(kept)
                continue
            while len({n, *kept}) == 5:  # the step needs one for itself
                del kept[least_useful(kept)]
            n += int(rng.integers(1, 6))
            fill(ctx, n)
            assert ctx.kv.checkpoints(0) == sorted(kept)
            assert ctx.kv.checkpoint(0) == n
            kept[n] = clock
            assert ctx.kv.groups[-1].n_used == len(kept) <= 5
        assert same(go_on(ctx), alone(delta_net, n))


def test_a_state_in_use_is_never_dropped(delta_net: kvg.Model) -> None:
    """No room for any checkpoint: every sequence goes on beside checkpoints that come and go."""
    with open_context(delta_net, **{**OPTIONS, "checkpoint_bytes": 0}) as ctx:
        for n in range(3, 60, 3):
            for seq in range(4):
                fill(ctx, n + seq, seq, shift=20 * seq)
                ctx.kv.checkpoint(seq)
        for seq in range(4):
            assert same(go_on(ctx, seq), alone(delta_net, 57 + seq, shift=20 * seq))


def test_draft_tokens_leave_checkpoints_of_the_prompt_alone(delta_net: kvg.Model) -> None:
    """1 + 4 tokens a time, some of them taken: room for the prompt's two checkpoints, and one a token."""
    rng = np.random.default_rng(0)
    with open_context(delta_net, **{**OPTIONS, "n_seq_max": 1, "checkpoint_bytes": 6 * ROW}) as ctx:
        for n in (40, 70):
            fill(ctx, n)
            ctx.kv.checkpoint(0)
        n = 80
        fill(ctx, n)
        while n < 200:
            batch = kvg.Batch()
            batch.extend(IDS[n : n + 5], n, (0,), logits="all", checkpoints=range(n + 1, n + 6))
            ctx.decode(batch)
            n += int(rng.integers(1, 6))
            assert ctx.kv.rewind(0, n) == n
            assert ctx.kv.checkpoints(0)[:2] == [40, 70]
        assert same(go_on(ctx), alone(delta_net, n))


# ---- what fails changes nothing ----


def load_what_fails(ctx: kvg.Context, blob: bytes) -> None:
    before = standing(ctx)
    with fault("load-state"), pytest.raises(kvg.DeviceError):
        ctx.kv.load(blob, 0)
    assert standing(ctx) == before


def test_a_load_that_fails_drops_no_checkpoint(delta_net: kvg.Model) -> None:
    """What is loaded needs a row: another sequence's checkpoint makes way, but only if the load succeeds."""
    with open_context(delta_net, **{**OPTIONS, "n_seq_max": 2, "checkpoint_bytes": ROW}) as ctx:
        fill(ctx, 25)
        blob = ctx.kv.save(0)
        ctx.kv.seq_rm(0, 0, -1)
        for n in (6, 12, 18, 24, 30):
            fill(ctx, n, 1)
            ctx.kv.checkpoint(1)
        assert ctx.kv.groups[-1].n_used == ctx.kv.groups[-1].n_cells == 5
        load_what_fails(ctx, blob)
        ctx.kv.load(blob, 0)
        assert len(ctx.kv.checkpoints(1)) == 4
        assert same(go_on(ctx), alone(delta_net, 25))
        assert same(go_on(ctx, 1), alone(delta_net, 30))


def test_a_load_that_fails_drops_no_checkpoint_for_cells(windowed: kvg.Model) -> None:
    with (
        open_context(windowed, **{**OPTIONS, "n_seq_max": 2}) as ctx,
        open_context(windowed, **{**OPTIONS, "swa_full": True}) as full,
    ):
        fill(full, 60)
        blob = full.kv.save(0)
        for n in range(4, 64, 4):
            fill(ctx, n, 1)
            ctx.kv.checkpoint(1)
        load_what_fails(ctx, blob)
        many = len(ctx.kv.checkpoints(1))
        ctx.kv.load(blob, 0)
        assert len(ctx.kv.checkpoints(1)) < many
        assert ctx.kv.n_free >= 10  # the rest makes way for tokens
        assert same(go_on(ctx), alone(windowed, 60))
        assert same(go_on(ctx, 1), alone(windowed, 60))


def test_a_batch_that_cannot_be_drops_no_checkpoint(delta_net: kvg.Model) -> None:
    with open_context(delta_net, **{**OPTIONS, "n_seq_max": 1, "checkpoint_bytes": 2 * ROW}) as ctx:
        for n in (10, 20, 30):
            fill(ctx, n)
            ctx.kv.checkpoint(0)
        batch = kvg.Batch()
        batch.extend(IDS[30:40], 30, (0,), checkpoints=range(31, 41))
        with pytest.raises(kvg.CacheFullError, match="checkpoints need 9 states"):
            ctx.decode(batch)
        assert ctx.kv.checkpoints(0) == [10, 20, 30]


def test_cells_that_cannot_be_had_drop_no_checkpoint(windowed: kvg.Model) -> None:
    """Resume points hold so many cells of the window that no checkpoint's would be enough."""
    with open_context(windowed, **{**OPTIONS, "n_seq_max": 1, "n_batch": 12, "checkpoint_cells": 24}) as ctx:
        fill_by = [run_of(IDS[pos : pos + 12], pos) for pos in range(0, 96, 12)]
        points = []
        for index, tokens in enumerate(fill_by):
            try:
                decode(ctx, tokens)
            except kvg.CacheFullError:
                break
            if index % 2:
                points.append(ctx.kv.resume_point(0))
            else:
                ctx.kv.checkpoint(0)
                before = standing(ctx)
        else:
            pytest.fail("there was room for all")
        assert standing(ctx).checkpoints[0] == before.checkpoints[0] != []


SITES = ["cells", "build", "alloc", "compute", "state-take", "state-keep", "checkpoint"]


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("spec", [*SPECS, GRANITE], ids=str)
def test_a_fault_anywhere_in_a_step(architecture: Architecture, spec: ArchSpec, site: str) -> None:
    """Two sequences that part inside a batch, one that begins, checkpoints in it: every pass fails once."""
    batch = kvg.Batch()
    batch.extend(IDS[30:34], 30, (0, 1), checkpoints=(32,))
    batch.extend(IDS[34:40], 34, (0,), checkpoints=(36, 40))
    batch.extend(IDS[50:54], 34, (1,), checkpoints=(36,))
    batch.extend(IDS[:3], 0, (2,))
    with kvg.Model(architecture(spec), device=where.device) as model:
        options = {**OPTIONS, "checkpoint_cells": 100, "checkpoint_bytes": 12 * state_bytes(spec)}
        with open_context(model, **options) as ctx, open_context(model, **options) as other:
            for each in (ctx, other):
                fill(each, 20)
                each.kv.checkpoint(0)
                fill(each, 30)
                each.kv.seq_cp(0, 1, 0, -1)
            before = standing(ctx)
            for countdown in range(1, 40):
                try:
                    with fault(site, countdown):
                        ctx.decode(batch)
                    break
                except kvg.KVGraphError:
                    assert standing(ctx) == before
            assert countdown > 1, "no pass through the site failed"
            other.decode(batch)
            assert standing(ctx) == standing(other)
            for seq in range(3):
                assert np.array_equal(go_on(ctx, seq), go_on(other, seq))


def test_a_fault_while_a_checkpoint_is_made(windowed: kvg.Model) -> None:
    with open_context(windowed, **{**OPTIONS, "checkpoint_cells": 48}) as ctx:
        fill(ctx, 40)
        before = standing(ctx)
        for call in (ctx.kv.checkpoint, ctx.kv.resume_point):
            with fault("checkpoint"), pytest.raises(kvg.DeviceError):
                call(0)
            assert standing(ctx) == before
        assert same(go_on(ctx), alone(windowed, 40))


# ---- edits ----


@pytest.mark.parametrize("p", [(0, 0), (4, 4), (4, 3), (140, 160), (-1, 0)])
def test_a_copy_of_nothing_changes_nothing(windowed: kvg.Model, p: tuple[int, int]) -> None:
    with open_context(windowed, **OPTIONS) as ctx:
        fill(ctx, 100)
        fill(ctx, 20, 1)
        ctx.kv.checkpoint(1)
        fill(ctx, 25, 1)
        fill(ctx, 120, 3)  # takes cells that the others have left behind
        assert ctx.kv._lost(0, 0) >= 4
        before = standing(ctx)
        ctx.kv.seq_cp(0, 1, *p)
        ctx.kv.seq_cp(2, 1, 0, -1)  # nothing there
        ctx.kv.seq_cp(1, 1, 0, -1)
        assert standing(ctx) == before
        with pytest.raises(kvg.InvalidArgumentError):
            ctx.kv.seq_cp(4, 1, *p)
        with pytest.raises(kvg.InvalidArgumentError):
            ctx.kv.seq_cp(0, 4, *p)


def test_a_checkpoint_whose_text_is_gone_leads_nowhere(delta_net: kvg.Model) -> None:
    """A sequence without cells begins with zeros, so going back there would not be going back."""
    with open_context(delta_net, **OPTIONS) as ctx:
        for n in (10, 20, 30):
            fill(ctx, n)
            ctx.kv.checkpoint(0)
        fill(ctx, 40)
        ctx.kv.seq_rm(0, 0, 20)
        assert ctx.kv.checkpoints(0) == [30]
        assert ctx.kv.rewind(0, 25) == 0
        assert (ctx.kv.seq_pos_max(0), ctx.kv.groups[-1].n_used) == (-1, 0)
        assert same(go_on(ctx), alone(delta_net, 0))
        ctx.kv.clear()
        fill(ctx, 20)
        ctx.kv.checkpoint(0)
        ctx.kv.seq_rm(0, 0, 20)  # all of it, and not beyond the checkpoint
        assert (ctx.kv.checkpoints(0), ctx.kv.groups[-1].n_used) == ([], 0)


def test_a_resume_point_of_another_text_is_refused_where_the_state_tells(delta_net: kvg.Model) -> None:
    with open_context(delta_net, **OPTIONS) as ctx:
        fill(ctx, 32)
        prefix, point = ctx.kv.hold(0, 0, 32), ctx.kv.resume_point(0)
        ctx.kv.attach(point, 0)  # it has that state already
        fill(ctx, 32, 1, shift=50)
        before = standing(ctx)
        with pytest.raises(kvg.InvalidArgumentError, match="a text of its own up to position 32"):
            ctx.kv.attach(point, 1)
        assert standing(ctx) == before
        assert same(go_on(ctx, 1), alone(delta_net, 32, shift=50))
        ctx.kv.attach(prefix, 2)
        ctx.kv.attach(point, 2)
        assert same(go_on(ctx, 2), alone(delta_net, 32))


def test_nothing_that_comes_in_forgets_no_state(delta_net: kvg.Model) -> None:
    with open_context(delta_net, **OPTIONS) as ctx:
        fill(ctx, 30)
        ctx.kv.reserve([kvg.Place([]) for _ in ctx.kv.groups if _.kind != "state"]).show(0)
        assert same(go_on(ctx), alone(delta_net, 30))


@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="AddressSanitizer has memory of its own")
def test_rows_that_nobody_has_are_zeros(architecture: Architecture) -> None:
    """In a process whose malloc() hands out memory that is full of something."""
    child = subprocess.run(
        [sys.executable, "-m", "support.unused_rows", str(architecture(DELTA_NET))],
        cwd=TESTS,
        env={**os.environ, "MALLOC_PERTURB_": "77"},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr


# ---- positions, and other processes ----


@pytest.mark.parametrize("kv_type", ["f32", "f16"])
@pytest.mark.parametrize("spec", [*(spec for spec in SPECS if spec != MAMBA2), GRANITE], ids=str)
def test_k_after_a_shift_is_fresh_k(architecture: Architecture, spec: ArchSpec, kv_type: str) -> None:
    """Of the first layer that attends. Layers before it have states, which know texts and no positions.

    So its K is that of the same text decoded at the new positions, with a gap where tokens were taken out.
    """
    n, far = 60, 100
    ids = random_ids(n, N_VOCAB)
    near, moved = ([*range(24), *range(begin, begin + n - 24)] for begin in (24, 24 + far))
    options: dict[str, Any] = {
        **OPTIONS,
        "n_batch": n,
        "type_k": kv_type,
        "type_v": kv_type,
        "swa_full": True,
    }
    with kvg.Model(architecture(spec), device=where.device) as model, open_context(model, **options) as ctx:
        layer = ctx.kv.groups[0].layers[0]

        def k_of(positions: list[int], seen: list[int]) -> Any:
            ctx.kv.clear()
            decode(ctx, [run_of([token], pos)[0] for token, pos in zip(ids, positions, strict=True)])
            return ctx.kv.read_k(layer)[cells_at(ctx.kv, seen)]

        for before, after, delta in ((near, moved, far), (moved, near, -far)):
            seen = [pos for pos in after if not 8 <= pos < 24]
            fresh = k_of(after, seen)
            old = k_of(before, [pos for pos in before if not 8 <= pos < 24])
            ctx.kv.seq_rm(0, 8, 24)
            ctx.kv.seq_add(0, before[24], -1, delta)
            ctx.kv.update()
            k = ctx.kv.read_k(layer)[cells_at(ctx.kv, seen)]
            assert np.abs(k - fresh).max() <= allowed_drift(fresh, kv_type, n + far)
            assert np.abs(old - fresh).max() > 0.1 or not ctx.kv.can_shift


@pytest.mark.parametrize("spec", [*SPECS, GRANITE], ids=str)
def test_gone_on_with_in_another_process(architecture: Architecture, spec: ArchSpec, tmp_path: Path) -> None:
    """It decodes new tokens only, one at a time, and they are the same: at the end and at a checkpoint."""
    path, state = architecture(spec), tmp_path / "state"
    with (
        kvg.Model(path, device="cpu") as model,
        open_context(model, **{**OPTIONS, "checkpoint_cells": 48}) as ctx,
    ):
        fill(ctx, 70)
        ctx.kv.checkpoint(0)
        fill(ctx, 110)
        ctx.kv.save_file(state, seq=0)
        at_the_end = next_tokens(ctx, IDS[110])
        assert ctx.kv.rewind(0, 80) == 70
        wanted = [at_the_end, 70, next_tokens(ctx, IDS[110])]
    child = subprocess.run(
        [sys.executable, "-m", "support.restored", str(path), str(state), str(IDS[110]), "80"],
        cwd=TESTS,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) == wanted
    assert wanted[0] != wanted[2]
