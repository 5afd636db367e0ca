"""tools/new_arch.py: which row a file is like, and where it parts from libllama."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from support.architectures import ArchSpec

TOOLS = Path(__file__).parents[3] / "tools"
Architecture = Callable[[ArchSpec], Path]


def run(path: Path) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [sys.executable, TOOLS / "new_arch.py", path]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_file_that_agrees(architecture: Architecture) -> None:
    done = run(architecture(ArchSpec("gemma3", window=24, scaling="linear")))
    assert (done.returncode, done.stderr) == (0, "")
    assert "native/src/model/recipes_gemma.cpp:" in done.stdout


def test_a_file_without_a_row(architecture: Architecture, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(architecture(ArchSpec("olmoe", n_expert=4)).read_bytes().replace(b"olmoe", b"oxmoe"))
    done = run(path)
    assert (done.returncode, done.stderr) == (1, "")
    assert "'oxmoe' has no recipe yet" in done.stdout
    assert "like olmoe: native/src/model/recipes_rms.cpp:" in done.stdout.partition("the file")[0]


def test_rows_with_other_forms_of_the_same_tensors(architecture: Architecture, tmp_path: Path) -> None:
    """Q, K and V in one matrix or in three; a bias that has no matrix."""
    spec = ArchSpec("dots1", n_head_kv=4, n_expert=4, n_ff_shared=96)
    path = tmp_path / "model.gguf"
    path.write_bytes(architecture(spec).read_bytes().replace(b"dots1", b"dots9"))
    said = run(path).stdout
    assert "100% like dots1:" in said
    assert "96% like bailingmoe2:" in said
    assert "exp_probs_b" not in said


def test_a_file_that_libllama_refuses(architecture: Architecture) -> None:
    """Its query heads share K, which libllama doesn't know of dots.llm1."""
    done = run(architecture(ArchSpec("dots1", n_expert=4, n_ff_shared=96)))
    assert (done.returncode, done.stderr) == (1, "")
    assert "'blk.0.attn_k.weight' has wrong shape" in done.stdout


@pytest.mark.parametrize("data", [b"", b"GGUF", b"no model", bytes(1000)])
def test_what_is_no_model(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    done = run(path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("model.gguf: ")


def test_the_layer_and_the_tensor(
    architecture: Architecture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With an engine that is wrong where the third of five layers norms its K."""
    monkeypatch.syspath_prepend(TOOLS)
    import new_arch
    from compared_apart import Verdict
    from gguf_copy import Source

    def compare(path: Path, n_tokens: int = 120) -> Verdict:
        norms = [t.data for t in gguf.GGUFReader(path).tensors if t.name == "blk.2.attn_k_norm.weight"]
        return Verdict(1.0 if norms and n_tokens > 1 and not np.all(norms[0] == 1) else 0.0, 1e-9)

    monkeypatch.setattr(new_arch, "compare", compare)
    new_arch.explain(Source(architecture(ArchSpec("qwen3", 5))), tmp_path)
    said = capsys.readouterr().out
    assert "layer 2 is the first that is wrong" in said
    assert [line.split()[1] for line in said.splitlines() if "AGREES  " in line] == [
        "blk.2.attn_k_norm.weight"
    ]


def test_a_copy_is_what_libllama_reads(
    architecture: Architecture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer layers, a norm of ones, and a matrix of zeros: both engines compute the same."""
    monkeypatch.syspath_prepend(TOOLS)
    from compared_apart import compare
    from gguf_copy import Source

    source = Source(architecture(ArchSpec("gemma3", 4, window=24)))
    path = source.write(tmp_path / "cut.gguf", 2, neutral=("blk.1.attn_q_norm.weight", "blk.0.ffn_up.weight"))
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    assert np.all(tensors["blk.1.attn_q_norm.weight"] == 1)
    assert np.all(tensors["blk.0.ffn_up.weight"] == 0)
    assert {name.split(".")[1] for name in tensors if name.startswith("blk.")} == {"0", "1"}
    assert compare(path).agrees
