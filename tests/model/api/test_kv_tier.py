"""Context(kv_tier=, device_layers=), as far as that needs no device but the CPU: ../../gpu has the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines import decode, open_context, random_ids, run_of
from support.models import N_VOCAB

import pykvgraph as kvg


def test_on_the_cpu_all_is_in_host_memory_already(small: kvg.Model) -> None:
    with open_context(small, n_ctx=64) as plain, open_context(small, n_ctx=64, kv_tier="host") as ctx:
        assert (plain.kv_tier, plain.device_layers, ctx.kv_tier) == ("device", 2, "host")
        assert ctx.devices == plain.devices
        ids = run_of(random_ids(40, N_VOCAB))
        assert np.array_equal(decode(ctx, ids), decode(plain, ids))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_tier": "disk"}, r"kv_tier must be one of 'device', 'host', 'auto', got 'disk'"),
        ({"kv_tier": None}, "kv_tier"),
        ({"device_layers": 0}, "device_layers"),
        ({"device_layers": -1}, "device_layers"),
        ({"device_layers": 2**40}, "device_layers"),
        ({"device_layers": "2"}, "device_layers"),
        ({"kv_tier": "host", "offload_kqv": False}, "offload_kqv=False"),
    ],
)
def test_refused(small: kvg.Model, options: dict[str, Any], message: str) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match=message):
        open_context(small, **options)


def test_a_plan_takes_it_too(stories: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "n_ctx": 256}
    assert kvg.plan_memory(stories, **options, kv_tier="host") == kvg.plan_memory(stories, **options)


def test_nothing_to_trace(small: kvg.Model, tmp_path: Path) -> None:
    with open_context(small, n_ctx=64, kv_tier="host") as ctx:
        with pytest.raises(kvg.UnsupportedError, match="on a device"):
            ctx.trace(tmp_path / "trace.json")
        assert not (tmp_path / "trace.json").exists()
