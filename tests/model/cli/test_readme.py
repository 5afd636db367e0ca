"""The Python of the README and of docs/ runs as it stands there."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.adapters import write_adapter
from support.served import served

import pykvgraph as kvg

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CHANGES = {'"model.gguf"': '"stories260K.gguf"', "10_000": "1_200", "n_ctx=4096": "n_ctx=512"}
ADAPTER = "pirate.gguf"
SERVER = "http://127.0.0.1:8080"


def python_of(page: Path) -> str:
    """All of a page's Python, as one program, on a model that is here."""
    source = "".join(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
    for text, other in CHANGES.items():
        source = source.replace(text, other)
    return source


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)], ids=lambda page: page.name)
def test_python_blocks(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT / "tests" / "data")
    names: dict[str, Any] = {}
    program = python_of(page)
    if ADAPTER in program:
        program = program.replace(ADAPTER, str(write_adapter(tmp_path / ADAPTER, Path("stories260K.gguf"))))
    with server_for(program) as source:
        exec(compile(source, page.name, "exec"), names)
    if page.name == "README.md":
        assert len(capsys.readouterr().out) > 2000  # past the context's end
    if page.name == "many-requests.md":
        assert len(names["story"].split()) > 32  # so many tokens at least, whatever the vocabulary
        shared = re.findall(r"(\d+) of \d+ tokens were in the cache", capsys.readouterr().out)
        assert len(shared) == 3 and min(map(int, shared)) >= 32
    if page.name == "python.md":
        check_continuation(names)
    if "ctx" in names:
        names["ctx"].close()


@contextlib.contextmanager
def server_for(source: str) -> Iterator[str]:
    """The program, asking a server that is here in place of the one that it speaks to."""
    if SERVER not in source:
        yield source
        return

    def load() -> kvg.Engine:
        return kvg.Engine(kvg.Model("stories260K.gguf", device="cpu"), n_ctx=2048, n_seq_max=4)

    with served(load) as (address, _):
        yield source.replace(SERVER, address)


def check_continuation(names: dict[str, Any]) -> None:
    """The batch goes on where `generate` ended: the token that it left out, then the text with one space."""
    first, *rest = names["batch"].snapshot().token.tolist()
    assert first == names["piece"].token
    assert b"".join(map(names["model"].tokenizer.token_to_piece, rest)) == b" and then"


def test_which_pages_have_python() -> None:
    assert all(text in PAGES[0].read_text(encoding="utf-8") for text in CHANGES)
    assert {"README.md", "python.md", "cache-types.md"} <= {page.name for page in PAGES if python_of(page)}
