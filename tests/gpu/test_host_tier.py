"""K and V in host memory, attention on the device (kv_tier="host"): as with cells on the device itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.architectures import ArchSpec
from support.engines import Logits, Token, decode, open_context, prompt_then_singles, random_ids, run_of
from support.every_op import OPTIONS, every_op, on_cpu, worst_step
from support.faults import fault
from support.judge import judge, nmse
from support.judged_elsewhere import SLACK
from support.models import N_VOCAB, ModelSpec
from support.rpc_server import TESTS, rpc_server

import pykvgraph as kvg

pytestmark = pytest.mark.gpu

Architecture = Callable[[ArchSpec], Path]
N_LAYER = 5
SPEC = ModelSpec(n_layer=N_LAYER, n_head=4, n_head_kv=2, head_dim=16, rope_factors=True)
HEADS_OF_64 = ModelSpec(n_layer=N_LAYER, n_head=4, n_head_kv=2, head_dim=64)  # CUDA has no flash for 16
PLAIN = ArchSpec("llama", N_LAYER)
WINDOWS = ArchSpec("gemma3", 5, window=12, period=3)
SHARED = ArchSpec("gemma4", 8, window=12, head_dim_window=64, n_shared=4, n_embd_layer=32)
HYBRID = ArchSpec("qwen35", 6, period=2, state_heads=4, n_rot=8, n_head=8)
BOTH_AT_ONCE = ArchSpec("falcon-h1", 3, state_heads=8)
LATENT = ArchSpec("kimi-linear", 4, n_head_kv=1, state_heads=4, n_expert=2, n_ff_shared=96, rank=48)
MODELS = [PLAIN, WINDOWS, SHARED, HYBRID, BOTH_AT_ONCE, LATENT]
SAME = 1e-6  # the CPU rotates K where the device did


@pytest.fixture(scope="module")
def path(model_file: Callable[[ModelSpec], Path]) -> Path:
    return model_file(SPEC)


@pytest.fixture
def ctx(device: str, path: Path) -> Iterator[kvg.Context]:
    with kvg.Model(path, device=device) as model, open_context(model, kv_tier="host", **OPTIONS) as ctx:
        yield ctx


def a_life(ctx: kvg.Context) -> list[Logits]:
    """What every kind of cache can do: a prompt in two micro-batches, two sequences, a shift, a save."""
    kv = ctx.kv
    rows = [decode(ctx, run_of(random_ids(30, N_VOCAB)))]
    rows += [decode(ctx, [Token(7 + i, 30 + i)]) for i in range(3)]
    kv.seq_cp(0, 1, 0, -1)
    rows.append(decode(ctx, [Token(5, 33, (0,)), Token(6, 33, (1,))]))
    kv.load(kv.save(seq=1), seq=2)
    rows.append(decode(ctx, run_of(random_ids(20, N_VOCAB, 3), 34, (2,))))
    kv.seq_rm(0, 0, -1)
    kv.defrag("sort")
    kv.seq_add(1, 0, -1, 9)
    rows.append(decode(ctx, [Token(9, 43, (1,)), Token(8, 54, (2,))]))
    return rows


@pytest.mark.parametrize("device_layers", [1, 2, 3, 99])
@pytest.mark.parametrize("swa_full", [False, True], ids=["bounded", "swa_full"])
@pytest.mark.parametrize("spec", MODELS, ids=str)
def test_as_with_cells_on_the_device(
    device: str, architecture: Architecture, spec: ArchSpec, swa_full: bool, device_layers: int
) -> None:
    if swa_full and not spec.window:
        pytest.skip("no windows")
    options = {"n_ctx": 300, "n_ubatch": 16, "n_batch": 32, "n_seq_max": 3, "swa_full": swa_full}
    tier = {"kv_tier": "host", "device_layers": device_layers}
    with (
        kvg.Model(architecture(spec), device=device) as model,
        open_context(model, **options) as expected,
        open_context(model, **options, **tier) as ctx,
    ):
        assert worst_step(a_life(ctx), a_life(expected)) <= SAME


@pytest.mark.parametrize(
    ("spec", "resident_layers"),
    [
        (ArchSpec("mamba2", state_heads=4, state_dim=16), 0),
        (ArchSpec("qwen35", n_layer=8, period=4, state_heads=4), 2),
    ],
    ids=str,
)
def test_layers_of_which_none_has_a_turn(
    device: str, architecture: Architecture, spec: ArchSpec, resident_layers: int
) -> None:
    with (
        kvg.Model(architecture(spec), device=device) as model,
        open_context(model, **OPTIONS) as expected,
        open_context(model, kv_tier="host", resident_layers=resident_layers, **OPTIONS) as ctx,
    ):
        rows = [[decode(each, run_of(random_ids(20, N_VOCAB))), each.append(7)] for each in (ctx, expected)]
        assert worst_step(*rows) <= SAME


@pytest.mark.parametrize("n_gpu_layers", [-1, 3])
@pytest.mark.parametrize("kv_type", ["f16", "f32"])
def test_every_operation(device: str, path: Path, kv_type: str, n_gpu_layers: int) -> None:
    types = {"type_k": kv_type, "type_v": kv_type}
    with (
        kvg.Model(path, device=device, n_gpu_layers=n_gpu_layers) as model,
        open_context(model, kv_tier="host", **types, **OPTIONS) as ctx,
    ):
        assert worst_step(every_op(ctx), on_cpu(path, kv_type)) <= 1e-3


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0", "bf16"])
def test_small_types(device: str, model_file: Callable[[ModelSpec], Path], kv_type: str) -> None:
    """Rows are mixed and quantized on the device, and rotated by the CPU."""
    path = model_file(ModelSpec(n_layer=3, n_head=4, n_head_kv=2, head_dim=64))
    options: dict[str, Any] = {"type_k": kv_type, "type_v": kv_type, **OPTIONS}
    with kvg.Model(path, device=device) as model:
        try:
            ctx = open_context(model, **options)
        except kvg.UnsupportedError as refused:
            with pytest.raises(kvg.UnsupportedError):
                open_context(model, kv_tier="host", **options)
            pytest.skip(str(refused))
        with ctx, open_context(model, kv_tier="host", **options) as tiered:
            assert nmse(every_op(tiered)[0], every_op(ctx)[0]) <= SAME
            exact = on_cpu(path, "f32")
            error, expected = (worst_step(every_op(each), exact) for each in (reset(tiered), reset(ctx)))
            assert error <= 1.5 * expected


@pytest.mark.parametrize("kv_tier", ["host", "device"])
def test_pinned_memory_is_told(device: str, path: Path, kv_tier: str) -> None:
    """All of K and V, where a device copies them; none where nothing is copied. A plan says the same."""
    sizes: dict[str, Any] = {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1, "kv_tier": kv_tier}
    with kvg.Model(path, device=device) as model, kvg.Context(model, **sizes) as ctx:
        found = [part.pinned_bytes for part in ctx.devices]
        assert found == [0, ctx.kv.bytes if kv_tier == "host" else 0]
    assert [part.pinned_bytes for part in kvg.plan_memory(path, device, **sizes)] == found


def reset(ctx: kvg.Context) -> kvg.Context:
    ctx.reset()
    return ctx


@pytest.mark.parametrize("spec", [PLAIN, WINDOWS, SHARED, HYBRID], ids=str)
def test_logits_are_those_of_libllama(device: str, architecture: Architecture, spec: ArchSpec) -> None:
    ids = random_ids(40, N_VOCAB, seed=1)
    judge(
        architecture(spec),
        lambda engine: prompt_then_singles(engine, ids, 25),
        n_ctx=128,
        device=device,
        slack=SLACK,
        attentions=("off", "auto"),
        kv_tier="host",
    )


@pytest.mark.parametrize("spec", [PLAIN, SHARED, HYBRID], ids=str)
def test_over_rpc(endpoint: str, architecture: Architecture, spec: ArchSpec) -> None:
    """In a process of its own: servers are known for as long as a process lives."""
    done = subprocess.run(
        [sys.executable, "-m", "support.judged_elsewhere", str(architecture(spec)), "RPC0", endpoint, "host"],
        cwd=TESTS,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


BEYOND = """
import sys
import pykvgraph as kvg
from support.engines import OurEngine, prompt_then_singles, random_ids
from support.judge import nmse
from support.models import N_VOCAB

