"""`-dt`: the share of holes above which a decode closes them, in each verb that makes a context."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.made_contexts import of_made_contexts

from pykvgraph.cli import main, serve
from pykvgraph.params.params import ContextParams
from pykvgraph.server.engine_spec import EngineSpec

QUARTER_OF_HOLES = "decode 0 12\nseq_rm 0 4 7\ndecode 0 1\n"
RUNS = {
    "generate": "-p a -n 1 -c 64",
    "chat": "-n 1 -c 256",
    "batch": "-c 256 -f prompts.jsonl -o -",
    "passkey": "--n-junk 1 -c 256",
    "bench": "-p 8 -n 0 -r 1",
    "cells": "-",
}


def run(verb: str, stories: Path, *words: str, script: str = "") -> Result:
    return CliRunner().invoke(main, [verb, "-m", str(stories), *words], input=script, prog_name="pykvgraph")


@pytest.fixture
def thresholds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Of the contexts that are made."""
    return of_made_contexts(monkeypatch, "defrag_threshold")


@pytest.mark.parametrize(
    ("words", "n_kv"), [("", 13), ("-dt 0.2", 10), ("--defrag-thold 0.3", 13), ("-dt -1", 13)]
)
def test_holes_that_are_more_are_closed(stories: Path, words: str, n_kv: int) -> None:
    """3 of 12 cells are holes, and one more token is decoded."""
    result = run("cells", stories, "-", "--json", *words.split(), script=QUARTER_OF_HOLES)
    (group,) = json.loads(result.stdout)["steps"][-1]["groups"]
    assert (group["n_used"], group["n_kv"]) == (10, n_kv)


@pytest.mark.parametrize("verb", RUNS)
def test_each_context_has_it(
    stories: Path, thresholds: list[float], verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"prompt": "a", "max_tokens": 1}\n')
    words = shlex.split(RUNS[verb])
    result = run(verb, stories, *words, "-dt", "0.375", script="decode 0 1\n")
    assert result.exit_code == (1 if verb == "passkey" else 0), result.output
    assert thresholds[-1] == 0.375
    thresholds.clear()
    run(verb, stories, *words, script="decode 0 1\n")
    assert thresholds[-1] == (-1 if verb in ("bench", "cells") else ContextParams.defrag_threshold)


@pytest.mark.parametrize("env", [{}, {"LLAMA_ARG_DEFRAG_THOLD": "0.5"}])
def test_a_servers(stories: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    specs: list[EngineSpec] = []

    class Nothing:
        def run(self, **_: Any) -> None:
            pass

    def made(_settings: Any, engine: EngineSpec, *_: Any) -> Nothing:
        specs.append(engine)
        return Nothing()

    monkeypatch.setattr(serve, "_server", made)
    words = [
        "serve",
        "-m",
        str(stories),
        "-c",
        "256",
        "--margin",
        "7",
        "--port",
        "0",
        *([] if env else ["-dt", "0.25"]),
    ]
    result = CliRunner().invoke(main, words, env=env, prog_name="pykvgraph")
    assert result.exit_code == 0, result.output
    assert "no effect" not in result.output
    assert specs[0].context["margin"] == 7
    with specs[0].load() as engine:
        assert engine.context.defrag_threshold == (0.5 if env else 0.25)
