"""`-md` and `-hfd` of `generate` and `chat`: the same answers, with a second context of as many cells."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.models import SMALL, ModelSpec

import pykvgraph as kvg
from pykvgraph.cli import download, main
from pykvgraph.plan import fitting
from pykvgraph.sequence.lookahead import Lookahead

LINES = "Once upon a time\nAnd then?\n/regen\n"
VERBS = {"generate": "-p Once -n 60", "chat": "-n 30 --temp 0 --system Kind."}


def run(verb: str, stories: Path, *words: str) -> Result:
    arguments = [verb, "-m", str(stories), "-dev", "none", "-t", "1", *VERBS[verb].split(), *words]
    return CliRunner().invoke(main, arguments, input=LINES, prog_name="pykvgraph")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Contexts and Lookaheads."""
    found: list[Any] = []
    for each in (kvg.Context, Lookahead):
        monkeypatch.setattr(each, "__init__", _seen(each.__init__, found))
    return found


def _seen(init: Callable[..., None], found: list[Any]) -> Callable[..., None]:
    def make(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        found.append(self)

    return make


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("size", ["auto", "100"])
def test_the_same_answers(stories: Path, made: list[Any], verb: str, size: str) -> None:
    plain = run(verb, stories, "-c", size)
    made.clear()
    drafted = run(verb, stories, "-c", size, "-md", str(stories), "--draft-max", "3")
    assert (drafted.exit_code, drafted.stdout) == (0, plain.stdout), drafted.output
    assert len(plain.stdout) > 100
    context, draft, lookahead = made
    assert context.n_ctx == draft.n_ctx == (512 if size == "auto" else 100)
    assert lookahead.n_accepted > 20


@pytest.mark.parametrize("verb", VERBS)
def test_of_hugging_face(stories: Path, made: list[Any], verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def downloaded(name: str, from_hub: bool) -> str:
        asked.append(name)
        return str(stories)

    monkeypatch.setattr(download, "downloaded", downloaded)
    assert run(verb, stories, "-hfd", "some/stories@main:Q8_0").exit_code == 0
    assert asked == ["some/stories@main:Q8_0"]
    assert [type(each).__name__ for each in made] == ["Context", "Context", "Lookahead"]


@pytest.mark.parametrize("verb", VERBS)
def test_no_room_for_a_draft(
    stories: Path, made: list[Any], verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 cells of one fit, and not of both."""
    (part,) = kvg.plan_memory(stories, "cpu", n_ctx=256, n_threads=1)
    free = (part.cache_bytes + part.compute_bytes) * 100 // 80 + 10_000
    monkeypatch.setattr(fitting, "host_free_bytes", lambda *_, **__: free)
    result = run(verb, stories, "-c", "auto", "-md", str(stories))
    assert result.exit_code == 0
    assert "There are no drafts: with a cache of the draft model, CPU has no room" in result.stderr
    assert [each.n_ctx for each in made] == [256]


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_refused(stories: Path, model_file: Callable[[ModelSpec], Path], verb: str) -> None:
    strange = str(model_file(SMALL))
    result = run(verb, stories, "-md", strange)
    assert (result.exit_code, "draft: its vocabulary has" in result.stderr) == (1, True)
    assert run(verb, stories, "-md", strange, "-hfd", "a/b").exit_code == 2
    if verb == "chat":
        for words in (["--demo"], ["--self-extend", "2"]):
            result = run(verb, stories, "-md", str(stories), *words)
            assert result.exit_code in (1, 2)
            assert "leave one of them out" in result.stderr
