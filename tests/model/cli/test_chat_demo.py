"""pykvgraph chat --demo: a dialogue to read, and a table."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from pykvgraph.cli import main


@pytest.mark.slow
def test_a_dialogue_and_a_table() -> None:
    result = CliRunner().invoke(main, ["chat", "--demo", "--trials", "2", "-s", "1"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("system prompt: ")
    rows = {line[:12].strip(): line[12:].split() for line in lines[-3:]}
    assert rows["kept prefix"][-4:] == ["2", "2", "0", "0"]
    assert rows["window"][-4:] == ["2", "2", "0", "0"]
    assert rows["given up"][-4:] == ["2", "0", "2", "0"]
    assert "context full: " in result.stderr
