"""A sequence that is followed is at the other end what it is here, after every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.architectures import ArchSpec
from support.engines import Token, decode, open_context, random_ids, repair, run_of
from support.faults import fault
from support.models import N_VOCAB
from support.recurrent import DELTA_NET, SPECS
from support.streams import TIMEOUT, beside, connect, fill_with_holes, greedy, pair

import pykvgraph as kvg
from pykvgraph import stream
from pykvgraph.errors import TransportError
from pykvgraph.stream.follow import Following

OPTIONS: dict[str, Any] = {
    "n_ctx": 256,
    "n_batch": 32,
    "n_ubatch": 16,
    "n_seq_max": 4,
    "defrag_threshold": -1,
}
LLAMA = ArchSpec("llama", 4, 64, 2, 1, 32, 32)
GEMMA = ArchSpec("gemma3", 4, 64, 2, 1, 32, 32, window=8)
QWEN = DELTA_NET
PROMPT = random_ids(70, N_VOCAB, 3)
LEVELS = [0, 1, 2, 3]


@pytest.fixture(scope="module", params=[LLAMA, GEMMA, QWEN], ids=lambda spec: spec.arch)
def model(request: pytest.FixtureRequest, architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(architecture(request.param)) as opened:
        yield opened


def read_prompt(ctx: kvg.Context, out: Following, ids: list[int] = PROMPT, seq: int = 0) -> None:
    for begin in range(0, len(ids), OPTIONS["n_batch"]):
        decode(ctx, run_of(ids[begin : begin + OPTIONS["n_batch"]], ctx.kv.seq_pos_max(seq) + 1, (seq,)))
        out.send()


def same_rows(source: kvg.Context, seq: int, target: kvg.Context, to: int) -> bool:
    """Of all that a later token may attend to, and of the states."""
    for index, group in enumerate(source.kv.groups):
        if group.kind == "state":
            continue
        found = []
        for ctx, own in ((source, seq), (target, to)):
            view = ctx.kv.cells(index)
            first = ctx.kv.seq_pos_max(own) - group.window + 1 if group.window else 0
            cells = [int(cell) for cell in np.flatnonzero(view.seq[:, own] & (view.pos >= first))]
            cells.sort(key=lambda cell, view=view: int(view.pos[cell]))  # type: ignore[misc]
            found.append((view.pos[cells].tolist(), ctx.kv.read_rows(cells, group=index).data.tobytes()))
        if found[0] != found[1]:
            return False
    return True


@pytest.mark.parametrize("level", LEVELS)
def test_a_prompt_and_tokens_after_it(model: kvg.Model, level: int) -> None:
    """Other sequences are decoded meanwhile; at both ends cells are in other places."""
    with open_context(model, **OPTIONS) as source, open_context(model, **OPTIONS) as target:
        fill_with_holes(source, 20, level, 2, (1, 3))
        fill_with_holes(target, 30, level + 1, 2, (0, 3))
        ends = connect(model.n_layer, 1, 2)
        came = beside(lambda: stream.stream_in(target, 1, ends.into))
        with stream.following(source, 0, ends.out[0], level) as out:
            read_prompt(source, out)
            token = 5
            for _ in range(6):
                token = int(source.append(token, 0).argmax())
                out.send()
                decode(source, run_of([token], source.kv.seq_pos_max(2) + 1, (2,)))
        came.result(TIMEOUT)
        assert target.kv.seq_pos_max(1) == source.kv.seq_pos_max(0) == len(PROMPT) + 5
        assert same_rows(source, 0, target, 1)
        assert greedy(target, 1, 5) == greedy(source, 0, 5)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_every_kind_of_layer(architecture: Callable[[ArchSpec], Path], spec: ArchSpec) -> None:
    with (
        kvg.Model(architecture(spec)) as model,
        open_context(model, **OPTIONS) as source,
        open_context(model, **OPTIONS) as target,
    ):
        ends = connect(model.n_layer, 1, 2)
        came = beside(lambda: stream.stream_in(target, 1, ends.into))
        with stream.following(source, 0, ends.out[0]) as out:
            read_prompt(source, out)
            for token in (5, 6, 7):
                source.append(token)
                out.send()
        came.result(TIMEOUT)
        assert same_rows(source, 0, target, 1)
        assert greedy(target, 1, 5) == greedy(source, 0, 5)


@pytest.mark.parametrize("level", LEVELS)
def test_step_by_step(model: kvg.Model, level: int) -> None:
    """What has come can be gone on from when the sender is gone: with states, from where they were sent."""
    with open_context(model, **OPTIONS) as source, open_context(model, **OPTIONS) as target:
        fill_with_holes(source, 20, level)
        ends = connect(model.n_layer)
        seen: list[int] = []

        def take() -> None:
            for end in stream.arrivals(target, 3, ends.into):
                seen.append(end)

        came = beside(take)
        out = stream.following(source, 0, ends.out[0], level)
        read_prompt(source, out, PROMPT[:32])
        source.append(7)
        out.send()
        source.append(8)
        out.send()
        while 53 not in seen:
            pass
        ends.out[0].close()
        assert isinstance(came.exception(TIMEOUT), TransportError)
        assert seen[0] == 19
        assert sorted(set(seen)) == ([19, 51, 52, 53] if level < 2 else [19, 35, 51, 52, 53])
        assert same_rows(source, 0, target, 3)


@pytest.mark.parametrize("level", LEVELS)
def test_tokens_that_go_again(model: kvg.Model, level: int) -> None:
    """Drafts that were wrong; also as many new tokens as went."""
    options = {**OPTIONS, "swa_full": True}
    with open_context(model, **options) as source, open_context(model, **options) as target:
        ends = connect(model.n_layer)
        came = beside(lambda: stream.stream_in(target, 1, ends.into))
        with stream.following(source, 0, ends.out[0], level) as out:
            read_prompt(source, out, PROMPT[:20])
            if source.kv.groups[-1].kind == "state":
                source.kv.checkpoint(0)
            decode(source, run_of([3, 4, 5, 6], 20))
            out.send()
            assert source.kv.rewind(0, 20) == 20
            source.append(9)
            out.send()
            source.kv.rewind(0, 20)
            out.send()
            decode(source, run_of([3, 4, 5, 6], 20))
            source.kv.rewind(0, 20)
            out.send()
            source.append(10)
            out.send()
        came.result(TIMEOUT)
        assert target.kv.seq_pos_max(1) == source.kv.seq_pos_max(0) == 20
        assert same_rows(source, 0, target, 1)
        assert greedy(target, 1, 5) == greedy(source, 0, 5)


def test_two_decodes_without_sending(model: kvg.Model) -> None:
    with open_context(model, **OPTIONS) as source:
        ends = connect(model.n_layer)
        out = stream.following(source, 0, ends.out[0])
        source.append(3)
        source.append(4)
        with pytest.raises(kvg.InvalidArgumentError, match="2 decodes"):
            out.send()
        with pytest.raises(kvg.InvalidArgumentError, match="has ended"):
            out.send()
        source.append(5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("spec", [LLAMA, GEMMA], ids=lambda spec: spec.arch)
def test_a_repair(architecture: Callable[[ArchSpec], Path], spec: ArchSpec, level: int) -> None:
    """Tokens in the middle of the text are others now, alone and with one at its end."""
    with (
        kvg.Model(architecture(spec)) as model,
        open_context(model, **OPTIONS, swa_full=True) as source,
        open_context(model, **OPTIONS, swa_full=True) as target,
    ):
        ends = connect(model.n_layer, 1, 2)
        came = beside(lambda: stream.stream_in(target, 1, ends.into))
        with stream.following(source, 0, ends.out[0], level) as out:
            read_prompt(source, out)
            repair(source, run_of(PROMPT[:3], 20))
            out.send()
            source.append(5)
            out.send()
            repair(source, [*run_of(PROMPT[:2], 40), Token(7, len(PROMPT) + 1)])
            out.send()
        came.result(TIMEOUT)
        assert same_rows(source, 0, target, 1)
        assert greedy(target, 1, 5) == greedy(source, 0, 5)


@pytest.mark.parametrize("level", LEVELS)
def test_how_many_regions(model: kvg.Model, level: int) -> None:
    """From first principles: what the documentation counts."""
    with open_context(model, **OPTIONS) as source, open_context(model, **OPTIONS) as target:
        ends = connect(model.n_layer)
        came = beside(lambda: stream.stream_in(target, 0, ends.into))
        (transport, _), *_ = ends.out[0].parts
        rows = 2 * sum(len(group.layers) for group in source.kv.groups if group.kind != "state")
        has_states = source.kv.groups[-1].kind == "state"
        with stream.following(source, 0, ends.out[0], level) as out:
            begun = transport.flushes
            assert begun == 2 + (rows if level > 0 else 0)  # an empty sequence has no runs
            decode(source, run_of(PROMPT[:32]))  # two micro-batches; in cells that are neighbours
            out.send()
            if level == 3:
                while transport.flushes < begun + 2 * (2 + rows) + 3 * has_states:
                    pass
            steps = 2 if level >= 2 else 1  # a message for each micro-batch that left while it was computed
            state = 0 if not has_states else 1 if level < 2 else 3 + rows
            if level < 2 or not has_states:
                assert transport.flushes - begun == steps * (2 + rows) + state
            before = transport.flushes
            source.append(3)
            out.send()
            if level == 3:
                while transport.flushes < before + 3:
                    pass
            assert transport.flushes - before == (2 + rows if level == 0 else 3)
        came.result(TIMEOUT)


def test_states_go_with_every_64th_token(architecture: Callable[[ArchSpec], Path]) -> None:
    with kvg.Model(architecture(QWEN)) as model, open_context(model, **OPTIONS) as source:
        ends = connect(model.n_layer)
        (transport, _), *_ = ends.out[0].parts
        out = stream.following(source, 0, ends.out[0], 1)
        bytes_of = []
        for token in range(130):
            before = transport.bytes_sent
            source.append(3 + token % 50)
            out.send()
            bytes_of.append(transport.bytes_sent - before)
        state = source.kv.groups[-1].cell_bytes
        with_state = [i for i, n in enumerate(bytes_of) if n >= state]
        assert with_state == [63, 127]
        assert bytes_of[63] - bytes_of[62] == state


def test_a_peer_that_is_gone(model: kvg.Model) -> None:
    """The stream ends; the text goes on."""
    with open_context(model, **OPTIONS) as source, open_context(model, **OPTIONS) as alone:
        for level in LEVELS:
            source.reset()
            ours, theirs = pair()
            out = stream.following(source, 0, stream.Layout({ours: range(model.n_layer)}), level)
            theirs.close()
            decode(source, run_of(PROMPT[:20]))

            def send_on(out: Following = out) -> None:
                for token in range(50):
                    out.send()
                    source.append(3 + token)
                    time.sleep(0.01)  # level 3 sends meanwhile

            with pytest.raises(TransportError):
                send_on()
        alone.reset()
        source.reset()
        decode(source, run_of(PROMPT[:20]))
        decode(alone, run_of(PROMPT[:20]))
        assert greedy(source, 0, 5) == greedy(alone, 0, 5)


def test_a_peer_that_does_not_take_anything(model: kvg.Model) -> None:
    """Nobody waits for it but the stream's own thread; then send() says what happened."""
    with open_context(model, **OPTIONS) as source:
        ours, _theirs = pair(timeout=0.2, queue_bytes=30_000)
        out = stream.following(source, 0, stream.Layout({ours: range(model.n_layer)}), 3)

        def send_on() -> None:
            for token in range(200):
                source.append(3 + token % 50)
                out.send()
            out.close()

        with pytest.raises(TransportError):
            send_on()
        source.append(3)


def test_a_decode_that_fails_half_way(model: kvg.Model) -> None:
    """Its tokens are in neither cache."""
    with open_context(model, **OPTIONS) as source, open_context(model, **OPTIONS) as target:
        ends = connect(model.n_layer)
        came = beside(lambda: stream.stream_in(target, 1, ends.into))
        with stream.following(source, 0, ends.out[0]) as out:
            read_prompt(source, out, PROMPT[:20])
            with fault("compute", 2), pytest.raises(kvg.DeviceError):
                decode(source, run_of(PROMPT[:32], 20))
            out.send()
            source.append(3)
            out.send()
        came.result(TIMEOUT)
        assert same_rows(source, 0, target, 1)
        assert target.kv.seq_pos_max(1) == 20
        assert greedy(target, 1, 5) == greedy(source, 0, 5)
