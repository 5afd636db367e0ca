"""benchmarks/turns.py: the same conversation with llama-server, where there is one."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import scripts
from support.architectures import ArchSpec

SPECS = [
    ArchSpec("qwen35", n_layer=4, period=4, state_heads=4),
    ArchSpec("gpt-oss", n_layer=4, n_expert=4, window=24),
]


@pytest.fixture(scope="module")
def script() -> Any:
    """The benchmark as a module, on one thread: more only wait for each other in models this small."""
    turns = scripts.imported("turns")
    turns.N_THREADS = 1
    return turns


@pytest.fixture(scope="module")
def server(script: Any) -> Path:
    if not script.SERVER.exists():
        pytest.skip(f"there is no llama-server at {script.SERVER}")
    found: Path = script.SERVER
    return found


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.arch)
def test_no_turn_decodes_more_again_than_llama_server(
    script: Any, server: Path, architecture: Callable[[ArchSpec], Path], spec: ArchSpec, tmp_path: Path
) -> None:
    path = script.with_tokenizer(architecture(spec), tmp_path / "model.gguf")
    args = argparse.Namespace(n_prompt=400, r=1, json=tmp_path / "turns.json", server=server)
    ours, theirs = (turns for _, turns in script.measure(path, args, [script.OURS, "default"]))
    assert [turn.name for turn in ours] == [turn.name for turn in theirs]
    assert [(turn.n_prompt, turn.n_old) for turn in ours] == [(turn.n_prompt, turn.n_old) for turn in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.n_again <= other.n_again, mine.name
        assert mine.seconds > 0 and other.seconds > 0


def test_without_llama_server_it_says_so(script: Any, tmp_path: Path) -> None:
    """And measures what there is."""
    (tmp_path / "models").mkdir()
    code = (
        "import turns; turns.N_THREADS = 1; from support.architectures import ArchSpec; "
        "turns.MODELS['qwen35'] = ArchSpec('qwen35', n_layer=4, period=4, state_heads=4); turns.main()"
    )
    arguments = ["--only", "qwen35", "--n-prompt", "300", "--server", str(tmp_path / "none")]
    arguments += ["--models", str(tmp_path / "models"), "--json", str(tmp_path / "turns.json")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={"PYTHONPATH": f"{scripts.FOLDER}", "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "SKIPPED: llama-server" in done.stderr
    assert "old tokens decoded again" in done.stdout
    report = json.loads((tmp_path / "turns.json").read_text(encoding="utf-8"))
    assert list(report["models"]["qwen35"]) == ["pykvgraph"]
    script.plot(tmp_path / "turns.json", tmp_path / "turns.png")
    assert (tmp_path / "turns.png").read_bytes().startswith(b"\x89PNG")
