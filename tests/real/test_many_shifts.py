"""K that is rotated again and again, cell by cell: how far it is off, and what the next tokens make of it.

Cells that move together, 64 or more, wait on the CPU where K is quantized, and nothing is rounded. Here runs
of 40 move, so that every shift rotates.
"""

from __future__ import annotations

import numpy as np
import pytest
from support.chance import THOROUGH
from support.drift import rms
from support.engines import Logits, decode, open_context, run_of
from support.kv_rows import cells_at, fresh_k
from support.real import divergences, news_of, read, same_top

import pykvgraph as kvg

pytestmark = pytest.mark.slow
N_TEXT, N_RUN, N_BEHIND = 400, 40, 100
FAR = 1000  # where nothing else is
N_SHIFTS = (2, 10, 100, 1000)
# after how many shifts the next tokens are still much as before
LASTS = {"f16": 1000, "bf16": 1000, "q8_0": 100, "q5_1": 10, "q5_0": 10, "q4_1": 2, "q4_0": 2}
TYPES = LASTS if THOROUGH else ("q8_0", "q4_0")


def shift(kv: kvg.KVCache, begin: int, n: int) -> None:
    """Moves a run up and down, n shifts in all, an even number; its cells are where they were then."""
    for i in range(n):
        place, delta = (begin + FAR, -FAR) if i % 2 else (begin, FAR)
        kv.seq_add(0, place, place + N_RUN, delta)
        assert kv.update().shifted_cells == N_RUN


@pytest.mark.parametrize("kv_type", TYPES)
def test_k_of_cells_that_are_shifted_singly(smollm2: kvg.Model, kv_type: str) -> None:
    """Its error grows with the square root of the number of shifts, and not faster until there are a hundred.

    From some point on types of 4 and 5 bits round what is mostly error, by steps that grow with it.
    """
    tokens = run_of(news_of(smollm2, N_RUN), FAR)
    places = [token.pos for token in tokens]
    with (
        open_context(smollm2, n_ctx=64, type_k="f32") as exact,
        open_context(smollm2, n_ctx=64, type_k=kv_type) as ctx,
    ):
        true = fresh_k(exact, tokens)
        decode(ctx, tokens)
        own = rms(ctx.kv.read_k(0)[cells_at(ctx.kv, places)] - true)
        done = 0
        for n in N_SHIFTS if THOROUGH else N_SHIFTS[:3]:
            shift(ctx.kv, FAR, n - done)
            done = n
            error = rms(ctx.kv.read_k(0)[cells_at(ctx.kv, places)] - true)
            told = f"off by {error / rms(true):.2%} of itself, {error / own:.1f} roundings"
            print(f"{kv_type}: {n} shifts: K is {told}")
            if n <= 100 or LASTS[kv_type] >= 100:
                assert 0.5 * np.sqrt(n) * own <= error <= 1.6 * np.sqrt(n) * own


@pytest.fixture(scope="module")
def never_shifted(smollm2: kvg.Model) -> Logits:
    """Of the tokens behind the text, in a cache of F32."""
    ids = news_of(smollm2, N_TEXT + N_BEHIND)
    with open_context(smollm2, n_ctx=512, n_batch=128, type_k="f32", type_v="f32") as ctx:
        return read(ctx, ids)[N_TEXT:]


@pytest.mark.parametrize("kv_type", TYPES)
def test_the_next_tokens(smollm2: kvg.Model, never_shifted: Logits, kv_type: str) -> None:
    """All cells of a text are shifted, run by run, as often as docs/quality.md says of the type."""
    ids = news_of(smollm2, N_TEXT + N_BEHIND)
    with open_context(smollm2, n_ctx=512, n_batch=128, type_k=kv_type) as ctx:
        read(ctx, ids[:N_TEXT])
        done, found = 0, {}
        for n in (0, *N_SHIFTS) if THOROUGH else (0, 2):
            for begin in range(0, N_TEXT, N_RUN):
                shift(ctx.kv, begin, n - done)
            done = n
            rows = read(ctx, ids[N_TEXT:], N_TEXT)
            ctx.kv.seq_rm(0, N_TEXT, -1)
            found[n] = float(divergences(never_shifted, rows).mean())
            told = f"mean KL {found[n]:.4f}, same top {same_top(never_shifted, rows):.0%}"
            print(f"{kv_type}: {n} shifts: {told}")
    assert all(kl <= 1.6 * found[0] + 0.004 for n, kl in found.items() if n <= LASTS[kv_type])