path, endpoint, n_ctx = sys.argv[1:]
kvg.add_rpc_server(endpoint)
options = {"n_ctx": int(n_ctx), "n_ubatch": 8}
with kvg.Model(path, device="RPC0") as model, kvg.Model(path, device="cpu") as other:
    try:
        kvg.Context(model, **options)
        sys.exit("the server has room for everything")
    except kvg.DeviceError as refused:
        print(refused)
    ids = random_ids(80, N_VOCAB)
    with kvg.Context(model, kv_tier="host", **options) as ctx, kvg.Context(other, n_ctx=256) as expected:
        found, right = (prompt_then_singles(OurEngine(each), ids, 50) for each in (ctx, expected))
        print(nmse(found, right))
"""


def test_a_context_that_the_device_can_not_hold(rpc: None, architecture: Architecture) -> None:
    """A server with memory for five of eight layers: it refuses all cells, and attends to the host's."""
    spec = ArchSpec("llama", 8, n_head=4, n_head_kv=2, head_dim=64, n_embd=256)
    n_ctx = 1 << 16
    a_layer = n_ctx * 2 * spec.n_head_kv * spec.head_dim * 2  # K and V, F16
    with rpc_server(n_bytes=5 * a_layer) as endpoint:
        done = subprocess.run(
            [sys.executable, "-c", BEYOND, str(architecture(spec)), endpoint, str(n_ctx)],
            cwd=TESTS,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    refused, error = done.stdout.splitlines()
    assert "RPC0" in refused and "MiB" in refused
    assert float(error) <= 1e-4


def test_rows_of_scattered_cells(ctx: kvg.Context, path: Path) -> None:
    """A batch that goes into 24 holes."""
    with kvg.Model(path, device="cpu") as model, open_context(model, **OPTIONS) as other:
        rows = []
        for each in (other, ctx):
            decode(each, run_of(random_ids(240, N_VOCAB)))
            for pos in range(0, 80, 2):
                each.kv.seq_rm(0, pos, pos + 1)
            decode(each, run_of(random_ids(40, N_VOCAB, 2), 240))
            assert (each.kv.cells().pos[:80:2] >= 0).sum() == 24  # and 16 behind them
            rows.append((decode(each, [Token(5, 280)]), each.kv.read_k(4), each.kv.read_v(4)))
    for found, expected in zip(rows[1], rows[0], strict=True):
        assert nmse(found, expected) <= 1e-3


@pytest.mark.parametrize("device_layers", [1, 2, 4, 99])
def test_what_is_where(device: str, model_file: Callable[[ModelSpec], Path], device_layers: int) -> None:
    path = model_file(HEADS_OF_64)
    options: dict[str, Any] = {"n_ctx": 1000, "kv_tier": "host", "device_layers": device_layers}
    with kvg.Model(path, device=device) as model, open_context(model, **options) as ctx:
        assert (ctx.kv_tier, ctx.device_layers) == ("host", device_layers)
        there, cpu = ctx.devices
        assert (there.device, there.n_cache, there.attention) == (device, 0, "flash")
        assert (cpu.device, cpu.n_cache, cpu.attention) == ("CPU", N_LAYER, "")
        width = HEADS_OF_64.n_head_kv * HEADS_OF_64.head_dim
        a_layer = 1024 * 2 * width * 2  # rows, padded to 256; K and V; F16
        assert there.cache_bytes == min(device_layers, N_LAYER) * a_layer
        assert cpu.cache_bytes == ctx.kv.bytes == N_LAYER * a_layer


@pytest.mark.parametrize("spec", [PLAIN, WINDOWS, SHARED, HYBRID], ids=str)
def test_memory_is_predicted(device: str, architecture: Architecture, spec: ArchSpec) -> None:
    path = architecture(spec)
    options: dict[str, Any] = {"n_ctx": 2000, "n_ubatch": 100, "n_threads": 1, "kv_tier": "host"}
    plan = kvg.plan_memory(path, device, **options)
    with kvg.Model(path, device=device) as model, kvg.Context(model, **options) as ctx:
        for predicted, part in zip(plan, ctx.devices, strict=True):
            assert predicted.device == part.device
            assert abs(predicted.cache_bytes - part.cache_bytes) <= 0.02 * part.cache_bytes


@pytest.mark.parametrize(
    ("site", "countdown"), [("carry-in", 1), ("carry-in", 9), ("carry-out", 1), ("carry-out", 4)]
)
def test_a_copy_that_fails(ctx: kvg.Context, site: str, countdown: int) -> None:
    """The batch's tokens are not in the cache, and what was there is as it was."""
    decode(ctx, run_of(random_ids(50, N_VOCAB)))
    before = ctx.kv.save(seq=0)
    with fault(site, countdown), pytest.raises(kvg.DeviceError, match="not in the cache"):
        for pos in range(50, 53):
            decode(ctx, [Token(5, pos)])
    ctx.kv.seq_rm(0, 50, -1)
    assert ctx.kv.save(seq=0) == before
    found = decode(ctx, [Token(5, 50)])
    ctx.reset()
    decode(ctx, run_of(random_ids(50, N_VOCAB)))
    assert np.array_equal(found, decode(ctx, [Token(5, 50)]))


def test_no_memory_for_the_rows(device: str, path: Path) -> None:
    with kvg.Model(path, device=device) as model:
        for countdown in (1, 2):
            with fault("working-alloc", countdown), pytest.raises(kvg.DeviceError, match="device_layers"):
                open_context(model, kv_tier="host", **OPTIONS)
        with pytest.raises(kvg.DeviceError, match=rf"needs .* GiB on ({device}|CPU) and .* are free"):
            open_context(model, n_ctx=2**30, kv_tier="host")
