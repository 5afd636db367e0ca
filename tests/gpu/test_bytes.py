"""What is saved or rotated for a device has the same bytes as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.engines import Token, decode, open_context, random_ids, run_of
from support.faults import fault
from support.judge import nmse
from support.models import N_VOCAB, ModelSpec

import pykvgraph as kvg

pytestmark = pytest.mark.gpu

HEADS_OF_64 = ModelSpec(n_layer=2, n_head=4, n_head_kv=2, head_dim=64, rope_factors=True)


def interleaved(n: int, n_seq: int) -> list[Token]:
    """Tokens of sequences by turns."""
    return [Token(token, i // n_seq, (i % n_seq,)) for i, token in enumerate(random_ids(n, N_VOCAB))]


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_a_state_is_the_same_everywhere(
    device: str, model_file: Callable[[ModelSpec], Path], kv_type: str
) -> None:
    """There, here and back, from scattered cells."""
    path = model_file(HEADS_OF_64)
    options = {"n_ctx": 256, "n_seq_max": 2, "type_k": kv_type, "type_v": kv_type, "defrag_threshold": -1}
    with (
        kvg.Model(path, device="cpu") as here,
        kvg.Model(path, device=device) as there,
        open_context(here, **options) as ours,
        open_context(there, **options) as theirs,
    ):
        decode(theirs, interleaved(120, 2))
        blob = theirs.kv.save(seq=1)  # every other cell
        ours.kv.load(blob, seq=0)
        assert ours.kv.save(seq=0) == blob
        theirs.kv.load(ours.kv.save(seq=0), seq=1)
        assert theirs.kv.save(seq=1) == blob


@pytest.mark.parametrize(("kv_type", "hadamard"), [("f16", False), ("q8_0", True), ("q4_0", False)])
def test_rows_rotated_by_the_cpu_for_a_device_have_the_same_bytes(
    device: str, model_file: Callable[[ModelSpec], Path], kv_type: str, hadamard: bool
) -> None:
    """The same rows through the same shifts: the same bytes; what stays, stays."""
    path = model_file(HEADS_OF_64)
    options = {"n_ctx": 256, "n_seq_max": 2, "type_k": kv_type, "hadamard": hadamard, "defrag_threshold": -1}
    states = []
    with (
        fault("lacks-rope"),
        kvg.Model(path, device="cpu") as here,
        kvg.Model(path, device=device) as there,
        open_context(there, **options) as source,
    ):
        decode(source, interleaved(120, 2))
        blob = source.kv.save()
        for model in (here, there):
            with open_context(model, **options) as ctx:
                ctx.kv.load(blob)
                for delta in (40, -7, 3):
                    ctx.kv.seq_add(1, 10, -1, delta)
                    ctx.kv.update()
                states.append(ctx.kv.save())
                assert ctx.kv.save(seq=0) == source.kv.save(seq=0)
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("kv_type", "hadamard"),
    [("f32", False), ("f16", False), ("bf16", False), ("q8_0", True), ("q4_0", False)],
)
def test_rows_are_rotated_there_as_here(
    device: str, model_file: Callable[[ModelSpec], Path], kv_type: str, hadamard: bool
) -> None:
    """In runs and one by one, some more often than others: the same dither, and nearly the same roundings."""
    path = model_file(HEADS_OF_64)
    options = {"n_ctx": 768, "n_seq_max": 2, "type_k": kv_type, "hadamard": hadamard, "defrag_threshold": -1}
    found = []
    with kvg.Model(path, device="cpu") as here, kvg.Model(path, device=device) as there:
        with open_context(here, **options, n_batch=768) as source:
            decode(source, interleaved(120, 2))
            decode(source, run_of(random_ids(600, N_VOCAB), 60))
            blob = source.kv.save()
        for model in (here, there):
            # over ggml's own attention K doesn't wait
            with open_context(model, **options, flash_attn="on" if model is here else "auto") as ctx:
                ctx.kv.load(blob)
                for p0, p1, delta in ((100, 400, 40), (30, -1, -7), (0, -1, 3), (300, 500, 5)):
                    ctx.kv.seq_add(0, p0, p1, delta)
                    ctx.kv.update()
                assert sorted(set(ctx.kv.cells().dither)) == [0, 1, 3, 4]
                still = ctx.kv.save(seq=1)
                rows = [ctx.kv.read_k(layer)[:720] for layer in range(model.n_layer)]
                found.append((still, ctx.kv.cells().dither, np.concatenate(rows)))
    (still, dither, here_k), (still_there, dither_there, there_k) = found
    assert still_there == still
    assert np.array_equal(dither_there, dither)
    n_rows = len(here_k)
    limit = {"f32": 1e-9, "f16": 1e-9, "bf16": 1e-7, "q8_0": 1e-6, "q4_0": 1e-4}[kv_type]
    assert nmse(there_k.reshape(n_rows, -1), here_k.reshape(n_rows, -1)) <= limit
