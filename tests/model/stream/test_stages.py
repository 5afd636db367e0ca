"""Stages of a pipeline: the layers of a model in several processes compute what they compute in one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.adapters import write_adapter
from support.architectures import ArchSpec
from support.engines import open_context, random_ids
from support.models import N_VOCAB, WeightType
from support.stages import batch_of, greedy, pipeline, stage_contexts
from support.streams import TIMEOUT, beside, pair, split

import pykvgraph as kvg
from pykvgraph import stream
from pykvgraph.stream.stage import StageCache
from pykvgraph.stream.stage_frame import FrameKind, noted, receive_frame

N_LAYER = 12
N_EMBD = 64
OPTIONS: dict[str, Any] = {"n_ctx": 128, "n_batch": 32, "n_ubatch": 8, "n_seq_max": 3}
ONE_THREAD: dict[str, Any] = {"n_threads": 1, "n_threads_batch": 1}
LLAMA = ArchSpec("llama", N_LAYER, N_EMBD, 2, 1, 32, 64)
QUANTIZED = ArchSpec("llama", N_LAYER, N_EMBD, 2, 1, 32, 64, weights=WeightType.Q8_0)
GEMMA = ArchSpec("gemma3", N_LAYER, N_EMBD, 2, 1, 32, 64, window=8, period=6)
QWEN3 = ArchSpec("qwen3", N_LAYER, N_EMBD, 2, 1, 32, 64)
QWEN = ArchSpec("qwen35", n_layer=N_LAYER, period=4, state_heads=4)
CASES = [LLAMA, QUANTIZED, GEMMA, QWEN]
CUTS = [[range(6), range(6, 12)], [range(4), range(4, 8), range(8, 12)]]
PROMPT = random_ids(21, N_VOCAB, seed=3)
N = 24

Architecture = Callable[[ArchSpec], Path]


def name_of(spec: ArchSpec) -> str:
    return f"{spec.arch}-{spec.weights.name}"


@pytest.mark.parametrize("cuts", CUTS, ids=["p2", "q3"])
@pytest.mark.parametrize("spec", CASES, ids=name_of)
def test_stages_compute_what_one_process_does(
    architecture: Architecture, spec: ArchSpec, cuts: list[range]
) -> None:
    path = architecture(spec)
    with pipeline(path, split(N_LAYER, 1), **OPTIONS) as whole, pipeline(path, cuts, **OPTIONS) as parts:
        assert parts.pipe.stages == tuple(cuts)
        logits = [each.pipe.decode(batch_of(PROMPT)) for each in (whole, parts)]
        assert np.array_equal(logits[0], logits[1])
        said = [greedy(each.pipe, logits[0][0], N) for each in (whole, parts)]
        assert said[0][0] == said[1][0]
        assert all(np.array_equal(a, b) for a, b in zip(said[0][1], said[1][1], strict=True))


@pytest.mark.parametrize("spec", CASES, ids=name_of)
def test_a_stage_holds_its_layers_alone(architecture: Architecture, spec: ArchSpec) -> None:
    path = architecture(spec)
    with kvg.Model(path, device="cpu") as model, open_context(model, **OPTIONS) as ctx:
        attending = [layer for group in ctx.kv.groups if group.kind != "state" for layer in group.layers]
        with stage_contexts(path, CUTS[1], **OPTIONS) as contexts:
            for stage, layers in zip(contexts, CUTS[1], strict=True):
                assert stage.model.stage == layers
                own = [layer for group in stage.kv.groups if group.kind != "state" for layer in group.layers]
                assert sorted(own) == [layer for layer in sorted(attending) if layer in layers]
                kinds = [group.kind for group in ctx.kv.groups if group.kind != "state"]
                assert [group.kind for group in stage.kv.groups if group.kind != "state"] == kinds
                assert [bool(d) for d in stage.model.layer_devices] == [
                    layer in layers or layer == layers.stop == N_LAYER for layer in range(N_LAYER + 1)
                ]
                planned = kvg.plan_memory(path, "cpu", layers=layers, **ONE_THREAD, **OPTIONS)
                assert [replace(part, compute_bytes=0) for part in planned] == [
                    replace(part, compute_bytes=0) for part in stage.devices
                ]
                assert planned[-1].compute_bytes >= stage.devices[-1].compute_bytes > 0
            # each layer once; a tied embedding, or none, twice
            tied = not any(t.name == "output.weight" for t in kvg.GgufFile(path).tensors)
            embedding = next(t for t in kvg.GgufFile(path).tensors if t.name == "token_embd.weight")
            twice = embedding.size if tied else 0
            assert sum(stage.model.weight_bytes for stage in contexts) == model.weight_bytes + twice
            assert sum(stage.devices[-1].n_layer for stage in contexts) == N_LAYER
            assert sum(stage.devices[-1].n_cache for stage in contexts) == len(attending)


def test_bytes_on_the_wire(architecture: Architecture) -> None:
    with pipeline(architecture(LLAMA), CUTS[1], **OPTIONS) as parts:
        before = [end.bytes_sent for end in parts.senders]
        flushes = [end.flushes for end in parts.senders]
        parts.pipe.decode(batch_of(PROMPT))
        for i in range(N):
            parts.pipe.append(i + 3)
        hidden = sum(29 + 14 * n + 4 * n * N_EMBD for n in [len(PROMPT), *[1] * N])
        logits = sum(25 + 4 * N_VOCAB for _ in range(N + 1))
        sent = [end.bytes_sent - b for end, b in zip(parts.senders, before, strict=True)]
        assert sent == [hidden, hidden, logits]
        assert [end.flushes - f for end, f in zip(parts.senders, flushes, strict=True)] == [2 * (N + 1)] * 3


@pytest.mark.parametrize("spec", [LLAMA, GEMMA], ids=name_of)
def test_edits_are_done_in_each_stage(architecture: Architecture, spec: ArchSpec) -> None:
    path, options = architecture(spec), {**OPTIONS, "swa_full": True}
    with pipeline(path, split(N_LAYER, 1), **options) as whole, pipeline(path, CUTS[1], **options) as parts:
        for pipe in (whole.pipe, parts.pipe):
            pipe.decode(batch_of(PROMPT))
            pipe.edit("seq_cp", 0, 1, 0, 15)
            pipe.edit("seq_rm", 0, 4, 9)
            pipe.edit("seq_add", 0, 9, -1, -5)
            pipe.edit("defrag")
            pipe.edit("update")
        for ctx in parts.contexts:
            assert [ctx.kv.seq_pos_max(seq) for seq in range(3)] == [15, 14, -1]
            for index in range(len(ctx.kv.groups)):
                theirs, ours = whole.contexts[0].kv.cells(index), ctx.kv.cells(index)
                assert np.array_equal(theirs.pos, ours.pos)
                assert np.array_equal(theirs.seq, ours.seq)
        rows = [
            [pipe.append(7, 0), pipe.append(9, 1), pipe.append(11, 0)] for pipe in (whole.pipe, parts.pipe)
        ]
        assert all(np.array_equal(a, b) for a, b in zip(*rows, strict=True))


@pytest.mark.parametrize("spec", CASES, ids=name_of)
@pytest.mark.parametrize(("source", "target"), [(2, 3), (3, 1)])
def test_a_sequence_goes_on_over_other_cuts(
    architecture: Architecture, tmp_path: Path, spec: ArchSpec, source: int, target: int
) -> None:
    path, cuts = architecture(spec), (split(N_LAYER, source), split(N_LAYER, target))
    with pipeline(path, split(N_LAYER, 1), **OPTIONS) as whole:
        logits = whole.pipe.decode(batch_of(PROMPT))[0]
        first, rows = greedy(whole.pipe, logits, N)
        expected, _ = greedy(whole.pipe, rows[-1], N)
    with pipeline(path, cuts[0], tmp_path, **OPTIONS) as before:
        assert greedy(before.pipe, before.pipe.decode(batch_of(PROMPT))[0], N)[0] == first
        before.pipe.save(0, "text", cuts[1])
    with pipeline(path, cuts[1], tmp_path, **OPTIONS) as behind:
        behind.pipe.load(2, "text", cuts[0])
        assert behind.pipe.seq_pos_max(2) == len(PROMPT) + N - 1
        assert greedy(behind.pipe, rows[-1], N, seq=2)[0] == expected


def test_hidden_states_are_let_go(architecture: Architecture) -> None:
    """After the decode the context doesn't keep them, nor the frame that they came in."""
    with stage_contexts(architecture(LLAMA), CUTS[0], **OPTIONS) as (first, last):
        first.decode(batch_of(PROMPT))
        hidden = first.embeddings()
        last.decode(batch_of(PROMPT), hidden=hidden)
        kept = weakref.ref(hidden)
        del hidden
        gc.collect()
        assert kept() is None


