"""The README's Python runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_python_blocks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    monkeypatch.chdir(ROOT / "tests" / "data")
    changes = {'"model.gguf"': '"stories260K.gguf"', "10_000": "1_200"}
    source = "".join(blocks)
    for text, other in changes.items():
        assert text in source
        source = source.replace(text, other)
    names: dict[str, object] = {}
    exec(compile(source, "README.md", "exec"), names)
    assert len(capsys.readouterr().out) > 2000  # past the context's end
    ctx = names["ctx"]
    ctx.close()  # type: ignore[attr-defined]
