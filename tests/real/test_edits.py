"""Edits of a real text: what they cost beside the edited text, decoded as it then stands."""

from __future__ import annotations

import numpy as np
import pytest
from support.chance import THOROUGH
from support.engines import Logits, open_context
from support.real import divergences, news_of, read, same_top

import pykvgraph as kvg

pytestmark = pytest.mark.slow
N_TEXT, CUT, N_BEHIND = 1000, range(300, 600), 200
N_FRONT, N_DOCUMENTS, N_DOCUMENT = 100, 4, 300
TRIALS = range(0, 250, 5) if THOROUGH else range(1)  # the first article of each
# Few trials may be far from what many are on the average
SLACK = 1 if THOROUGH else 1.5


def behind_it(ctx: kvg.Context, text: kvg.Sequence, ids: list[int]) -> Logits:
    """What comes behind a text, which is the same afterwards."""
    rows = read(ctx, ids, len(text))
    ctx.kv.seq_rm(0, len(text), -1)
    return rows


def fresh(ctx: kvg.Context, text: list[int], ids: list[int]) -> Logits:
    ctx.reset()
    read(ctx, text)
    return read(ctx, ids, len(text))


def test_a_cut_and_its_repair(smollm2_f32: kvg.Model) -> None:
    """Not nothing: the rows behind the cut were made of what had seen it."""
    found: dict[int, list[float]] = {0: [], 32: [], 256: []}
    alike = []
    with open_context(smollm2_f32, n_ctx=1280, n_batch=128) as ctx:
        for article in TRIALS:
            ids = news_of(smollm2_f32, N_TEXT + N_BEHIND, article)
            behind = ids[N_TEXT:]
            true = fresh(ctx, ids[: CUT.start] + ids[CUT.stop : N_TEXT], behind)
            ctx.reset()
            text = kvg.Sequence(ctx)
            text.set(ids[:N_TEXT])
            text.remove(CUT.start, CUT.stop, repair=0)
            for k, kl in found.items():
                text.repair([(CUT.start, CUT.start + k)])
                rows = behind_it(ctx, text, behind)
                kl.append(float(divergences(true, rows).mean()))
                if k == 0:
                    alike.append(same_top(true, rows))
    mean = {k: float(np.mean(kl)) for k, kl in found.items()}
    print(f"mean KL by tokens that are repaired: {mean}; same top {np.mean(alike):.3f}; {found}")
    assert mean[0] <= 0.015 * SLACK
    assert mean[32] <= 0.0115 * SLACK
    assert mean[256] <= 0.0065 * SLACK
    assert np.mean(alike) >= 0.9


def test_linked_documents_and_their_repair(smollm2_f32: kvg.Model) -> None:
    """Four that were read alone, one behind the other, behind a text; how much of the divergence is left."""
    found: dict[int, list[float]] = {0: [], 8: [], 32: [], 128: []}
    n_text = N_FRONT + N_DOCUMENTS * N_DOCUMENT
    begins = range(N_FRONT, n_text, N_DOCUMENT)
    with open_context(smollm2_f32, n_ctx=3072, n_batch=128, n_seq_max=2) as ctx:
        for article in TRIALS:
            ids = news_of(smollm2_f32, n_text + N_BEHIND, article)
            behind = ids[n_text:]
            true = fresh(ctx, ids[:n_text], behind)
            ctx.reset()
            text = kvg.Sequence(ctx)
            text.set(ids[:N_FRONT])
            for p in begins:
                text.link(ctx.read(ids[p : p + N_DOCUMENT]), repair=0)
            for k, kl in found.items():
                text.repair([(p, p + k) for p in begins])
                kl.append(float(divergences(true, behind_it(ctx, text, behind)).mean()))
    mean = {k: float(np.mean(kl)) for k, kl in found.items()}
    print(f"mean KL by tokens that are repaired: {mean}; {found}")
    assert mean[8] <= 0.5 * SLACK * mean[0]
    assert mean[32] <= 0.4 * SLACK * mean[0]
    assert mean[128] <= 0.28 * SLACK * mean[0]


def test_repair_in_windows(gemma3_f32: kvg.Model) -> None:
    """All behind the seam, in layers that see 512 positions: as the text, decoded anew."""
    ids = news_of(gemma3_f32, 760)
    options = {"n_ctx": 1024, "n_batch": 128, "swa_full": True, "type_k": "f32", "type_v": "f32"}
    with open_context(gemma3_f32, **options) as ctx:
        true = fresh(ctx, ids[:100] + ids[140:740], ids[740:])
        ctx.reset()
        text = kvg.Sequence(ctx)
        text.set(ids[:740])
        text.remove(100, 140, repair=1000)
        assert text.approximate_from is None
        rows = behind_it(ctx, text, ids[740:])
    error = float(((rows.astype(np.float64) - true) ** 2).sum() / (true.astype(np.float64) ** 2).sum())
    print(f"NMSE {error:.1e}")
    assert error <= 1e-6