def test_adapters_add_to_the_layers_of_a_stage(architecture: Architecture, tmp_path: Path) -> None:
    path = architecture(LLAMA)
    adapter = write_adapter(tmp_path / "adapter.gguf", path, frame=("token_embd.", "output."))
    rows, n_pairs = [], []
    for cuts in ([range(N_LAYER)], *CUTS):
        with stage_contexts(path, cuts, **OPTIONS) as contexts:
            own = [ctx.model.load_adapter(adapter) for ctx in contexts]
            for ctx, each in zip(contexts, own, strict=True):
                ctx.set_adapters([(each, 0.75)])
            hidden = None
            for ctx in contexts:
                ctx.decode(batch_of(PROMPT), hidden=hidden)
                hidden = ctx.embeddings()
            rows.append(contexts[-1].logits())
            n_pairs.append(sum(each.n_pairs for each in own))
    assert all(np.array_equal(each, rows[0]) for each in rows)
    assert n_pairs == [n_pairs[0]] * 3 and n_pairs[0] > N_LAYER
    with pipeline(path, CUTS[0], **OPTIONS) as parts:
        assert not np.array_equal(parts.pipe.decode(batch_of(PROMPT)), rows[0])


def test_a_classifier_is_the_last_stages(architecture: Architecture) -> None:
    path = architecture(replace(QWEN3, n_classes=2, pooling=4))
    vectors = np.random.default_rng(0).normal(size=(3, N_EMBD)).astype(np.float32)
    with stage_contexts(path, [range(N_LAYER)], **OPTIONS) as (whole,):
        expected = whole.classify(vectors)
    with stage_contexts(path, CUTS[0], **OPTIONS) as (first, last):
        assert [ctx.model.n_classes for ctx in (first, last)] == [0, 2]
        assert np.array_equal(last.classify(vectors), expected)
        with pytest.raises(kvg.UnsupportedError, match="no classifier"):
            first.classify(vectors)


