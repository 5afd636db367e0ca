"""A real model, a story that another program published."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import where
from support.engines import open_context

import pykvgraph as kvg

N_TOKENS = 256


@pytest.mark.parametrize("flash_attn", ["off", "on", pytest.param("auto", marks=pytest.mark.any_device)])
def test_greedy_story_is_the_published_one(stories: Path, golden_story: str, flash_attn: str) -> None:
    n = N_TOKENS if where.is_cpu() else N_TOKENS // 4
    with (
        kvg.Model(stories, device=where.device) as model,
        open_context(model, n_ctx=512, flash_attn=flash_attn) as ctx,
    ):
        story = "".join(piece.text for piece in kvg.generate(ctx, "", max_tokens=n)).strip()
    assert story == golden_story.strip() if n == N_TOKENS else golden_story.startswith(story)
