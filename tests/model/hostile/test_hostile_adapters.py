"""Damaged adapters, and adapters of another model: a typed error or a working one, never a dead process."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import chance, sanitizer
from support.adapters import write_adapter
from support.engines import open_context
from support.gguf_bytes import FLOAT32, STRING, UINT32
from support.gguf_parts import take_apart
from support.models import SMALL, ModelSpec, WeightType

import pykvgraph as kvg

TESTS = Path(__file__).parents[2]
N_MUTANTS = 50 if not chance.THOROUGH else 200 if sanitizer.ADDRESS else 4000
Q = "blk.0.attn_q.weight"
ModelFile = Callable[[ModelSpec], Path]


@pytest.mark.parametrize(
    ("base", "sound"), [("adapter", "adapter:ok"), ("assistant", "file:ok assistant:ok")]
)
def test_damaged_files(tmp_path: Path, base: str, sound: str) -> None:
    """Adapters; and assistants, beside the model for which they draft."""
    arguments = [str(tmp_path), base, "0", str(N_MUTANTS)]
    run = subprocess.run(
        [sys.executable, "-m", "support.hostile", *arguments],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    first, *told = map(json.loads, run.stdout.splitlines())
    assert first["verdict"] == sound
    assert len(told) == N_MUTANTS
    died = [trial for trial in told if trial["verdict"].startswith("!")]
    assert not died, f"{len(died)} of {len(told)}; the files are in {tmp_path}. The first: {died[0]}"
    outcomes = Counter(trial["verdict"] for trial in told)
    assert 0.1 * N_MUTANTS < outcomes[sound] < 0.9 * N_MUTANTS, outcomes


def zeros(*shape: int) -> np.ndarray[Any, Any]:
    return np.zeros(shape, np.float32)


# SMALL has 64 wide states, query heads of 64 in all, and of K 32
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "arch": ({"arch": "qwen2"}, kvg.ModelLoadError, "'qwen2', and the model is 'llama'"),
    "no adapter": ({"keys": {"general.type": "model"}}, kvg.ModelLoadError, "'model', expected 'adapter'"),
    "kind": ({"keys": {"adapter.type": "cvec"}}, kvg.UnsupportedError, "'cvec'"),
    "alpha": ({"alpha": float("nan")}, kvg.ModelLoadError, "adapter.lora.alpha"),
    "empty": ({"names": ()}, kvg.ModelLoadError, "has no tensors"),
    "norm": ({"tensors": {"output_norm.weight": zeros(64)}}, kvg.UnsupportedError, "output_norm.weight"),
    "half": ({"names": (), "tensors": {f"{Q}.lora_a": zeros(4, 64)}}, kvg.ModelLoadError, "no other half"),
    "width": (
        {"names": (), "tensors": {f"{Q}.lora_a": zeros(4, 32), f"{Q}.lora_b": zeros(64, 4)}},
        kvg.ModelLoadError,
        "lora_a is 32 x 4 x 1",
    ),
    "ranks": (
        {"names": (), "tensors": {f"{Q}.lora_a": zeros(4, 64), f"{Q}.lora_b": zeros(64, 5)}},
        kvg.ModelLoadError,
        "lora_b 5 x 64 x 1",
    ),
    "experts": (
        {"names": (), "tensors": {f"{Q}.lora_a": zeros(2, 4, 64), f"{Q}.lora_b": zeros(2, 64, 4)}},
        kvg.ModelLoadError,
        "64 x 4 x 2",
    ),
    "no such layer": (
        {"tensors": {"blk.7.attn_q.weight.lora_a": zeros(4, 64), "blk.7.attn_q.weight.lora_b": zeros(64, 4)}},
        kvg.ModelLoadError,
        "which the model doesn't have",
    ),
    "no product": (
        {"tensors": {"output_norm.weight.lora_a": zeros(4, 64), "output_norm.weight.lora_b": zeros(1, 4)}},
        kvg.UnsupportedError,
        "matrices of products only",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(small: kvg.Model, model_file: ModelFile, tmp_path: Path, case: str) -> None:
    options, error, text = WRONG[case]
    path = write_adapter(tmp_path / "a.gguf", model_file(SMALL), **options)
    with pytest.raises(error, match=r"a\.gguf") as raised:
        small.load_adapter(path)
    assert text in str(raised.value)


def test_integers_and_invocation_tokens(small: kvg.Model, model_file: ModelFile, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a.gguf", model_file(SMALL), kind=WeightType.F32)
    parts = take_apart(path.read_bytes())
    parts.set("adapter.alora.invocation_tokens", UINT32, [1, 2])
    parts.raw().write(path)
    with pytest.raises(kvg.UnsupportedError, match="aLoRA"):
        small.load_adapter(path)
    parts = take_apart(write_adapter(path, model_file(SMALL)).read_bytes())
    next(t for t in parts.tensors if t.name.endswith(b"lora_a")).kind = WeightType.I32
    parts.raw().write(path)
    with pytest.raises(kvg.UnsupportedError, match="type i32"):
        small.load_adapter(path)
    parts.set("adapter.lora.alpha", STRING, b"8")
    parts.raw().write(path)
    with pytest.raises(kvg.ModelLoadError, match="alpha"):
        small.load_adapter(path)
    assert FLOAT32 == 6  # what the sound one has


def test_truncated_and_missing(small: kvg.Model, model_file: ModelFile, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a.gguf", model_file(SMALL))
    data = path.read_bytes()
    for n in (0, 3, 40, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:n])
        with pytest.raises(kvg.ModelLoadError):
            small.load_adapter(path)
    with pytest.raises(FileNotFoundError):
        small.load_adapter(tmp_path / "b.gguf")
    assert struct.unpack("<I", data[:4])[0] == 0x46554747


def test_bad_lists_change_nothing(small: kvg.Model, model_file: ModelFile, tmp_path: Path) -> None:
    adapter = small.load_adapter(write_adapter(tmp_path / "a.gguf", model_file(SMALL)))
    other_path = model_file(replace(SMALL, seed=9))
    with kvg.Model(other_path, device="cpu") as other, open_context(small, n_ctx=32) as ctx:
        foreign = other.load_adapter(adapter.path)
        ctx.set_adapters([(adapter, 1.0)])
        closed = small.load_adapter(adapter.path)
        closed.close()
        bad: list[Any] = [
            [(foreign, 1.0)],
            [(adapter, 1.0), (adapter, 2.0)],
            [(adapter, float("nan"))],
            [(adapter, 1e9)],
            [adapter],
            [(adapter, "1")],
            [(closed, 1.0)],
            3,
        ]
        for adapters in bad:
            with pytest.raises(kvg.InvalidArgumentError):
                ctx.set_adapters(adapters)
            assert ctx.adapters == ((adapter, 1.0),)


def test_what_is_used_outlives_its_adapter(small: kvg.Model, model_file: ModelFile, tmp_path: Path) -> None:
    adapter = small.load_adapter(write_adapter(tmp_path / "a.gguf", model_file(SMALL)))
    with open_context(small, n_ctx=32) as ctx:
        ctx.set_adapters([(adapter, 1.0)])
        before = ctx.append(5)
        ctx.reset()
        adapter.close()
        assert np.array_equal(ctx.append(5), before)
        assert "closed" in repr(adapter)
