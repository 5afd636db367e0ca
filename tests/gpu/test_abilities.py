"""What a device lacks: the CPU does it in a decode, and what can't be done is refused beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.engines import decode, open_context, random_ids, run_of
from support.faults import fault
from support.judge import nmse
from support.models import N_VOCAB, SMALL, ModelSpec

import pykvgraph as kvg

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def path(model_file: Callable[[ModelSpec], Path]) -> Path:
    return model_file(SMALL)


def test_a_device_that_can_all(device: str, path: Path) -> None:
    for cache_type in ("f16", "f32"):
        answer = kvg.abilities(path, device, cache_type)
        assert answer.shift_on_device and answer.can_defrag
        assert (answer.fallbacks, answer.refused) == ((), "")


def test_a_device_without_rope(device: str, path: Path, small: kvg.Model) -> None:
    ids = run_of(random_ids(30, N_VOCAB))
    with open_context(small, n_ctx=256) as ctx:
        expected = decode(ctx, ids)
    with kvg.Model(path, device=device) as model, fault("lacks-rope"):
        answer = kvg.abilities(path, device)
        assert (answer.fallbacks, answer.shift_on_device, answer.can_defrag) == (("ROPE",), False, True)
        with open_context(model, n_ctx=256) as ctx:
            assert ctx.devices[0].fallbacks == ("ROPE",)
            assert nmse(decode(ctx, ids), expected) <= 1e-3
            assert (ctx.devices[0].shift_on_device, ctx.devices[1].shift_on_device) == (False, True)


@pytest.mark.parametrize("tied", [False, True])
def test_a_matrix_that_is_too_large_for_it(
    device: str, model_file: Callable[[ModelSpec], Path], tied: bool
) -> None:
    """The CPU multiplies that one, and the device the others."""
    path = model_file(replace(SMALL, tied=tied))
    ids = run_of(random_ids(30, N_VOCAB))
    with kvg.Model(path, device="cpu") as model, open_context(model, n_ctx=256) as ctx:
        expected = decode(ctx, ids)
        assert model.kept_on_cpu == ()
    name = "token_embd.weight" if tied else "output.weight"
    with fault("lacks-large-mul-mat"), kvg.Model(path, device=device) as model:
        assert model.kept_on_cpu == (f"{device} can't multiply weights of 0.07 MiB in one tensor ('{name}')",)
        assert set(model.layer_devices) == {device}
        with open_context(model, n_ctx=256) as ctx:
            assert ctx.devices[0].fallbacks == ("MUL_MAT",)
            assert nmse(decode(ctx, ids), expected) <= 1e-3
            planned = kvg.plan_memory(path, device=device, n_ctx=256)
            assert [part.weight_bytes for part in planned] == [part.weight_bytes for part in ctx.devices]


def test_a_model_that_it_cant_run(device: str, path: Path) -> None:
    """Weights that it has no matrix product for: said so, and the CPU has one."""
    with fault("lacks-mul-mat"):
        answer = kvg.abilities(path, device)
        assert not (answer.shift_on_device or answer.can_defrag)
        with pytest.raises(kvg.UnsupportedError, match=f"{device} can't multiply weights of type") as raised:
            kvg.Model(path, device=device)
        assert answer.refused == str(raised.value)
        assert kvg.abilities(path, "cpu").refused == ""
