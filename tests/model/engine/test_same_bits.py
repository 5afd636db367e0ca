"""On the CPU an answer depends on its prompt alone, to the bit.

Not on who else is served, on what is shared, on batches, threads or where cells are free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import where
from support.adapters import write_adapter
from support.architectures import ArchSpec
from support.kinds import SINKS
from support.models import WeightType
from support.spoken_rows import SpokenRows, listen

import pykvgraph as kvg

FLOATS = "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8")  # else products of F16 are ggml's
SPECS = [  # not F32, whose products are ggml's
    ArchSpec("llama", 2, 64, 4, 2, 32, 32, weights=WeightType.Q8_0),
    ArchSpec("gemma3", 3, 64, 2, 1, 32, 64, window=40, weights=WeightType.F16),
    replace(SINKS, weights=WeightType.Q8_0),
    ArchSpec("bloom", 2, 96, 3, 3, 32, 32, fused=True, weights=WeightType.Q8_0),  # ALiBi
    ArchSpec("gemma3n", 5, window=24, period=5, weights=WeightType.F16),
    ArchSpec(
        "deepseek2", 2, n_head_kv=1, n_expert=8, n_ff_shared=96, rank=48, q_rank=40, weights=WeightType.F16
    ),  # products of each head
]
SAY = kvg.SamplingParams(max_tokens=24)


@pytest.fixture(scope="module", params=SPECS, ids=str)
def model(request: Any, architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    if where.device != "cpu":
        pytest.skip("attention is the device's own")
    if request.param.weights is WeightType.F16 and not FLOATS:
        pytest.skip("products of F16 are ggml's")
    with kvg.Model(architecture(request.param)) as model:
        yield model


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> SpokenRows:
    return listen(monkeypatch)


def prompts_of(model: kvg.Model) -> list[list[int]]:
    """14 of them, up to 900 tokens; most begin alike."""
    rng = np.random.default_rng(5)

    def ids(n: int) -> list[int]:
        found: list[int] = rng.integers(0, model.n_vocab, n).tolist()
        return found

    common = ids(600)
    found = [common[: int(rng.integers(0, 600))] + ids(int(rng.integers(1, 300))) for _ in range(12)]
    return [*found, common + ids(1), found[3] + ids(2)]


def check_alone(
    model: kvg.Model, rows: SpokenRows, prompts: list[list[int]], requests: list[kvg.Request], **options: Any
) -> None:
    """Each prompt has the same tokens and logits in an engine of its own."""
    for prompt, request in zip(prompts, requests, strict=True):
        with kvg.Engine(model, n_ctx=1024, n_seq_max=1, background=False, **options) as engine:
            alone = engine.submit(prompt, SAY)
            assert alone.result().tokens == request.result().tokens
        assert np.array_equal(np.stack(rows[alone]), np.stack(rows[request]))


@pytest.mark.parametrize(
    ("n_ctx", "options", "at_once"),
    [
        (8192, {"n_seq_max": 8}, True),
        (1300, {"n_seq_max": 6}, True),  # prefixes make way, and their cells are taken in any order
        (1300, {"n_seq_max": 6}, False),
        (1300, {"n_seq_max": 3, "n_batch": 40, "n_threads": 1}, True),
        (1300, {"n_seq_max": 6, "type_k": "q8_0", "type_v": "q8_0"}, True),
    ],
)
def test_alone_and_together(
    model: kvg.Model, rows: SpokenRows, n_ctx: int, options: dict[str, Any], at_once: bool
) -> None:
    types = {name: options[name] for name in options if name.startswith("type_")}
    prompts = prompts_of(model)
    with kvg.Engine(model, n_ctx=n_ctx, background=False, **options) as engine:
        requests = []
        for prompt in prompts:
            requests.append(engine.submit(prompt, SAY))
            if not at_once:
                requests[-1].result()
        for request in requests:
            request.result()
        assert engine.stats().prefix_hit_tokens > 600
    check_alone(model, rows, prompts, requests, **types)


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (SPECS[0], {"frame": ["token_embd.weight"]}),
        (
            ArchSpec("gpt-oss", 4, 256, 8, 2, 32, 256, n_expert=8, window=32, weights=WeightType.Q8_0),
            {"names": ["ffn_gate_inp."]},
        ),
    ],
    ids=["embeddings", "routers"],
)
def test_adapters(
    architecture: Callable[[ArchSpec], Path],
    rows: SpokenRows,
    tmp_path: Path,
    spec: ArchSpec,
    parts: dict[str, Any],
) -> None:
    if where.device != "cpu" or not FLOATS:
        pytest.skip("products of F16 aren't our own")
    path = architecture(spec)
    file = write_adapter(tmp_path / "a.gguf", path, rank=8, kind=WeightType.F16, **parts)
    with kvg.Model(path, device="cpu") as model, model.load_adapter(file) as adapter:
        prompts = [prompt[:200] for prompt in prompts_of(model)[:6]]
        with kvg.Engine(
            model, n_ctx=2048, n_seq_max=6, adapters=[(adapter, 1.0)], background=False
        ) as engine:
            requests = [engine.submit(prompt, SAY) for prompt in prompts]
            for request in requests:
                request.result()
        check_alone(model, rows, prompts, requests, adapters=[(adapter, 1.0)])
