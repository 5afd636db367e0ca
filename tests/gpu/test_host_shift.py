"""K of a device's cells, rotated by the CPU because the device can't, again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.drift import drifts
from support.engines import decode, open_context, random_ids, run_of
from support.every_op import OPTIONS, every_op, mean_error, on_cpu
from support.faults import fault
from support.models import N_VOCAB, ModelSpec

import pykvgraph as kvg

pytestmark = pytest.mark.gpu

N_LAYER = 3
SPEC = ModelSpec(n_layer=N_LAYER, n_head=4, n_head_kv=2, head_dim=64, rope_factors=True)


@pytest.fixture(scope="module")
def path(model_file: Callable[[ModelSpec], Path]) -> Path:
    return model_file(SPEC)


@pytest.mark.parametrize(
    "options",
    [
        {"type_k": "f16"},
        {"type_k": "q8_0", "hadamard": False},
        {"type_k": "q4_0", "type_v": "q8_0", "hadamard": True},
    ],
    ids=lambda options: options["type_k"],
)
@pytest.mark.parametrize("n_gpu_layers", [2, -1])
def test_every_operation_without_rope_there(
    device: str, path: Path, n_gpu_layers: int, options: dict[str, Any]
) -> None:
    """As near to an F32 cache as on the CPU."""
    with kvg.Model(path, device="cpu") as model, open_context(model, **options, **OPTIONS) as ctx:
        there = every_op(ctx)
    exact = on_cpu(path, "f32")
    with (
        fault("lacks-rope"),
        kvg.Model(path, device=device, n_gpu_layers=n_gpu_layers) as model,
        open_context(model, **options, **OPTIONS) as ctx,
    ):
        assert not ctx.devices[0].shift_on_device
        # of F16 what is left is the device's own maths
        assert mean_error(every_op(ctx), exact) <= max(1e-4, 1.5 * mean_error(there, exact))


@pytest.mark.parametrize(
    ("kv_type", "hadamard"), [("f16", False), ("q8_0", False), ("q4_0", False), ("q4_0", True)]
)
def test_a_hundred_small_shifts_dont_add_up(device: str, path: Path, kv_type: str, hadamard: bool) -> None:
    with fault("lacks-rope"), kvg.Model(path, device=device) as model:
        for n, drift in drifts(model, (-1,), type_k=kv_type, hadamard=hadamard):
            assert drift <= 1.5 * np.sqrt(n), n


@pytest.fixture
def shifted(device: str, path: Path) -> Iterator[kvg.Context]:
    """Layer 0 on the CPU, the others on a device that lacks rope; a shift waits."""
    with (
        fault("lacks-rope"),
        kvg.Model(path, device=device, n_gpu_layers=N_LAYER) as model,
        open_context(model, **OPTIONS) as ctx,
    ):
        decode(ctx, run_of(random_ids(20, N_VOCAB)))
        ctx.kv.seq_add(0, 0, -1, 5)
        yield ctx


@pytest.mark.parametrize(("site", "countdown"), [("shift-build", 1), ("shift-build", 2), ("shift-alloc", 1)])
def test_without_memory_nothing_is_rotated(shifted: kvg.Context, site: str, countdown: int) -> None:
    """For the CPU's own graph, before it runs."""
    with fault(site, countdown), pytest.raises((kvg.DeviceError, MemoryError)):
        shifted.kv.update()
    assert (shifted.kv.cells().shift[:20] == 5).all()
    shifted.kv.seq_add(0, 0, -1, -5)  # back, so that nothing waits
    rows = [shifted.kv.read_k(layer) for layer in range(N_LAYER)]
    shifted.kv.seq_add(0, 0, -1, 5)
    assert shifted.kv.update().shifted_cells == 20
    for layer, before in enumerate(rows):
        assert np.abs(shifted.kv.read_k(layer) - before)[:20].max() > 0.1


@pytest.mark.parametrize("countdown", [1, 2, 3])
def test_a_failure_half_way(shifted: kvg.Context, countdown: int) -> None:
    """In the CPU's own layer, and in either of the device's: nobody may use K before clear()."""
    with fault("shift-compute", countdown), pytest.raises(kvg.DeviceError, match="half way"):
        shifted.kv.update()
    with pytest.raises(kvg.DeviceError, match="clear"):
        decode(shifted, run_of([5], 3000))
    shifted.kv.clear()
    decode(shifted, run_of([5]))
