"""Twice as many texts as fit, in two slots: each says what it would say alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.architectures import ArchSpec
from support.engines import decode, open_context, random_ids, run_of
from support.models import N_VOCAB
from support.recurrent import DELTA_NET
from support.streams import pair

import pykvgraph as kvg
from pykvgraph import stream

LLAMA = ArchSpec("llama", 4, 64, 2, 1, 32, 32)
GEMMA = ArchSpec("gemma3", 4, 64, 2, 1, 32, 32, window=8)
N_TEXTS, N_PROMPT, N_SAID = 4, 30, 20
N_CELLS = N_PROMPT + N_SAID
OPTIONS: dict[str, Any] = {"n_batch": 32, "n_ubatch": 32}
PROMPTS = [random_ids(N_PROMPT + text % 3, N_VOCAB, text) for text in range(N_TEXTS)]


def alone(model: kvg.Model, prompt: list[int]) -> list[int]:
    with open_context(model, n_ctx=64, n_seq_max=1, **OPTIONS) as ctx:
        decode(ctx, run_of(prompt))
        said = [int(ctx.logits()[-1].argmax())]
        while len(said) < N_SAID:
            said.append(int(ctx.append(said[-1]).argmax()))
        return said


def ways(kind: str, n_layer: int, folder: Path) -> list[tuple[stream.Layout, stream.Layout]]:
    found = []
    for text in range(N_TEXTS):
        if kind == "memory":
            out, back = pair()
        else:
            out, back = (stream.open(f"file:{folder}/{text}", timeout=20) for _ in range(2))
        found.append((stream.Layout({out: range(n_layer)}), stream.Layout({back: range(n_layer)})))
    return found


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("spec", [LLAMA, GEMMA, DELTA_NET], ids=lambda spec: spec.arch)
def test_twice_as_many_as_fit(
    architecture: Callable[[ArchSpec], Path], spec: ArchSpec, kind: str, tmp_path: Path
) -> None:
    with (
        kvg.Model(architecture(spec), device="cpu") as model,
        open_context(model, n_ctx=2 * (N_CELLS + 2), n_seq_max=2, **OPTIONS) as ctx,
        stream.Swapping(ctx, ways(kind, model.n_layer, tmp_path)) as texts,
    ):
        said: list[list[int]] = [[] for _ in range(N_TEXTS)]
        for _ in range(N_SAID):
            order = []
            for text, seq in texts.turns():
                order.append(text)
                if said[text]:
                    said[text].append(int(ctx.append(said[text][-1], seq).argmax()))
                else:
                    decode(ctx, run_of(PROMPTS[text], 0, (seq,)))
                    said[text].append(int(ctx.logits()[-1].argmax()))
                assert ctx.kv.seq_pos_max(seq) + 1 == len(PROMPTS[text]) + len(said[text]) - 1
            assert order == list(range(N_TEXTS))
        assert said == [alone(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("n_texts", [1, 2])
def test_what_fits_stays(small: kvg.Model, n_texts: int) -> None:
    with open_context(small, n_ctx=64, n_seq_max=3, **OPTIONS) as ctx:
        layouts = [tuple(stream.Layout({end: range(2)}) for end in pair()) for _ in range(n_texts)]
        with stream.Swapping(ctx, layouts, (2, 0)) as texts:  # type: ignore[arg-type]
            for _ in range(3):
                assert list(texts.turns()) == [(0, 2), (1, 0)][:n_texts]
        assert all(end.flushes == 0 for way in layouts for layout in way for end, _ in layout.parts)


def test_slots_that_cannot_be(small: kvg.Model) -> None:
    with open_context(small, n_ctx=64, n_seq_max=3, **OPTIONS) as ctx:
        ctx.append(3, 2)
        for slots in ((0, 0), (0, 2), (0, 3), (-1, 0)):
            with pytest.raises(kvg.InvalidArgumentError, match="slot"):
                stream.Swapping(ctx, [], slots)


def test_a_text_that_cannot_come_back(small: kvg.Model) -> None:
    """It is lost, and said to be; who is in the cache can go on."""
    with open_context(small, n_ctx=64, n_seq_max=2, **OPTIONS) as ctx:
        layouts = [tuple(stream.Layout({end: range(2)}) for end in pair()) for _ in range(3)]
        with stream.Swapping(ctx, layouts) as texts:  # type: ignore[arg-type]
            for _, seq in texts.turns():
                ctx.append(3, seq)
            layouts[1][1].close()

            def go_on() -> None:
                for _ in range(3):
                    for _, seq in texts.turns():
                        ctx.append(4, seq)

            with pytest.raises(kvg.TransportError):
                go_on()
        assert max(ctx.kv.seq_pos_max(seq) for seq in (0, 1)) >= 0


def test_the_last_swap_fails(small: kvg.Model, tmp_path: Path) -> None:
    """Nobody takes another turn, and it is told all the same: a text is lost."""
    every = ways("file", small.n_layer, tmp_path)
    with (
        open_context(small, n_ctx=128, n_seq_max=2, **OPTIONS) as ctx,
        pytest.raises(kvg.TransportError),
        stream.Swapping(ctx, every) as texts,
    ):
        for text, seq in texts.turns():
            if text == N_TEXTS - 2:
                every[text][0].close()  # through which it would leave in the last turn
            decode(ctx, run_of(PROMPTS[text][:8], 0, (seq,)))
