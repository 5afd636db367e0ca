"""`scatter` and `gather`: rows of a part of a sequence, in chunks of 100 cells, from any cells into any."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import chance
from support.architectures import ArchSpec
from support.damage import damage
from support.engines import decode, open_context, random_ids, run_of
from support.models import N_VOCAB, SMALL, ModelSpec
from support.streams import TIMEOUT, Ends, all_of, beside, connect, fill_with_holes, greedy, pair

import pykvgraph as kvg
from pykvgraph import stream
from pykvgraph.errors import TransportError

from .test_sequences import CASES, GEMMA, LLAMA, N_LAYER, case_id, rows_by_position

OPTIONS: dict[str, Any] = {"n_ctx": 512, "n_batch": 16, "n_seq_max": 4, "defrag_threshold": -1}
HEADS_OF_32 = ModelSpec(n_layer=2, n_head=2, n_head_kv=2)
N = 250  # three chunks, of which the last one is not full


def carry(
    source: kvg.Context, seq: int, target: kvg.Context, to: int, ends: Ends, p0: int = 0, p1: int = -1
) -> None:
    """Positions [p0, p1) of the sequence, from one context into another one."""
    sent = [beside(lambda each=each: stream.scatter(source, seq, each, p0, p1)) for each in ends.out]  # type: ignore[misc]
    with all_of(sent), stream.gather(target, ends.into) as cells:
        has_windows = any(group.kind == "window" for group in target.kv.groups)
        (cells.show_text if has_windows else cells.show)(to)


@pytest.mark.parametrize("p, q", [(1, 1), (2, 3), (3, 2), (5, 1)])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_any_split_to_any_other(
    architecture: Callable[[ArchSpec], Path], case: tuple[ArchSpec, dict[str, str]], p: int, q: int
) -> None:
    """Byte for byte, in as many regions as the layout says; who is there already is left alone."""
    spec, types = case
    with (
        kvg.Model(architecture(spec)) as model,
        open_context(model, **OPTIONS, **types) as source,
        open_context(model, **OPTIONS, **types) as target,
    ):
        fill_with_holes(source, N, 10 * p + q)
        fill_with_holes(target, 20, p + 10 * q, 3)
        before = target.kv.save(3)
        ends = connect(N_LAYER, p, q)
        carry(source, 0, target, 1, ends)
        assert target.kv.save(3) == before
        ours, theirs = rows_by_position(source, 0), rows_by_position(target, 1)
        assert len(ours) == len(theirs) > 0
        assert all(map(np.array_equal, ours, theirs))
        n_cells = [
            (group.layers, int(source.kv.cells(index).seq[:, 0].sum()))
            for index, group in enumerate(source.kv.groups)
            if group.kind != "state"
        ]
        for layout in ends.out:
            for transport, layers in layout.parts:
                own = sum(-(-n // 100) for of_group, n in n_cells if set(of_group) & set(layers))
                assert transport.flushes == 2 + own


@pytest.mark.parametrize("spec", [LLAMA, GEMMA], ids=str)
def test_the_text_goes_on(architecture: Callable[[ArchSpec], Path], spec: ArchSpec) -> None:
    with (
        kvg.Model(architecture(spec)) as model,
        open_context(model, **OPTIONS) as source,
        open_context(model, **OPTIONS) as target,
    ):
        fill_with_holes(source, N, 3)
        carry(source, 0, target, 1, connect(N_LAYER, 1, 2))
        assert greedy(target, 1, 8) == greedy(source, 0, 8)


def test_parts_come_one_after_the_other(small: kvg.Model) -> None:
    """[0, 30), [30, 217) and the rest make the sequence; a part of nothing changes nothing."""
    with open_context(small, **OPTIONS) as source, open_context(small, **OPTIONS) as target:
        fill_with_holes(source, N, 5)
        for p0, p1 in ((0, 30), (30, 217), (217, 217), (217, -1), (N, -1)):
            ends = connect(2)
            carry(source, 0, target, 2, ends, p0, p1)
            n = (p1 if p1 >= 0 else N) - p0
            assert [transport.flushes for transport, _ in ends.out[0].parts] == [2 + -(-n // 100)]
            assert target.kv.seq_pos_max(2) == (p1 if p1 >= 0 else N) - 1
        assert target.kv.save(2) == source.kv.save(0)
        assert greedy(target, 2, 8) == greedy(source, 0, 8)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_what_was_shifted(model_file: Callable[[ModelSpec], Path], kv_type: str) -> None:
    """A pending shift is done first; the dither that K carries then goes along."""
    options = {**OPTIONS, "type_k": kv_type, "type_v": kv_type}
    with (
        kvg.Model(model_file(HEADS_OF_32)) as model,
        open_context(model, **options) as source,
        open_context(model, **options) as target,
    ):
        decode(source, run_of(random_ids(16, N_VOCAB)))
        for at in range(16, 144, 16):
            decode(source, run_of(random_ids(16, N_VOCAB, at), at))
        source.kv.seq_rm(0, 10, 40)
        source.kv.seq_add(0, 40, -1, -30)
        carry(source, 0, target, 1, connect(2))
        assert target.kv.save(1) == source.kv.save(0)
        assert target.kv.cells().dither.any()


def test_what_cannot_be_taken(small: kvg.Model, model_file: Callable[[ModelSpec], Path]) -> None:
    """Nothing is changed anywhere, and the error says why."""
    with (
        kvg.Model(model_file(ModelSpec(seed=SMALL.seed + 1))) as other,
        open_context(other, **OPTIONS) as of_another_model,
        open_context(small, **{**OPTIONS, "type_v": "f32"}) as of_another_type,
        open_context(small, **OPTIONS) as source,
        open_context(small, **{**OPTIONS, "n_ctx": 256}) as target,
    ):
        for ctx in (of_another_model, of_another_type, source):
            fill_with_holes(ctx, N, 1)
        decode(target, run_of(random_ids(10, N_VOCAB), 0, (3,)))
        before = target.kv.save()
        for ctx, error, match in (
            (of_another_model, kvg.StateError, "another model"),
            (of_another_type, kvg.StateError, "type_v"),
            (source, kvg.CacheFullError, None),
        ):
            ends = connect(2, 2, 1)
            with pytest.raises(error, match=match):
                carry(ctx, 0, target, 1, ends)
            assert target.kv.save() == before and target.kv.n_used == 10
        assert target.kv.n_cells == 256

        ends = connect(2)
        stream.scatter(source, 0, ends.out[0], 0, 8)
        with pytest.raises(kvg.StateError, match="gather"):
            stream.stream_in(target, 1, ends.into)
        ends = connect(2)
        stream.stream_out(of_another_type, 0, ends.out[0])
        with pytest.raises(kvg.StateError, match="stream_in"):
            stream.gather(target, ends.into)
        one, _ = pair()
        with pytest.raises(kvg.InvalidArgumentError, match="no transport for layer 1"):
            stream.gather(target, stream.Layout({one: range(1)}))
        for wrong in ({"seq": 4}, {"seq": 0, "p0": -1}, {"seq": 0, "p1": 1.5}):
            with pytest.raises(kvg.InvalidArgumentError):
                stream.scatter(source, layout=connect(2).out[0], **wrong)
        assert target.kv.save() == before


@pytest.mark.parametrize("p1", [20, 40, 46, 50, 52, 60])
def test_a_part_whose_window_is_lost(architecture: Callable[[ArchSpec], Path], p1: int) -> None:
    """With all that its window needs it goes on as if it had been decoded there; else it is refused."""
    with (
        kvg.Model(architecture(GEMMA)) as model,
        open_context(model, **OPTIONS) as source,
        open_context(model, **OPTIONS) as target,
        open_context(model, **OPTIONS) as expected,
    ):
        fill_with_holes(source, 60, 3)
        for begin in range(0, p1, 10):
            decode(expected, run_of(random_ids(60, N_VOCAB, 7)[begin : min(begin + 10, p1)], begin))
        (window,) = (i for i, group in enumerate(source.kv.groups) if group.kind == "window")
        cells = source.kv.cells(window)
        kept = cells.pos[cells.seq[:, 0]]
        carry(source, 0, target, 1, connect(N_LAYER), 0, p1)
        if kept.min() > p1 - GEMMA.window + 1:
            with pytest.raises(kvg.InvalidArgumentError, match="lost"):
                greedy(target, 1, 5)
        else:
            assert greedy(target, 1, 5) == greedy(expected, 0, 5)


def test_cells_that_share_a_position(small: kvg.Model) -> None:
    with open_context(small, **OPTIONS) as source:
        fill_with_holes(source, 60, 3)
        source.kv.seq_div(0, 0, -1, 3)
        with pytest.raises(kvg.UnsupportedError, match="seq_div"):
            stream.scatter(source, 0, connect(2).out[0])
        with pytest.raises(kvg.InvalidArgumentError, match="Context"):
            stream.scatter(None, 0, connect(2).out[0])  # type: ignore[arg-type]


def test_a_sender_that_goes_away(small: kvg.Model) -> None:
    """What has come is given up."""
    with open_context(small, **OPTIONS) as source, open_context(small, **OPTIONS) as target:
        fill_with_holes(source, N, 1)
        regions = sent_regions(source)
        for n in range(len(regions)):
            one, other = pair()
            for key, data in regions[:n]:
                one.flush(key, data)
            one.close()
            with pytest.raises(TransportError):
                stream.gather(target, stream.Layout({other: range(2)}))
            assert target.kv.n_used == 0
        decode(target, run_of(random_ids(16, N_VOCAB)))


@pytest.mark.parametrize("seed", range(2))
def test_hostile_senders(small: kvg.Model, seed: int) -> None:
    """One region of each stream is damaged: a typed error, or rows that nobody can tell from others."""
    rng = random.Random(chance.seed(seed))
    with open_context(small, **OPTIONS) as source, open_context(small, **OPTIONS) as target:
        fill_with_holes(source, 130, 1)
        regions = sent_regions(source)
        decode(target, run_of(random_ids(16, N_VOCAB), 0, (3,)))
        before, n_taken = target.kv.save(3), 0
        for _ in range(300):
            one, other = pair(timeout=2)
            at = rng.randrange(len(regions))
            for index, (key, data) in enumerate(regions):
                one.flush(key, damage(rng, data, 64) if index == at else data)
            one.close()
            try:
                with stream.gather(target, stream.Layout({other: range(2)})) as cells:
                    cells.show(0)
                n_taken += 1
            except kvg.KVGraphError:
                pass
            target.kv.seq_rm(0, 0, -1)
            assert target.kv.save(3) == before and target.kv.n_used == 16
        assert 0 < n_taken < 300
        assert len(greedy(target, 3, 3)) == 4


def sent_regions(source: kvg.Context) -> list[tuple[str, bytes]]:
    """What scatter() sends of sequence 0, in order."""
    found: list[tuple[str, bytes]] = []

    class Noted(type(pair()[0])):  # type: ignore[misc]
        def _send(self, key: str, data: memoryview) -> None:
            found.append((key, bytes(data)))

    one = Noted(f"memory:{id(found)}", TIMEOUT, 1 << 28)
    stream.scatter(source, 0, stream.Layout({one: range(2)}))
    one.close()
    return found