def test_what_can_not_be_saved_or_loaded(architecture: Architecture, tmp_path: Path) -> None:
    with pipeline(architecture(LLAMA), CUTS[0], tmp_path, **OPTIONS) as parts:
        pipe = parts.pipe
        pipe.decode(batch_of(PROMPT))
        for cuts in ([range(6), range(7, 12)], [range(6), range(6, 11)], [range(1, 12)], []):
            with pytest.raises(kvg.InvalidArgumentError, match="cuts"):
                pipe.save(0, "text", cuts)
        for name in ("", "../text", "a" * 65):
            with pytest.raises(kvg.InvalidArgumentError, match="a name has"):
                pipe.save(0, name)
        with pytest.raises(kvg.InvalidArgumentError, match="seq_rm: "):
            pipe.edit("seq_rm", 0)
        with pytest.raises(kvg.StateError, match="no such sequence was saved"):
            pipe.load(1, "text")
        pipe.save(0, "text")
        with pytest.raises(kvg.StateError, match="a sequence of this name was saved"):
            pipe.save(0, "text")
        with pytest.raises(kvg.StateError, match="other cuts"):
            pipe.load(1, "text", CUTS[1])
        with pytest.raises(kvg.InvalidArgumentError, match="has cells"):
            pipe.load(0, "text")
        pipe.load(1, "text")
        assert np.array_equal(pipe.append(7, 1), pipe.append(7, 0))
        pipe.save(1, "text")  # what was loaded is gone
        with pytest.raises(kvg.InvalidArgumentError, match="stages can't be told"):
            pipe.edit("seq_rm", np.int64(0), 5, -1)
        assert pipe.seq_pos_max(0) == len(PROMPT)


