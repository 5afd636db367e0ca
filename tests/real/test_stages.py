"""Published models in two and three stages: a text of the news, and what follows, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import chance
from support.real import GEMMA3, SMOLLM2, news_of
from support.stages import batch_of, greedy, pipeline
from support.streams import split

import pykvgraph as kvg

pytestmark = pytest.mark.slow
OPTIONS: dict[str, Any] = {"n_ctx": 1024, "n_batch": 700, "n_ubatch": 256, "n_seq_max": 1}
N_PROMPT, N = 640, 16  # beyond Gemma's windows of 512


@pytest.mark.parametrize(
    "path", [GEMMA3, *([SMOLLM2] if chance.THOROUGH else [])], ids=lambda path: path.stem
)
def test_stages_say_what_one_process_says(path: Path, tmp_path: Path) -> None:
    with kvg.Model(path, device="cpu", layers=range(1)) as model:
        prompt, n_layer = news_of(model, N_PROMPT), model.n_layer
    texts, cuts = [], [split(n_layer, depth) for depth in (1, 2, 3)]
    for each in cuts:
        with pipeline(path, each, tmp_path, **OPTIONS) as parts:
            logits = parts.pipe.decode(batch_of(prompt))[0]
            texts.append(greedy(parts.pipe, logits, N))
            parts.pipe.save(0, f"from-{len(each)}", cuts[2])
    for tokens, rows in texts[1:]:
        assert tokens == texts[0][0] and np.array_equal(rows, texts[0][1])
    with pipeline(path, cuts[2], tmp_path, **OPTIONS) as parts:
        following = []
        for each in cuts:
            parts.pipe.load(0, f"from-{len(each)}", each)
            following.append(greedy(parts.pipe, texts[0][1][-1], N)[0])
            parts.pipe.edit("seq_rm", 0, 0, -1)
        assert following[1:] == following[:1] * 2
