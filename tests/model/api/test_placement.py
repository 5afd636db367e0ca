"""Where layers may go, as far as a machine with nothing but a CPU can tell (tests/gpu has the rest)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.engines import decode, open_context, random_ids, run_of

import pykvgraph as kvg


@pytest.mark.parametrize("device", ["cpu", "CPU", "none", "NONE"])
@pytest.mark.parametrize("n_gpu_layers", [-(2**63), -1, 0, 3, 2**63 - 1])
def test_all_on_the_cpu(stories: Path, device: str, n_gpu_layers: int) -> None:
    with kvg.Model(stories, device=device, n_gpu_layers=n_gpu_layers) as model:
        assert model.device == "CPU"
        assert model.layer_devices == ("CPU",) * (model.n_layer + 1)


@pytest.mark.parametrize("device", ["", ",", "gpu", "CPU;", "Vulkan9", "auto,", "CPU,nobody"])
def test_no_such_device(stories: Path, device: str) -> None:
    with pytest.raises(kvg.DeviceError, match=r"no device that runs models is called .* there are: .*CPU"):
        kvg.Model(stories, device=device)


def test_the_devices_are_looked_for_before_their_shares(stories: Path) -> None:
    with pytest.raises(kvg.DeviceError, match="no device that runs models is called"):
        kvg.Model(stories, device="nobody," * 50 + "nobody", tensor_split=[1] * 51)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "cpu,CPU"}, "twice"),
        ({"device": 3}, "device"),
        ({"device": "cpu\0"}, "device"),
        ({"n_gpu_layers": 2**63}, "n_gpu_layers"),
        ({"n_gpu_layers": 1.0}, "n_gpu_layers"),
        ({"n_gpu_layers": None}, "n_gpu_layers"),
        ({"tensor_split": (1, 1)}, "tensor_split has 2 shares"),
        ({"tensor_split": (1,)}, "tensor_split has 1 shares for 0 devices"),
        ({"tensor_split": "1,1"}, "tensor_split"),
        ({"tensor_split": 3}, "tensor_split"),
        ({"tensor_split": (float("nan"),)}, r"tensor_split\[0\]"),
        ({"tensor_split": (1, -1)}, r"tensor_split\[1\]"),
        ({"tensor_split": [1] * 100_000}, "100000 shares"),
    ],
)
def test_what_is_no_placement(stories: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match=message):
        kvg.Model(stories, **{"device": "cpu", **arguments})


def test_offload_is_a_bool(small: kvg.Model) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match="offload_kqv"):
        open_context(small, offload_kqv="no")


def test_no_offload_changes_nothing_on_the_cpu(small: kvg.Model) -> None:
    tokens = run_of(random_ids(20, 288))
    with open_context(small, n_ctx=64) as ctx, open_context(small, n_ctx=64, offload_kqv=False) as other:
        assert (decode(ctx, tokens) == decode(other, tokens)).all()


def test_a_plan_needs_no_room(wide: kvg.Model) -> None:
    """A cache of terabytes is counted, not allocated; a context of it is refused with both sizes."""
    (part,) = kvg.plan_memory(wide.path, "cpu", n_ctx=2**30, type_k="f32", type_v="f32")
    assert part.cache_bytes == 2**30 * 2 * 4 * wide.n_layer * wide.n_head_kv * wide.head_dim
    assert part.compute_bytes >= 2**30 * 512 * 2  # the mask alone
    with pytest.raises(kvg.DeviceError, match=r"needs .* GiB on CPU and .* are free"):
        open_context(wide, n_ctx=2**30, type_k="f32", type_v="f32")


@pytest.mark.parametrize("options", [{"n_ctx": 0}, {"type_k": "q3"}, {"nonsense": 1}])
def test_a_plan_checks_its_context(stories: Path, options: dict[str, Any]) -> None:
    with pytest.raises((kvg.InvalidArgumentError, TypeError)):
        kvg.plan_memory(stories, "cpu", **options)
