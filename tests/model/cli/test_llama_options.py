"""generate and chat with options that users of llama-cli type."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pykvgraph.cli import main

STORIES = Path(__file__).parents[2] / "data" / "stories260K.gguf"
GOLDEN = (STORIES.parent / "stories260K.golden.txt").read_text(encoding="utf-8")


def generated(*arguments: str) -> str:
    prompt = ["-p", "Once upon a time", "-n", "24"]
    done = CliRunner().invoke(main, ["generate", "-m", str(STORIES), *prompt, *arguments])
    assert done.exit_code == 0, done.stderr
    return done.stdout.removesuffix("\n")


def test_what_changes_nothing_of_the_text() -> None:
    plain = generated()
    assert GOLDEN.partition("Once upon a time")[2].startswith(plain)
    for words in ("-fa on", "-fa off", "-fa", "-t -1", "--no-perf", "--simple-io", "--poll 50", "-no-cnv"):
        assert generated(*words.split()) == plain


@pytest.mark.parametrize(
    ("words", "overrides"),
    [
        ("--rope-scale 4", "rope.scaling.factor=float:4"),
        ("--rope-freq-scale 0.25", "rope.scaling.factor=float:4"),
        ("--rope-freq-base 1000", "rope.freq_base=float:1000"),
        (
            "--rope-scaling yarn --rope-scale 40 --yarn-orig-ctx 16",
            "rope.scaling.type=str:yarn,llama.rope.scaling.factor=float:40,"
            "llama.rope.scaling.original_context_length=int:16",
        ),
    ],
)
def test_rotation_is_an_override(words: str, overrides: str) -> None:
    said = generated(*words.split())
    assert said == generated("--override-kv", f"llama.{overrides}")
    assert said != generated()


def test_where_a_text_ends_and_what_it_may_be(tmp_path: Path) -> None:
    assert generated("-r", "girl") == GOLDEN.partition("Once upon a time")[2].partition("girl")[0]
    (tmp_path / "grammar").write_text('root ::= "a" [a-z]+')
    assert generated("--grammar-file", str(tmp_path / "grammar")) == generated(
        "--grammar", 'root ::= "a" [a-z]+'
    )
    assert generated("--grammar-file", str(tmp_path / "grammar")).startswith("a")
    (tmp_path / "schema").write_text('{"const": "xyz"}')
    assert generated("-jf", str(tmp_path / "schema")) == '"xyz"'


def test_rotation_of_no_file() -> None:
    done = CliRunner().invoke(main, ["chat", "--rope-scale", "4"])
    assert done.exit_code == 2
    assert "give -m" in done.stderr
