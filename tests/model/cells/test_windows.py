"""Window groups: a token attends to the last W positions, its own included."""

from __future__ import annotations

import numpy as np
import pytest
from support import where
from support.engines import OurEngine, Token, decode, open_context, prompt_then_singles, random_ids, run_of
from support.judge import nmse
from support.models import N_VOCAB, WINDOW

import pykvgraph as kvg

pytestmark = pytest.mark.any_device

IDS = random_ids(60, N_VOCAB)
F32 = {"type_k": "f32", "type_v": "f32"}


def test_full_groups_come_first(mixed: kvg.Model) -> None:
    assert [(layer.window, layer.group) for layer in mixed.layers] == [(WINDOW, 1), (0, 0)]
    with open_context(mixed, n_ctx=40) as ctx:
        assert [(group.kind, group.layers, group.window) for group in ctx.kv.groups] == [
            ("full", (1,), 0),
            ("window", (0,), WINDOW),
        ]


@pytest.mark.parametrize("flash_attn", ["auto", "on", "off"])
@pytest.mark.parametrize("n_ubatch", [1, 5, 64])
def test_a_token_sees_its_window_and_nothing_else(
    windowed: kvg.Model, n_ubatch: int, flash_attn: str
) -> None:
    """Positions with gaps: a window is of positions, not of cells."""
    tokens = [Token(token, i + i // 10 * 3) for i, token in enumerate(IDS)]
    options = {**F32, "n_ctx": 80, "n_ubatch": n_ubatch, "flash_attn": flash_attn}
    with open_context(windowed, **options) as ctx, open_context(windowed, n_ctx=80, **F32) as fresh:
        logits = decode(ctx, tokens)
        for i, token in enumerate(tokens):
            fresh.kv.clear()
            seen = [other for other in tokens[: i + 1] if other.pos > token.pos - WINDOW]
            assert nmse(logits[i : i + 1], decode(fresh, seen)[-1:]) <= where.rule(1e-6)


def test_batches_and_single_tokens_agree(mixed: kvg.Model) -> None:
    with open_context(mixed, n_ctx=80, **F32) as ctx, open_context(mixed, n_ctx=80, **F32) as other:
        singles = prompt_then_singles(OurEngine(ctx), IDS, 20)
        assert nmse(singles, decode(other, run_of(IDS))) <= where.rule(1e-6)


def test_sequences_see_their_own_windows(windowed: kvg.Model) -> None:
    """Two sequences in one batch, one far ahead of the other."""
    with open_context(windowed, n_ctx=200, n_seq_max=2, **F32) as ctx:
        with open_context(windowed, n_ctx=200, **F32) as fresh:
            expected = [decode(fresh, run_of(IDS))]
            fresh.kv.clear()
            expected.append(decode(fresh, run_of(IDS, 100)))
        tokens = zip(run_of(IDS, 0, (0,)), run_of(IDS, 100, (1,)), strict=True)
        logits = decode(ctx, [token for pair in tokens for token in pair])
        assert nmse(logits[::2], expected[0]) <= where.rule(1e-6)
        assert nmse(logits[1::2], expected[1]) <= where.rule(1e-6)


def test_attention_costs_a_window(windowed: kvg.Model) -> None:
    with open_context(windowed, n_ctx=2000, swa_full=True) as ctx:
        for i in (0, 500):
            decode(ctx, [token._replace(logits=False) for token in run_of(random_ids(500, N_VOCAB), i)])
        for i in range(20):
            decode(ctx, [Token(7, 1000 + i)])
        assert ctx.kv.n_attended <= WINDOW + 2 * 256  # spans are padded


def test_a_shift_moves_tokens_into_windows(windowed: kvg.Model) -> None:
    with open_context(windowed, n_ctx=80, **F32) as ctx, open_context(windowed, n_ctx=80, **F32) as fresh:
        decode(ctx, run_of(IDS[:30]))
        ctx.kv.seq_rm(0, 20, 26)
        ctx.kv.seq_add(0, 26, -1, -6)
        expected = decode(fresh, run_of([*IDS[:20], *IDS[26:31]]))[-1:]
        assert nmse(decode(ctx, [Token(IDS[30], 24)]), expected) <= where.rule(1e-6)
        assert np.isfinite(expected).all()
