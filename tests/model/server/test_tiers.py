"""--cache-ram, --cache-disk, --cache-dir: a prompt comes back in another server, and /metrics tells of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from support.served import served

import pykvgraph as kvg
from pykvgraph.cli import main
from pykvgraph.engine import fetches

from .conftest import STORIES


def ask(url: str, prompt: list[int]) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 16, "temperature": 0, "return_tokens": True}
    found: dict[str, Any] = httpx.post(f"{url}/completion", json=body, timeout=60).json()
    return found


def test_a_prompt_outlives_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches, "decode_seconds", lambda ctx: lambda first, end: 60.0)
    tiers = kvg.Tiers("64M", "64M", tmp_path)

    def load() -> kvg.Engine:
        return kvg.Engine(kvg.Model(STORIES, "cpu"), n_ctx=512, n_seq_max=1, tiers=tiers)

    with kvg.Model(STORIES, "cpu") as model:
        prompt = (model.tokenizer.encode("Once upon a time there was a frog. ") * 40)[:300]
    told = []
    for _ in range(2):
        with served(load, metrics=True) as (url, _):
            told.append(ask(url, prompt))
            text = httpx.get(f"{url}/metrics").text
    assert [each["timings"]["cache_n"] for each in told] == [0, 299]
    assert told[0]["tokens"] == told[1]["tokens"]
    assert re.search(r"^kvgraph:tier_loaded_tokens_total 299", text, re.MULTILINE)
    assert re.search(r'^kvgraph:tier_bytes\{tier="disk"\} [1-9]', text, re.MULTILINE)
    assert 'kvgraph:tier_misses_total{reason="damaged"} 0.0' in text


@pytest.mark.parametrize(
    "options", [("--cache-dir", "x"), ("--cache-ram", "0", "--cache-disk", "5"), ("--cache-ram", "-2")]
)
def test_options_that_cannot_be(options: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, ["serve", "-m", str(STORIES), "--port", "0", *options])
    assert done.exit_code == 2
    assert "--cache" in done.output
