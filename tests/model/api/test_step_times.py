"""Times of steps: learned on a context, remembered in a file that anybody may have written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.architectures import ArchSpec

import pykvgraph as kvg
from pykvgraph.engine import step_times
from pykvgraph.engine.step_times import learn_times, times_of


@pytest.fixture(autouse=True)
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where times are remembered. Little is measured."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(step_times, "_SECONDS", 0.0)
    monkeypatch.setattr(step_times, "_STEADY", 1e9)
    return tmp_path / "pykvgraph" / "times.json"


@pytest.mark.parametrize(
    "spec",
    [
        ArchSpec("llama"),
        ArchSpec("gemma3", n_layer=6, window=24, period=3),
        ArchSpec("qwen35", n_layer=4, period=4, state_heads=4, n_rot=8, n_head=8),
        ArchSpec("mamba2", n_layer=4, state_heads=8),
    ],
    ids=str,
)
def test_each_kind_of_model(architecture: Callable[[ArchSpec], Path], spec: ArchSpec) -> None:
    with (
        kvg.Model(architecture(spec), device="cpu") as model,
        kvg.Context(model, n_ctx=500, n_batch=100) as ctx,
    ):
        times, samples, _ = learn_times(ctx)
        assert ctx.kv.n_used == 0
        assert {1, 2, 4, 8, 16} <= {each.n_tokens for each in samples}
        n_depths = 1 if spec.state_heads else 2
        assert len(samples) == n_depths * len({each.n_tokens for each in samples})
        assert min(times.coefficients) >= 0
        assert times.seconds(1, 1) > 0


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An item for each time that steps were measured."""
    found: list[int] = []
    learn = step_times.learn_times

    def counted(ctx: kvg.Context) -> Any:
        found.append(ctx.n_ctx)
        return learn(ctx)

    monkeypatch.setattr(step_times, "learn_times", counted)
    return found


def test_they_are_remembered(stories: Path, known: Path, measured: list[int]) -> None:
    with kvg.Model(stories, device="cpu") as model:
        with kvg.Context(model, n_ctx=300) as ctx:
            first = times_of(ctx)
            assert times_of(ctx) == first
            assert measured == [300]
        with kvg.Context(model, n_ctx=300, type_k="f32", type_v="f32") as ctx:
            times_of(ctx)
    assert len(measured) == 2
    assert len(json.loads(known.read_text())) == 2


@pytest.mark.parametrize(
    "damaged",
    [
        [1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, -1],
        [1, 1, 1, 1, 1, float("nan")],
        [0, 0, 0, 1, 1, 1],
        [1, 1, 1, 1, 1, 10**30],
        ["1"] * 6,
        [True] * 6,
        {"0": 1},
        None,
    ],
    ids=str,
)
def test_what_others_wrote(stories: Path, known: Path, measured: list[int], damaged: Any) -> None:
    """It is measured again, and written again."""
    with kvg.Model(stories, device="cpu") as model, kvg.Context(model, n_ctx=300) as ctx:
        times_of(ctx)
        (key,) = json.loads(known.read_text())
        known.write_text(json.dumps({key: damaged}))
        found = times_of(ctx)
        assert len(measured) == 2
        assert json.loads(known.read_text()) == {key: list(found.coefficients)}


def test_the_file_stays_small(stories: Path, known: Path) -> None:
    known.parent.mkdir()
    known.write_text(json.dumps({str(i): [1.0] * 6 for i in range(1000)}))
    with kvg.Model(stories, device="cpu") as model, kvg.Context(model, n_ctx=300) as ctx:
        times_of(ctx)
    kept = json.loads(known.read_text())
    assert len(kept) == 256
    assert "999" in kept and "0" not in kept


def test_a_small_batch(stories: Path) -> None:
    with kvg.Model(stories, device="cpu") as model, kvg.Context(model, n_ctx=300, n_batch=8) as ctx:
        with pytest.raises(kvg.InvalidArgumentError, match="some more"):
            learn_times(ctx)
        assert ctx.kv.n_used == 0


def test_times_of_a_busy_machine_are_not_remembered(
    stories: Path, known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of one token takes longer and longer; then as long as before."""
    seconds = iter(range(1, 1000))
    monkeypatch.setattr(step_times, "_STEADY", 1.5)
    monkeypatch.setattr(step_times, "_step", lambda *_: float(next(seconds)))
    with kvg.Model(stories, device="cpu") as model, kvg.Context(model, n_ctx=300) as ctx:
        assert times_of(ctx).seconds(1, 1) > 0
        assert not known.exists()
        monkeypatch.setattr(step_times, "_step", lambda *_: 0.5)
        times_of(ctx)
    assert known.exists()