@pytest.mark.parametrize("at", [1, 2])
def test_a_batch_that_a_later_stage_refuses_is_taken_back(architecture: Architecture, at: int) -> None:
    with pipeline(architecture(LLAMA), CUTS[1], **OPTIONS) as parts:
        parts.pipe.decode(batch_of(PROMPT))
        refusing = parts.contexts[at]  # behind its pipeline's back it has a later position
        refusing.decode(batch_of([3], 40), hidden=np.ones((1, N_EMBD), np.float32))
        with pytest.raises(
            kvg.InvalidArgumentError, match=rf"layers {4 * at} to {4 * at + 3}: .*position 21"
        ):
            parts.pipe.append(5)
        last = [20, 20, 20]
        last[at] = 40
        assert [ctx.kv.seq_pos_max(0) for ctx in parts.contexts] == last
        parts.pipe.edit("clear")
        assert parts.pipe.append(5).shape == (N_VOCAB,)


def test_an_edit_that_fails_in_a_later_stage(architecture: Architecture) -> None:
    with pipeline(architecture(LLAMA), CUTS[1], **OPTIONS) as parts:
        parts.pipe.decode(batch_of(PROMPT))
        with pytest.raises(kvg.InvalidArgumentError, match="seq"):
            parts.pipe.edit("seq_rm", 9, 0, -1)  # refused by the first stage: nothing has changed
        with pytest.raises(kvg.InvalidArgumentError, match="no call 'close'"):
            parts.pipe.edit("close")
        parts.contexts[2].decode(batch_of([3], 2**31 - 9), hidden=np.ones((1, N_EMBD), np.float32))
        with pytest.raises(kvg.InvalidArgumentError, match="layers 8 to 11: "):
            parts.pipe.edit("seq_add", 0, 0, -1, 100)
        for call in (lambda: parts.pipe.append(5), lambda: parts.pipe.edit("update")):
            with pytest.raises(kvg.StateError, match="the stages differ"):
                call()
        parts.pipe.edit("clear")
        assert parts.pipe.append(5).shape == (N_VOCAB,)


