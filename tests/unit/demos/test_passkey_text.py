"""The passkey text is written down where it must stand alone: nothing may tell another one."""

from __future__ import annotations

import ast
from pathlib import Path

from pykvgraph.demos import passkey

ROOT = Path(__file__).parents[3]


def texts(file: str) -> dict[str, str]:
    """The texts that a file's top level gives names to; the file isn't run, and may want what isn't here."""
    found = {}
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            name, text = node.targets[0], node.value.value
            if isinstance(name, ast.Name) and isinstance(text, str):
                found[name.id] = text
    return found


def test_the_embedded_model_was_trained_on_it() -> None:
    corpus = texts("training/corpus.py")
    assert corpus["PREFIX"] == passkey.TASK
    assert corpus["JUNK"] == passkey.JUNK
    assert corpus["QUESTION"].format(name=corpus["PASS_KEY"]) == passkey.QUESTION


def test_the_example_asks_the_same() -> None:
    example = texts("examples/passkey.py")
    assert [example[name] for name in ("TASK", "JUNK", "QUESTION")] == [
        passkey.TASK,
        passkey.JUNK,
        passkey.QUESTION,
    ]
