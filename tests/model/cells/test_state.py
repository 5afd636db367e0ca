"""save and load: the same text goes on elsewhere; what doesn't fit changes nothing."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import where
from support.engines import Token, decode, open_context, random_ids, run_of
from support.judge import nmse
from support.kv_rows import contents, same_cells, seqs_of
from support.kv_types import BLOCKS, EVEN_BLOCKS, KV_TYPES, QUANTIZED
from support.models import N_VOCAB, SMALL, TWO_GROUPS, ModelSpec
from support.saved_cells import packed
from support.saved_text import OPTIONS, following, held, populate, refused

import pykvgraph as kvg
from pykvgraph.kv_cache.saved.cells import SavedState
from pykvgraph.kv_cache.saved.format import unpack
from pykvgraph.kv_cache.saved.transfer import put, read_geometry

pytestmark = pytest.mark.any_device

Holder = Callable[[tuple[str, str]], kvg.Model]
ModelFile = Callable[[ModelSpec], Path]


@pytest.fixture(scope="module", params=[SMALL, TWO_GROUPS], ids=["one group", "two groups"])
def spec_here(request: pytest.FixtureRequest) -> ModelSpec:
    """Which model the tests of this file are about."""
    spec: ModelSpec = request.param
    return spec


@pytest.fixture(scope="module")
def small(spec_here: ModelSpec, model_file: ModelFile) -> Iterator[kvg.Model]:
    """In place of the model of that name: what holds for one group must hold for each of several."""
    with kvg.Model(model_file(spec_here), device=where.device) as model:
        yield model


@pytest.fixture(scope="module")
def holder(spec_here: ModelSpec, small: kvg.Model, model_file: ModelFile) -> Iterator[Holder]:
    """As in conftest: heads of a block for quantized types, here in as many groups."""
    heads = (
        {EVEN_BLOCKS: (2, 4, 2), BLOCKS: (3, 1, 3)} if spec_here.kv_heads else {EVEN_BLOCKS: (), BLOCKS: ()}
    )
    specs = [replace(spec, n_layer=spec_here.n_layer, kv_heads=kv_heads) for spec, kv_heads in heads.items()]
    with (
        kvg.Model(model_file(specs[0]), device=where.device) as even,
        kvg.Model(model_file(specs[1]), device=where.device) as odd,
    ):
        by_quantized = (small, even, odd if where.is_cpu() else even)
        yield lambda kv_types: by_quantized[sum(kind in QUANTIZED for kind in kv_types)]


@pytest.fixture
def ctx(small: kvg.Model) -> Iterator[kvg.Context]:
    """Twelve tokens that 0 and 1 share, twenty more of 0, ten of 1, six of 2; then holes in all of them."""
    with open_context(small, **OPTIONS) as ctx:
        populate(ctx)
        yield ctx


@pytest.mark.parametrize("kv_types", KV_TYPES, ids="-".join)
@pytest.mark.parametrize("target", [0, 1, 2, 3])
def test_a_sequence_comes_back_under_any_id(holder: Holder, target: int, kv_types: tuple[str, str]) -> None:
    """Into holes, beside others, over itself or over another one; it goes on as the original does."""
    model = holder(kv_types)
    options = {**OPTIONS, **dict(zip(("type_k", "type_v"), kv_types, strict=True))}
    with open_context(model, **options) as source, open_context(model, **options) as ctx:
        for each in (source, ctx):
            populate(each)
        blob = source.kv.save(seq=0)
        before = [contents(ctx.kv, seq) for seq in range(4)]
        ctx.kv.load(blob, seq=target)
        after = [contents(ctx.kv, seq) for seq in range(4)]
        assert after[target] == before[0]
        assert all(after[seq] == before[seq] for seq in range(4) if seq != target)
        seen = ctx.kv.cells().seq
        assert (seen[seen[:, target]].sum(axis=1) == 1).all()  # what came is nobody else's
        tokens = following(source.kv, 0)
        there = [token._replace(seq_ids=(target,)) for token in tokens]
        assert nmse(decode(ctx, there), decode(source, tokens)) <= where.limit(1e-6)


def test_into_scattered_holes(small: kvg.Model) -> None:
    """Every other cell is somebody's: what is loaded goes between, and is the same text."""
    with open_context(small, **OPTIONS) as source, open_context(small, **OPTIONS) as ctx:
        decode(source, run_of(random_ids(30, N_VOCAB)))
        blob = source.kv.save(seq=0)
        decode(ctx, [Token(5, i // 2, (i % 2,), logits=False) for i in range(80)])
        ctx.kv.seq_rm(1, 0, -1)
        others = contents(ctx.kv, 0)
        ctx.kv.load(blob, seq=3)
        places = np.flatnonzero(ctx.kv.cells().seq[:, 3])
        assert (np.diff(places) > 1).sum() >= 10
        assert contents(ctx.kv, 3) == contents(source.kv, 0)
        assert contents(ctx.kv, 0) == others
        tokens = following(source.kv, 0)
        there = [token._replace(seq_ids=(3,)) for token in tokens]
        assert nmse(decode(ctx, there), decode(source, tokens)) <= where.limit(1e-6)


def test_the_whole_cache(ctx: kvg.Context, small: kvg.Model) -> None:
    """Shared cells are one cell again; what was in the other cache is gone."""
    blob = ctx.kv.save()
    with open_context(small, **{**OPTIONS, "n_seq_max": 3, "n_ctx": 128}) as other:
        decode(other, run_of(random_ids(40, N_VOCAB, 9), 0, (2,)))
        other.kv.load(blob)
        assert other.kv.n_used == ctx.kv.n_used
        shapes = [
            sorted((int(c.pos[i]), seqs_of(c, i)) for i in np.flatnonzero(c.pos >= 0))
            for c in (ctx.kv.cells(), other.kv.cells())
        ]
        assert shapes[0] == shapes[1]
        for seq in range(3):
            assert contents(other.kv, seq) == contents(ctx.kv, seq)
        tokens = [token for seq in range(3) for token in following(ctx.kv, seq)]
        assert nmse(decode(other, tokens), decode(ctx, tokens)) <= where.limit(1e-6)


def test_what_was_saved_stays_what_it_was(ctx: kvg.Context, small: kvg.Model) -> None:
    """A blob is a copy: the cache may go on, and come back to it."""
    blob, before = ctx.kv.save(), held(ctx)
    expected = decode(ctx, following(ctx.kv, 0))
    ctx.kv.seq_keep(0)
    ctx.kv.seq_add(0, 0, -1, 5)
    ctx.kv.load(blob)
    assert held(ctx) == before
    assert nmse(decode(ctx, following(ctx.kv, 0)), expected) <= where.limit(1e-6)


def test_a_pending_shift_runs_before_saving(small: kvg.Model) -> None:
    """The position beside a saved K is the one that it was rotated for."""
    with open_context(small, **OPTIONS) as ctx, open_context(small, **OPTIONS) as updated:
        for each in (ctx, updated):
            decode(each, run_of(random_ids(40, N_VOCAB)))
            each.kv.seq_rm(0, 4, 10)
            each.kv.seq_add(0, 10, -1, -6)
        updated.kv.update()
        blob = ctx.kv.save(seq=0)
        assert not ctx.kv.cells().shift.any()
        assert ctx.kv.take_stats().shifted_cells == 30 * len(ctx.kv.groups)
        assert blob == updated.kv.save(seq=0)
        with open_context(small, **OPTIONS) as fresh:
            fresh.kv.load(blob, seq=2)
            assert not fresh.kv.cells().shift.any()
            assert contents(fresh.kv, 2) == contents(updated.kv, 0)


def test_a_pending_shift_of_the_others_outlives_loading(small: kvg.Model) -> None:
    """It is not forgotten; what is replaced takes its shift along."""
    with open_context(small, **OPTIONS) as ctx, open_context(small, **OPTIONS) as updated:
        for each in (ctx, updated):
            populate(each)
        blob = ctx.kv.save(seq=2)
        for each in (ctx, updated):
            each.kv.seq_add(0, 14, -1, 9)
            each.kv.seq_add(2, 0, -1, 4)
        updated.kv.update()
        expected = [contents(updated.kv, seq) for seq in range(2)]
        ctx.kv.take_stats()
        ctx.kv.load(blob, seq=2)
        assert ctx.kv.take_stats().graphs == 0
        cells = ctx.kv.cells()
        assert not cells.shift[cells.seq[:, 2]].any()
        assert cells.shift[cells.seq[:, 0] & (cells.pos >= 23)].all()
        assert [contents(ctx.kv, seq) for seq in range(2)] == expected
        assert ctx.kv.save(seq=2) == blob


def test_what_a_whole_state_replaces_is_not_shifted_first(small: kvg.Model) -> None:
    with open_context(small, **OPTIONS) as ctx:
        populate(ctx)
        blob, before = ctx.kv.save(), held(ctx)
        ctx.kv.take_stats()
        ctx.kv.seq_add(0, 0, -1, 9)
        ctx.kv.load(blob)
        assert ctx.kv.take_stats().shifted_cells == 0
        assert held(ctx) == before


def test_an_empty_sequence(ctx: kvg.Context, small: kvg.Model) -> None:
    blob = ctx.kv.save(seq=3)
    before = held(ctx)
    ctx.kv.load(blob, seq=2)  # empties it
    assert held(ctx) == [before[0], before[1], before[3], before[3]]
    with open_context(small, **OPTIONS) as empty:
        empty.kv.load(empty.kv.save())
        assert empty.kv.n_used == 0
        ctx.kv.load(empty.kv.save())
        assert ctx.kv.n_used == 0


def test_a_full_cache_is_replaced(small: kvg.Model) -> None:
    """What is loaded needs the cells of what it replaces: all of them."""
    options = {**OPTIONS, "n_ctx": 40, "n_seq_max": 2}
    with open_context(small, **options) as source, open_context(small, **options) as ctx:
        decode(source, run_of(random_ids(40, N_VOCAB)))
        decode(ctx, run_of(random_ids(39, N_VOCAB, 1), 0, (1,)))
        decode(ctx, [Token(5, 0, (0,))])
        ctx.kv.load(source.kv.save(), None)
        assert held(ctx)[0] == held(source)[0]
        ctx.kv.seq_keep(1)
        decode(ctx, run_of(random_ids(30, N_VOCAB, 1), 0, (1,)))
        source.kv.seq_rm(0, 10, -1)
        ctx.kv.load(source.kv.save(seq=0), 0)
        assert ctx.kv.n_used == 40
        ctx.kv.load(source.kv.save(seq=0), 0)  # once more, over itself
        assert ctx.kv.n_used == 40
        assert held(ctx)[0] == held(source)[0]


def test_no_room(ctx: kvg.Context, small: kvg.Model) -> None:
    with open_context(small, **{**OPTIONS, "n_ctx": 256, "n_seq_max": 2}) as source:
        decode(source, run_of(random_ids(200, N_VOCAB)))
        larger = source.kv.save(seq=0)
        n_free = ctx.kv.n_cells - ctx.kv.n_used
        source.kv.seq_rm(0, n_free + 1, -1)
        refused(ctx, kvg.CacheFullError, lambda: ctx.kv.load(source.kv.save(seq=0), 3), f"{n_free + 1} cells")
        refused(ctx, kvg.CacheFullError, lambda: ctx.kv.load(larger, 3))  # more than the cache itself
        source.kv.seq_rm(0, n_free, -1)
        ctx.kv.load(source.kv.save(seq=0), 3)
        assert ctx.kv.n_used == ctx.kv.n_cells


def test_shared_cells_are_kept_for_the_others(ctx: kvg.Context) -> None:
    """Replacing 0 frees only what nobody else sees: the twelve that 1 shares still take room."""
    n_shared = int((ctx.kv.cells().seq.sum(axis=1) > 1).sum())
    blob, n_used = ctx.kv.save(seq=0), ctx.kv.n_used
    ctx.kv.load(blob, seq=0)
    assert ctx.kv.n_used == n_used + n_shared


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        (ModelSpec(seed=1), "another model"),  # the same shape
        (ModelSpec(rope_base=500000.0), "another model"),  # the same weights
        (ModelSpec(n_layer=3), "another model"),
    ],
)
def test_another_model(model_file: ModelFile, ctx: kvg.Context, spec: ModelSpec, told: str) -> None:
    with kvg.Model(model_file(spec), device=where.device) as model, open_context(model, **OPTIONS) as other:
        decode(other, run_of(random_ids(20, N_VOCAB)))
        sequence, whole = other.kv.save(seq=0), other.kv.save()
    refused(ctx, kvg.StateError, lambda: ctx.kv.load(sequence, 0), told)
    refused(ctx, kvg.StateError, lambda: ctx.kv.load(whole), told)


def test_the_same_model_loaded_again(model_file: ModelFile, ctx: kvg.Context, spec_here: ModelSpec) -> None:
    """From another file too: it is the contents that count."""
    copy = model_file(spec_here).with_name("copy.gguf")
    copy.write_bytes(model_file(spec_here).read_bytes())
    with kvg.Model(copy, device=where.device) as model, open_context(model, **OPTIONS) as other:
        other.kv.load(ctx.kv.save())
        assert held(other) == held(ctx)


@pytest.mark.parametrize(
    "kv_types", [("f32", "f16"), ("f16", "f32"), ("f32", "f32"), ("bf16", "f16")], ids="-".join
)
def test_another_cache_type(small: kvg.Model, ctx: kvg.Context, kv_types: tuple[str, str]) -> None:
    with open_context(small, **OPTIONS, type_k=kv_types[0], type_v=kv_types[1]) as other:
        decode(other, run_of(random_ids(20, N_VOCAB)))
        blob = other.kv.save(seq=0)
    refused(ctx, kvg.StateError, lambda: ctx.kv.load(blob, 0), "type_")


def test_more_sequences_than_here(small: kvg.Model, ctx: kvg.Context) -> None:
    """Ids count that cells have, not those that the other cache could have had."""
    with open_context(small, **{**OPTIONS, "n_seq_max": 65}) as other:
        decode(other, run_of(random_ids(20, N_VOCAB), 0, (0, 3)))
        ctx.kv.load(other.kv.save())
        assert held(ctx)[3] == contents(other.kv, 3)
        other.kv.seq_cp(0, 64, 5, 6)
        blob = other.kv.save()
        refused(ctx, kvg.StateError, lambda: ctx.kv.load(blob), "sequence 64")
        ctx.kv.load(other.kv.save(seq=64), 2)
        assert ctx.kv.seq_pos_max(2) == 5


def test_damaged(ctx: kvg.Context) -> None:
    """The format's own tests damage thousands; here it is the cache that must not notice."""
    blob = ctx.kv.save()
    for place in (3, 20, 100, 115, len(blob) // 2, len(blob) - 1):
        changed = bytearray(blob)
        changed[place] ^= 16
        refused(ctx, kvg.StateError, lambda changed=changed: ctx.kv.load(changed))  # type: ignore[misc]
        refused(ctx, kvg.StateError, lambda place=place: ctx.kv.load(blob[:place]))  # type: ignore[misc]


def test_groups_that_disagree(ctx: kvg.Context) -> None:
    """Each group fits, and together they don't."""
    geometry = ctx.kv._handle.call(read_geometry)
    if len(geometry.groups) == 1:
        pytest.skip("there is one group")
    state = unpack(ctx.kv.save(), geometry)
    moved = replace(state.groups[1], pos=state.groups[1].pos + np.int32(1))
    blob = packed(geometry, SavedState(True, (state.groups[0], moved)))
    refused(ctx, kvg.StateError, lambda: ctx.kv.load(blob), "groups 0 and 1")


def test_what_is_not_finite(ctx: kvg.Context) -> None:
    """No state may bring it in; and where a model has made it, clear() ends it."""
    geometry = ctx.kv._handle.call(read_geometry)
    cells = unpack(ctx.kv.save(), geometry)
    # NaN in any type
    groups = tuple(replace(group, rows=np.full_like(group.rows, 0xFF)) for group in cells.groups)
    poisoned = SavedState(cells.whole, groups)
    blob = packed(geometry, poisoned)
    refused(ctx, kvg.StateError, lambda: ctx.kv.load(blob), "not finite")
    for clear in (ctx.kv.clear, ctx.reset):
        ctx.kv._handle.call(put, geometry, poisoned, None)
        assert np.isnan(ctx.kv.read_k(0)).any()
        clear()
        # the span that is attended is padded, over cells that are empty now
        assert np.isfinite(decode(ctx, run_of([5]))).all()
        for layer in range(ctx.model.n_layer):
            assert np.isfinite(ctx.kv.read_k(layer)).all()
            assert np.isfinite(ctx.kv.read_v(layer)).all()


def test_a_sequence_is_no_cache(ctx: kvg.Context) -> None:
    sequence, whole = ctx.kv.save(seq=1), ctx.kv.save()
    refused(ctx, kvg.InvalidArgumentError, lambda: ctx.kv.load(sequence), "seq=")
    refused(ctx, kvg.InvalidArgumentError, lambda: ctx.kv.load(whole, 0), "without seq")


@pytest.mark.parametrize("seq", [-1, 4, 2**31, 2**63, -(2**64), 1.0, "1", True])
def test_what_is_no_sequence(ctx: kvg.Context, seq: int) -> None:
    blob = ctx.kv.save(seq=0)
    refused(ctx, kvg.InvalidArgumentError, lambda: ctx.kv.save(seq), "seq")
    refused(ctx, kvg.InvalidArgumentError, lambda: ctx.kv.load(blob, seq), "seq")


@pytest.mark.parametrize("blob", [None, 5, "text", [1, 2], memoryview(bytes(400))[::2], b"", bytes(500)])
def test_what_is_no_blob(ctx: kvg.Context, blob: bytes) -> None:
    refused(ctx, (kvg.InvalidArgumentError, kvg.StateError), lambda: ctx.kv.load(blob))


def test_any_buffer_of_bytes(ctx: kvg.Context) -> None:
    blob, before = ctx.kv.save(), held(ctx)
    for buffer in (bytearray(blob), memoryview(blob), np.frombuffer(blob, np.uint8).data):
        ctx.kv.clear()
        ctx.kv.load(buffer)
        assert held(ctx) == before


def test_files(ctx: kvg.Context, tmp_path: Path) -> None:
    before = held(ctx)
    ctx.kv.save_file(tmp_path / "whole.kvg")
    ctx.kv.save_file(str(tmp_path / "one.kvg"), seq=1)
    assert (tmp_path / "whole.kvg").read_bytes() == ctx.kv.save()
    ctx.kv.clear()
    ctx.kv.load_file(str(tmp_path / "whole.kvg"))
    assert held(ctx) == before
    ctx.kv.load_file(tmp_path / "one.kvg", seq=3)
    assert held(ctx)[3] == before[1]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["one.kvg", "whole.kvg"]


def test_files_that_cannot_be(ctx: kvg.Context, tmp_path: Path) -> None:
    refused(ctx, FileNotFoundError, lambda: ctx.kv.load_file(tmp_path / "missing"))
    refused(ctx, FileNotFoundError, lambda: ctx.kv.save_file(tmp_path / "missing" / "state"))
    refused(ctx, IsADirectoryError, lambda: ctx.kv.load_file(tmp_path))
    refused(ctx, IsADirectoryError, lambda: ctx.kv.save_file(tmp_path))
    for path in (5, None, "a\0b"):
        for call in (ctx.kv.load_file, ctx.kv.save_file):
            refused(ctx, kvg.InvalidArgumentError, lambda c=call, p=path: c(p), "path")  # type: ignore[misc]
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(2**41)
    refused(ctx, kvg.StateError, lambda: ctx.kv.load_file(tmp_path / "sparse"))
    refused(ctx, kvg.StateError, lambda: ctx.kv.load_file("/dev/zero"))
    os.mkfifo(tmp_path / "pipe")
    refused(ctx, kvg.InvalidArgumentError, lambda: ctx.kv.save_file(tmp_path / "pipe"))
    (tmp_path / "junk").write_bytes(b"KVGSTATE junk")
    refused(ctx, kvg.StateError, lambda: ctx.kv.load_file(tmp_path / "junk"))
    ctx.kv.save_file(tmp_path / "state")
    with pytest.raises(kvg.InvalidArgumentError):
        ctx.kv.save_file(tmp_path / "state", seq=77)
    ctx.kv.load_file(tmp_path / "state")  # the old one is still there


def test_a_context_whose_model_was_closed(model_file: ModelFile, spec_here: ModelSpec) -> None:
    model = kvg.Model(model_file(spec_here), device=where.device)
    ctx, other = (open_context(model, **OPTIONS) for _ in range(2))
    populate(ctx)
    model.close()
    del model
    other.kv.load(ctx.kv.save())
    assert held(other) == held(ctx)
    ctx.close()
    other.close()


def test_closed(ctx: kvg.Context, tmp_path: Path) -> None:
    blob = ctx.kv.save()
    ctx.close()
    for call in (
        ctx.kv.save,
        lambda: ctx.kv.load(blob),
        lambda: ctx.kv.save_file(tmp_path / "state"),
    ):
        with pytest.raises(kvg.InvalidArgumentError, match="closed"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_positions_up_to_the_largest(small: kvg.Model) -> None:
    with open_context(small, **OPTIONS) as ctx:
        decode(ctx, [Token(5, 0), Token(6, 2**31 - 1)])
        blob = ctx.kv.save(seq=0)
        assert struct.unpack_from("<2i", blob, blob.index(b"CELL") + 40 + 16) == (0, 2**31 - 1)
        ctx.kv.clear()
        ctx.kv.load(blob, 1)
        assert (ctx.kv.seq_pos_min(1), ctx.kv.seq_pos_max(1)) == (0, 2**31 - 1)


def test_defrag_after_loading(ctx: kvg.Context) -> None:
    """Loaded cells move like all others, and a defrag that was asked for before is still done."""
    blob = ctx.kv.save(seq=0)
    ctx.kv.seq_rm(2, 2, 4)
    ctx.kv.defrag("sort")
    ctx.kv.load(blob, 3)
    before = held(ctx)
    assert ctx.kv.update().moved_cells > 0
    assert ctx.kv.n_kv == ctx.kv.n_used
    assert held(ctx) == before


def test_what_is_refused_leaves_the_shift_pending(small: kvg.Model) -> None:
    with open_context(small, n_ctx=16, n_seq_max=2) as ctx:
        decode(ctx, run_of(random_ids(10, N_VOCAB), 5))
        blob = ctx.kv.save(0)
        ctx.kv.seq_add(0, 0, -1, 5)
        before = ctx.kv.cells()
        with pytest.raises(kvg.InvalidArgumentError):
            ctx.kv.save(7)
        with pytest.raises(kvg.CacheFullError):
            ctx.kv.load(blob, 1)
        assert (ctx.kv.cells().shift[:10] == 5).all()
        assert same_cells(ctx.kv.cells(), before)