class TestRefused:
    @pytest.mark.parametrize("layers", [range(3, 3), range(-1, 4), range(0, 4, 2), range(8, 13), (0, 4), 4])
    def test_ranges(self, architecture: Architecture, layers: Any) -> None:
        with pytest.raises(kvg.InvalidArgumentError, match="layer"):
            kvg.Model(architecture(LLAMA), device="cpu", layers=layers)

    def test_layers_that_read_those_of_others(self, architecture: Architecture) -> None:
        path = architecture(
            ArchSpec("gemma4", 6, window=8, period=2, n_shared=2, head_dim_window=16, n_head_kv_window=2)
        )
        with pytest.raises(kvg.UnsupportedError, match=r"layer \d reads K and V of layer \d.*gemma4"):
            kvg.Model(path, device="cpu", layers=range(3))

    def test_embeddings_of_each_layer(self, architecture: Architecture) -> None:
        path = architecture(
            ArchSpec("gemma4", 6, window=8, period=3, head_dim_window=16, n_head_kv_window=2, n_embd_layer=16)
        )
        with pytest.raises(kvg.UnsupportedError, match=r"gemma4.*can't be cut.*embeddings of their own"):
            kvg.Model(path, device="cpu", layers=range(3, 6))

    def test_encoders(self, architecture: Architecture) -> None:
        with pytest.raises(kvg.UnsupportedError, match=r"bert.*encoder"):
            kvg.Model(architecture(ArchSpec("bert", 4)), device="cpu", layers=range(2))

    def test_what_a_stage_has_not(self, architecture: Architecture) -> None:
        hidden = np.zeros((1, N_EMBD), np.float32)
        with stage_contexts(architecture(LLAMA), CUTS[0], **OPTIONS) as (first, last):
            for call in (first.logits, first.scores, lambda: first.append(3)):
                with pytest.raises(kvg.UnsupportedError, match="layers 0 to 5 of 12 have no logits"):
                    call()
            with pytest.raises(kvg.InvalidArgumentError, match="takes tokens"):
                first.decode(batch_of([3]), hidden=hidden)
            with pytest.raises(
                kvg.InvalidArgumentError, match="layers 6 to 11 take those that layer 5 gives"
            ):
                last.decode(batch_of([3]))
            wrongs: list[Any] = [hidden[:, :-1], hidden.astype(np.float64), [[0.0] * N_EMBD], hidden * np.nan]
            for wrong in wrongs:
                with pytest.raises(kvg.InvalidArgumentError, match="hidden"):
                    last.decode(batch_of([3]), hidden=wrong)
            for ctx in (first, last):
                with pytest.raises(kvg.UnsupportedError, match="can't answer by themselves"):
                    kvg.Engine(ctx.model)
                with pytest.raises(kvg.UnsupportedError, match="can't answer by themselves"):
                    kvg.generate(ctx, [3])
            assert [ctx.kv.seq_pos_max(0) for ctx in (first, last)] == [-1, -1]

    @pytest.mark.parametrize(
        ("cuts", "said"),
        [
            ([range(4), range(5, 12)], "begin at 5, and the stage before it ends at 4"),
            ([range(4), range(4, 8)], "layers 0 to 7 of 12"),
        ],
    )
    def test_gaps(self, architecture: Architecture, cuts: list[range], said: str) -> None:
        with pytest.raises(kvg.StateError, match=said), pipeline(architecture(LLAMA), cuts, **OPTIONS):
            pass

    @pytest.mark.parametrize("stages", [None, [], [[0]], [["a", "b"]], [[0, 4], [3, 6]], [[0, 5]]])
    def test_what_is_no_line_of_stages(self, architecture: Architecture, stages: Any) -> None:
        """What a stage hears from the one before it is checked, and the others hear why it ends."""
        with stage_contexts(architecture(LLAMA), CUTS[0], **OPTIONS) as (_, last):
            (head, before), (after, back) = pair(), pair()
            worker = beside(lambda: stream.run_stage(last, before, after))
            stage = StageCache(last, None)
            noted(FrameKind.HELLO, {**stage.facts(), "stages": stages}).send(head)
            assert receive_frame(back, stage.limits).kind == FrameKind.FAILED
            with pytest.raises(kvg.StateError, match="layers 6 to 11 doesn't fit"):
                worker.result(TIMEOUT)

    def test_other_sizes(self, architecture: Architecture) -> None:
        path = architecture(LLAMA)
        with (
            stage_contexts(path, CUTS[0], **OPTIONS) as (first, _),
            stage_contexts(path, CUTS[0], **{**OPTIONS, "n_ubatch": 4}) as (_, last),
        ):
            (to_last, before), (after, back) = pair(), pair()
            worker = beside(lambda: stream.run_stage(last, before, after))
            with pytest.raises(kvg.StateError, match="n_ubatch is 4 there, and 8"):
                stream.Pipeline(first, to_last, back)
            with pytest.raises(kvg.StateError, match="n_ubatch"):
                worker.result(TIMEOUT)
