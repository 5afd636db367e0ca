"""A plan for two devices beside what a context has on each; benchmarks/planned.py has more models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.architectures import ArchSpec
from support.planned import MODELS, compare

import pykvgraph as kvg
from pykvgraph.plan.fitting import fit_n_ctx

pytestmark = pytest.mark.gpu

# fewer rows to normalize, which is what a software device takes its time for
GEMMA4 = replace(MODELS[8], n_layer=4, period=2, n_head=2, n_head_kv=1, n_head_kv_window=2)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("spec", [MODELS[1], MODELS[5], MODELS[9]], ids=str)
def test_what_is_planned_is_allocated(
    device: str, architecture: Callable[[ArchSpec], Path], spec: ArchSpec, kv_type: str
) -> None:
    """The last half of the layers is on the device: weights, cells and graphs of both, each within 2 %."""
    path, n_gpu_layers = architecture(spec), spec.n_layer // 2 + 1
    try:
        found = list(compare(path, device, kv_type, n_gpu_layers))
    except kvg.UnsupportedError as refused:
        with kvg.Model(path, device=device, n_gpu_layers=n_gpu_layers) as model, pytest.raises(type(refused)):
            kvg.Context(model, n_ctx=256, type_k=kv_type, type_v=kv_type)
        pytest.skip(str(refused))
    assert {each.device for each in found} == {device, "CPU"}
    for each in found:
        assert each.error <= 0.02, each


@pytest.mark.parametrize("spec", [MODELS[0], GEMMA4, MODELS[10]], ids=str)
def test_with_cells_in_host_memory(
    device: str, architecture: Callable[[ArchSpec], Path], spec: ArchSpec
) -> None:
    """All layers are on the device, which has room for K and V of two of them, and for the graphs."""
    found = list(compare(architecture(spec), device, "f16", kv_tier="host"))
    assert {each.kind for each in found if each.device == device} >= {"cache_bytes", "compute_bytes"}
    for each in found:
        assert each.error <= 0.02, each


def test_more_cells_than_a_device_takes_in_one_tensor(device: str, stories: Path) -> None:
    """ggml would end the process: the driver's shaders read a part of what memory there is."""
    sizes: Any = {"n_batch": 1, "n_ubatch": 1}
    if not device.startswith("Vulkan"):
        pytest.skip("no limit is known")
    with pytest.raises(kvg.DeviceError, match="smaller n_ctx"):
        kvg.plan_memory(stories, device, n_ctx=1 << 30, **sizes)
    fit = fit_n_ctx(stories, 1 << 30, device=device, **sizes)
    assert (256 <= fit.n_ctx < 1 << 30) and fit.full
