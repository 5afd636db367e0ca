"""Context.trace: what was copied and computed when. The order of these must be right on every device."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.architectures import ArchSpec
from support.engines import Token, decode, open_context, random_ids, run_of
from support.faults import fault
from support.models import N_VOCAB

import pykvgraph as kvg

pytestmark = pytest.mark.gpu

N_LAYER = 5
N_PROMPT, N_TOKENS = 40, 3
PLAIN = ArchSpec("llama", N_LAYER)
HYBRID = ArchSpec("qwen35", 6, period=2, state_heads=4, n_rot=8, n_head=8)


class Event(NamedTuple):
    """One span of the file."""

    layer: int
    begin: float
    end: float
    n_bytes: int


def read_events(path: Path) -> dict[str, list[Event]]:
    """By track, in the order in which they began."""
    file = json.loads(path.read_text())
    tracks: dict[str, list[Event]] = {"copy in": [], "compute": [], "copy out": []}
    names = {event["tid"]: event["args"]["name"] for event in file["traceEvents"] if event["ph"] == "M"}
    for event in file["traceEvents"]:
        if event["ph"] == "X":
            assert (event["name"], event["cat"]) == (f"layer {event['args']['layer']}", names[event["tid"]])
            begin, args = event["ts"], event["args"]
            span = Event(args["layer"], begin, begin + event["dur"], args["bytes"])
            tracks[event["cat"]].append(span)
    return {name: sorted(spans, key=lambda span: span.begin) for name, spans in tracks.items()}


def traced(device: str, path: Path, into: Path, **options: Any) -> dict[str, list[Event]]:
    """Of a prompt and some tokens, each by itself."""
    with (
        kvg.Model(path, device=device) as model,
        open_context(model, n_ctx=256, kv_tier="host", **options) as ctx,
    ):
        ctx.trace(into)  # from now on
        decode(ctx, run_of(random_ids(N_PROMPT, N_VOCAB)))
        for i in range(N_TOKENS):
            decode(ctx, [Token(5, N_PROMPT + i)])
        ctx.trace(into)
    return read_events(into)


@pytest.mark.parametrize("device_layers", [1, 2, 3])
@pytest.mark.parametrize(
    ("spec", "layers"), [(PLAIN, [*range(N_LAYER)]), (HYBRID, [1, 3, 5])], ids=["plain", "hybrid"]
)
def test_order(
    device: str,
    architecture: Callable[[ArchSpec], Path],
    tmp_path: Path,
    spec: ArchSpec,
    layers: list[int],
    device_layers: int,
) -> None:
    tracks = traced(device, architecture(spec), tmp_path / "trace.json", device_layers=device_layers)
    for spans in tracks.values():
        assert [span.layer for span in spans] == layers * (1 + N_TOKENS)
    came, computed, went = tracks["copy in"], tracks["compute"], tracks["copy out"]
    slack = 0.002  # microseconds: they are rounded
    for before, span in zip(came, computed, strict=True):
        assert before.end <= span.begin + slack
    for span, after in zip(computed, went, strict=True):
        assert span.end <= after.begin + slack
    for span, after in pairwise(computed):
        assert span.end <= after.begin + slack
    # its place is free; CUDA's queue waits for that itself, so that a copy may be given to it before
    for i, after in enumerate(came[device_layers:]):
        assert went[i].end <= (after.end if device.startswith("CUDA") else after.begin) + slack
    if device_layers > 1:  # the next layer's rows are on their way when a layer is computed
        n = len(layers)
        for i, span in enumerate(computed):
            assert (i + 1) % n == 0 or came[i + 1].begin <= span.begin + slack


def test_bytes(device: str, architecture: Callable[[ArchSpec], Path], tmp_path: Path) -> None:
    """The attended span comes, in whole 256s, and only rows of new tokens go."""
    tracks = traced(device, architecture(PLAIN), tmp_path / "trace.json")
    row = 2 * PLAIN.n_head_kv * PLAIN.head_dim * 2  # K and V, F16
    assert {span.n_bytes for span in tracks["copy in"]} == {256 * row}
    assert [span.n_bytes for span in tracks["copy out"][::N_LAYER]] == [N_PROMPT * row] + [row] * N_TOKENS


def test_it_is_taken_once(
    device: str, architecture: Callable[[ArchSpec], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, n = tmp_path / "trace.json", 12
    monkeypatch.setattr("pykvgraph.context.trace._AT_A_TIME", 100)
    with (
        kvg.Model(architecture(PLAIN), device=device) as model,
        open_context(model, n_ctx=256, kv_tier="host") as ctx,
    ):
        ctx.append(5)
        ctx.trace(file)
        assert not any(read_events(file).values())  # nobody had asked
        for _ in range(n):
            ctx.append(5)
        ctx.trace(file)
        assert sum(map(len, read_events(file).values())) == 3 * N_LAYER * n  # more than are taken at once
        ctx.trace(file)
        assert not any(read_events(file).values())
        with fault("carry-out", 2), pytest.raises(kvg.DeviceError):
            ctx.append(5)
        ctx.append(5)
        ctx.trace(file)
        tracks = read_events(file)
        assert [span.layer for span in tracks["copy out"]] == [0, *range(N_LAYER)]


def test_there_is_nothing_to_trace(device: str, stories: Path, tmp_path: Path) -> None:
    with kvg.Model(stories, device=device) as model, open_context(model, n_ctx=64) as ctx:
        with pytest.raises(kvg.UnsupportedError, match='kv_tier="host"'):
            ctx.trace(tmp_path / "trace.json")
        assert not (tmp_path / "trace.json").exists()
