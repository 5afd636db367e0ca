"""A model whose layers, and whose cells, are not all on one device; and all of them on it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines import Engine, Logits, decode, open_context, prompt_then_singles, random_ids, run_of
from support.every_op import OPTIONS, every_op, mean_error, on_cpu, worst_step
from support.faults import fault
from support.judge import judge
from support.kept_graphs import grow_graphs, saved_by_cpu
from support.models import N_VOCAB, ModelSpec

import pykvgraph as kvg

pytestmark = pytest.mark.gpu

LIMIT = 1e-3  # of a device's F16 maths
N_LAYER = 3
SPEC = ModelSpec(n_layer=N_LAYER, rope_factors=True)
HEADS_OF_64 = ModelSpec(n_layer=N_LAYER, n_head=4, n_head_kv=2, head_dim=64)
# n_gpu_layers, offload_kqv
SPLITS = {
    "all": (-1, True),
    "two": (2, True),
    "output": (1, True),
    "host": (-1, False),
    "two, host": (2, False),
}


@pytest.fixture(scope="module")
def path(model_file: Callable[[ModelSpec], Path]) -> Path:
    return model_file(SPEC)


@functools.cache
def expected(path: Path, kv_type: str) -> Any:
    return on_cpu(path, kv_type)


@pytest.fixture(scope="module")
def halves(device: str, path: Path) -> Iterator[kvg.Context]:
    """Layer 0 on the CPU, the others on the device."""
    with (
        kvg.Model(path, device=device, n_gpu_layers=N_LAYER) as model,
        open_context(model, **OPTIONS) as ctx,
    ):
        yield ctx


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
@pytest.mark.parametrize("split", SPLITS)
def test_every_operation(device: str, path: Path, split: str, kv_type: str) -> None:
    n_gpu_layers, offload_kqv = SPLITS[split]
    with (
        kvg.Model(path, device=device, n_gpu_layers=n_gpu_layers) as model,
        open_context(model, type_k=kv_type, type_v=kv_type, offload_kqv=offload_kqv, **OPTIONS) as ctx,
    ):
        assert worst_step(every_op(ctx), expected(path, kv_type)) <= LIMIT


@pytest.mark.parametrize("hadamard", [True, False])
@pytest.mark.parametrize("kv_type", ["bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("split", ["all", "two", "host", "two, host"])
def test_every_operation_in_small_types(
    device: str, model_file: Callable[[ModelSpec], Path], split: str, kv_type: str, hadamard: bool
) -> None:
    """Refused when the context is made, or as near to an F32 cache as on the CPU.

    In host memory there is nothing to refuse. Roundings to few bits go other ways there, so that two such
    caches are as far apart as both are from F32.
    """
    n_gpu_layers, offload_kqv = SPLITS[split]
    path = model_file(HEADS_OF_64)
    options = {"type_k": kv_type, "type_v": kv_type, "hadamard": hadamard, **OPTIONS}
    with kvg.Model(path, device="cpu") as model, open_context(model, **options) as ctx:
        there = every_op(ctx)
    with kvg.Model(path, device=device, n_gpu_layers=n_gpu_layers) as model:
        try:
            ctx = open_context(model, offload_kqv=offload_kqv, **options)
        except kvg.UnsupportedError as refused:
            assert offload_kqv, refused
            pytest.skip(str(refused))
        with ctx:
            exact = expected(path, "f32")
            assert mean_error(every_op(ctx), exact) <= 1.5 * mean_error(there, exact)


def shifted(engine: Engine) -> Logits:
    engine.decode(run_of(random_ids(50, N_VOCAB)))
    engine.seq_rm(0, 8, 24)
    engine.seq_add(0, 24, -1, -16)
    return prompt_then_singles(engine, random_ids(12, N_VOCAB, 1), 1, pos0=34)


@pytest.mark.parametrize("split", ["two", "host", "two, host"])
def test_logits_are_those_of_libllama(
    device: str, model_file: Callable[[ModelSpec], Path], split: str
) -> None:
    n_gpu_layers, offload_kqv = SPLITS[split]
    judge(
        model_file(HEADS_OF_64),
        shifted,
        device=device,
        slack=10,  # its kernels round more coarsely than the CPU's
        attentions=["off", "on", "auto"],
        n_gpu_layers=n_gpu_layers,
        offload_kqv=offload_kqv,
    )


@pytest.mark.parametrize("n", [0, 1, 2, N_LAYER, N_LAYER + 1, 99, -1])
def test_the_last_layers_go_there(device: str, path: Path, n: int) -> None:
    """As llama.cpp counts: the output is one more layer, and the first to go."""
    with kvg.Model(path, device=device, n_gpu_layers=n) as model:
        there = N_LAYER + 1 if n < 0 else min(n, N_LAYER + 1)
        assert model.layer_devices == ("CPU",) * (N_LAYER + 1 - there) + (device,) * there
        assert model.device == (device if there else "CPU")


def test_cells_lie_with_their_layers_or_on_the_host(device: str, path: Path) -> None:
    with kvg.Model(path, device=device, n_gpu_layers=N_LAYER) as model:
        for offload, n_there in ((True, N_LAYER - 1), (False, 0)):
            with open_context(model, offload_kqv=offload, **OPTIONS) as ctx:
                there, cpu = ctx.devices
                assert (there.device, cpu.device) == (device, "CPU")
                assert (there.n_layer, there.n_cache) == (N_LAYER - 1, n_there)
                assert (cpu.n_layer, cpu.n_cache) == (1, N_LAYER - n_there)
                assert there.cache_bytes + cpu.cache_bytes == ctx.kv.bytes
                assert cpu.attention == "attend"


@pytest.mark.parametrize("site", ["shift-build", "shift-alloc"])
@pytest.mark.parametrize("part", [1, 2])
def test_a_shift_that_one_device_has_no_memory_for(halves: kvg.Context, site: str, part: int) -> None:
    """Neither device rotates."""
    halves.reset()
    decode(halves, run_of(random_ids(20, N_VOCAB)))
    before = [halves.kv.read_k(layer) for layer in range(N_LAYER)]
    halves.kv.seq_add(0, 0, -1, 30)
    with fault(site, part), pytest.raises(kvg.DeviceError):
        halves.kv.update()
    halves.kv.seq_add(0, 0, -1, -30)
    assert all(np.array_equal(halves.kv.read_k(layer), before[layer]) for layer in range(N_LAYER))


@pytest.mark.parametrize("part", [1, 2])
def test_a_shift_that_one_device_fails_in(halves: kvg.Context, part: int) -> None:
    """Some K is rotated: nobody may use it before clear()."""
    halves.reset()
    decode(halves, run_of(random_ids(20, N_VOCAB)))
    halves.kv.seq_add(0, 0, -1, 30)
    with fault("shift-compute", part), pytest.raises(kvg.DeviceError, match="half way"):
        halves.kv.update()
    with pytest.raises(kvg.DeviceError, match="clear"):
        decode(halves, run_of([5], 50))
    halves.kv.clear()
    decode(halves, run_of([5]))


@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("site", ["defrag-build", "defrag-alloc", "defrag-compute"])
def test_a_defrag_that_one_device_fails_in(halves: kvg.Context, site: str, part: int) -> None:
    """Cells are where they were, and so is what they hold."""
    halves.reset()
    decode(halves, run_of(random_ids(40, N_VOCAB)))
    halves.kv.seq_rm(0, 5, 30)
    before = halves.kv.save(seq=0)
    halves.kv.defrag("fill")
    with fault(site, part), pytest.raises(kvg.DeviceError):
        halves.kv.update()
    assert halves.kv.n_kv == 40
    assert halves.kv.save(seq=0) == before
    assert halves.kv.update().moved_cells == 10
    assert halves.kv.n_kv == 15


def test_memory_is_predicted(device: str, path: Path) -> None:
    """Within 2% of what buffers take, for each of the three."""
    sizes: dict[str, Any] = {"n_ctx": 2000, "n_batch": 100, "n_ubatch": 100, "n_threads": 1}
    before = saved_by_cpu(path, 1900, **sizes)
    for n_gpu_layers, offload in ((-1, True), (2, True), (2, False)):
        options = {**sizes, "offload_kqv": offload}
        plan = kvg.plan_memory(path, device, n_gpu_layers=n_gpu_layers, **options)
        with (
            kvg.Model(path, device=device, n_gpu_layers=n_gpu_layers) as model,
            kvg.Context(model, **options) as ctx,
        ):
            grow_graphs(ctx, before)
            held = ctx.devices
            assert [part.device for part in plan] == [part.device for part in held]
            for predicted, part in zip(plan, held, strict=True):
                for name in ("weight_bytes", "cache_bytes", "compute_bytes"):
                    there = getattr(part, name)
                    assert abs(getattr(predicted, name) - there) <= 0.02 * there, (part.device, name)
            assert sum(part.weight_bytes for part in held) >= model.weight_bytes


def test_more_than_the_device_has(device: str, path: Path) -> None:
    """Both sizes are told, and nothing is allocated."""
    with kvg.Model(path, device=device) as model:
        with pytest.raises(kvg.DeviceError, match=rf"needs .* GiB on {device} and .* are free"):
            open_context(model, n_ctx=2**30)
        with open_context(model, n_ctx=256) as ctx:
            decode(ctx, run_of([5]))
