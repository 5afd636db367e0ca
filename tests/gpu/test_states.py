"""Layers with a state: a device that can update states has them, and nothing of them crosses the bus."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.architectures import ArchSpec
from support.engines import Engine, Logits, decode, open_context, random_ids, run_of
from support.judge import judge, nmse
from support.judged_elsewhere import SLACK
from support.models import N_VOCAB
from support.planned import compare
from support.recurrent import LIKE_LARGE, MAMBA2, fill, go_on, read_row
from support.rpc_server import TESTS

import pykvgraph as kvg

pytestmark = pytest.mark.gpu

Architecture = Callable[[ArchSpec], Path]
TEXTS = [random_ids(60, N_VOCAB, seed) for seed in range(3)]
# where each sequence ends after each batch: prompts of unequal lengths, one beside single tokens, these alone
ENDS = [(21, 0, 5), (22, 13, 6), (23, 14, 7), (40, 15, 24), (41, 16, 25)]


@pytest.fixture(params=LIKE_LARGE, ids=str)
def spec(request: pytest.FixtureRequest) -> ArchSpec:
    found: ArchSpec = request.param
    return found


@pytest.fixture
def model(device: str, architecture: Architecture, spec: ArchSpec) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(spec), device=device) as model:
        yield model


def unequal(engine: Engine) -> Logits:
    """Three sequences; tokens of all stand in turn."""
    rows, begin = [], (0, 0, 0)
    for end in ENDS:
        tokens = [
            token
            for seq in range(3)
            for token in run_of(TEXTS[seq][begin[seq] : end[seq]], begin[seq], (seq,))
        ]
        rows.append(engine.decode(sorted(tokens, key=lambda token: token.pos)))
        begin = end
    return np.concatenate(rows)


def test_beside_libllama(device: str, architecture: Architecture, spec: ArchSpec) -> None:
    judge(
        architecture(spec),
        unequal,
        n_ctx=192,
        n_ubatch=32,
        n_seq_max=3,
        device=device,
        slack=SLACK,
        attentions=("auto",),
    )


def test_all_of_them_are_there(model: kvg.Model) -> None:
    with open_context(model, n_ctx=256, n_seq_max=2) as ctx:
        there, here = ctx.devices
        assert there.fallbacks == ()
        assert here.cache_bytes == 0
        assert there.cache_bytes >= ctx.kv.bytes > 0
        before = read_row(ctx, 0)
        fill(ctx, 9)
        assert not before.any() and read_row(ctx, 0).any()


def test_what_it_cannot_update_stays_here(device: str, architecture: Architecture) -> None:
    """Mamba-2 with a state of 16 numbers for each row, which no kernel of ggml's has."""
    path = architecture(MAMBA2)
    ids = run_of(random_ids(30, N_VOCAB))
    with kvg.Model(path, device="cpu") as model, open_context(model, n_ctx=64) as ctx:
        expected = decode(ctx, ids)
    with kvg.Model(path, device=device) as model, open_context(model, n_ctx=64) as ctx:
        there, here = ctx.devices
        assert there.fallbacks == ("SSM_CONV", "SSM_SCAN")
        assert here.cache_bytes == ctx.kv.bytes and there.cache_bytes == 0
        assert nmse(decode(ctx, ids), expected) <= 1e-3


def test_some_layers_here_and_some_there(device: str, architecture: Architecture) -> None:
    """Of Qwen 3.5's kind, the last two of four: a state has its part in both."""
    spec = LIKE_LARGE[0]
    path = architecture(spec)
    found = []
    for n_gpu_layers in (0, 3):
        with (
            kvg.Model(path, device=device, n_gpu_layers=n_gpu_layers) as model,
            open_context(model, n_ctx=128) as ctx,
        ):
            assert ctx.devices[-1].cache_bytes > 0
            fill(ctx, 20)
            ctx.kv.checkpoint(0)
            first = go_on(ctx)
            blob = ctx.kv.save()
            ctx.kv.rewind(0, 20)
            assert np.array_equal(go_on(ctx), first)
            ctx.kv.load(blob)
            assert ctx.kv.save() == blob
            found.append((first, blob))
    assert nmse(found[1][0], found[0][0]) <= 1e-3


def test_saved_there_and_loaded_here(device: str, architecture: Architecture, spec: ArchSpec) -> None:
    path, options = architecture(spec), {"n_ctx": 128, "n_seq_max": 2}
    with (
        kvg.Model(path, device="cpu") as here,
        kvg.Model(path, device=device) as there,
        open_context(here, **options) as ours,
        open_context(there, **options) as theirs,
    ):
        fill(theirs, 20)
        theirs.kv.checkpoint(0)
        fill(theirs, 33)
        blob = theirs.kv.save()
        ours.kv.load(blob)
        assert ours.kv.save() == blob
        theirs.kv.load(ours.kv.save(seq=0), seq=1)
        wanted = go_on(theirs, 0)
        assert nmse(go_on(theirs, 1), wanted) <= 1e-6  # other cells: attention adds in another order
        assert nmse(go_on(ours), wanted) <= 1e-3
        theirs.kv.clear()
        assert not read_row(theirs, 0).any()


# what a graph of a token is told, and what the CPU makes of the token's embedding
INPUTS = {"embedded", "positions", "cells", "mask", "states_from", "states_to", "outputs", "tokens"}
DECODE = """
import sys
import pykvgraph as kvg
with kvg.Model(sys.argv[1], device=sys.argv[2]) as model, kvg.Context(model, n_ctx=256) as ctx:
    print("A TOKEN", file=sys.stderr, flush=True)
    ctx.append(5)
"""


def crossed(path: Path, device: str) -> set[str]:
    """Of a token, what ggml's scheduler copies from one device to another, by name."""
    done = subprocess.run(
        [sys.executable, "-c", DECODE, path, device],
        cwd=TESTS,
        env={**os.environ, "GGML_SCHED_DEBUG": "1", "KVGRAPH_LOG": "debug"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    of_token = done.stderr.partition("A TOKEN")[2]
    assert "SPLIT" in of_token
    return set(re.findall(r"\[(\S+) \(\s*\d+[KM]?\)\]", of_token))


def test_nothing_of_them_crosses_the_bus(device: str, architecture: Architecture, spec: ArchSpec) -> None:
    names = {name.partition("#")[0] for name in crossed(architecture(spec), device)}
    assert "states_from" in names
    assert names <= INPUTS, names - INPUTS


@pytest.mark.parametrize("spec", [LIKE_LARGE[0], LIKE_LARGE[3], LIKE_LARGE[5]], ids=str)
def test_what_is_planned_is_allocated(device: str, architecture: Architecture, spec: ArchSpec) -> None:
    for each in compare(architecture(spec), device, "f16"):
        assert each.error <= 0.02, each
