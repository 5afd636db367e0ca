"""A prompt comes back from the disk, in a server that was started after the one that read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from support import real
from support.served import served_alone

import pykvgraph as kvg

pytestmark = pytest.mark.slow
N_PROMPT = 600
OPTIONS = ("-c", "1024", "-np", "1", "-t", "1", "--cache-ram", "256", "--cache-disk", "256")


def test_a_prompt_outlives_the_server(smollm2: kvg.Model, tmp_path: Path) -> None:
    prompt = 6 * real.news_of(smollm2, N_PROMPT // 6)  # what comes next is beyond doubt, and beyond rounding
    told = []
    for _ in range(2):
        with served_alone(real.SMOLLM2, *OPTIONS, "--cache-dir", str(tmp_path)) as (url, process):
            told.append(ask(url, prompt))
            process.terminate()
            process.wait(60)
    first, second = (each["timings"] for each in told)
    assert (first["cache_n"], first["prompt_n"]) == (0, N_PROMPT)
    assert second["cache_n"] + second["prompt_n"] == N_PROMPT
    assert second["prompt_n"] <= 32
    assert told[0]["tokens"] == told[1]["tokens"]
    assert second["prompt_ms"] < first["prompt_ms"] / 4


def ask(url: str, prompt: list[int]) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 16, "temperature": 0, "return_tokens": True}
    answer: dict[str, Any] = httpx.post(f"{url}/completion", json=body, timeout=300).json()
    return answer
