"""`pykvgraph generate --beam-width`: what the engine finds, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import pykvgraph as kvg
from pykvgraph.cli import main

PROMPT = "Once upon a time"


def run(stories: Path, *arguments: str) -> Result:
    return CliRunner().invoke(
        main, ["generate", "-m", str(stories), "-p", PROMPT, "--beam-width", "4", *arguments]
    )


@pytest.fixture(scope="module")
def found(stories: Path) -> list[kvg.Completion]:
    params = kvg.SamplingParams(beam_width=4, n=3, max_tokens=20)
    with kvg.Model(stories) as model, kvg.Engine(model, n_ctx=512, n_seq_max=4) as engine:
        return engine.submit(PROMPT, params).results(60)


def test_it_prints_the_best_text(stories: Path, found: list[kvg.Completion]) -> None:
    assert run(stories, "-n", "20").stdout == found[0].text + "\n"


def test_it_prints_several_with_their_log_probabilities(stories: Path, found: list[kvg.Completion]) -> None:
    lines = run(stories, "-n", "20", "--n-best", "3").stdout.splitlines()
    assert lines[1::2] == [each.text for each in found]
    assert [float(line.split()[3][:-1]) for line in lines[::2]] == pytest.approx(
        [each.logprob for each in found], abs=2e-3
    )


def test_json(stories: Path, found: list[kvg.Completion]) -> None:
    told = json.loads(run(stories, "-n", "20", "--n-best", "3", "--json").stdout)
    assert [text["tokens"] for text in told["texts"]] == [list(each.tokens) for each in found]
    one = ("-n", "9", "--grammar", 'root ::= "a"', "--n-best", "4", "--json")
    texts = json.loads(run(stories, *one).stdout)["texts"]
    assert [text["logprob"] is None for text in texts] == [False, False, True, True]


def test_as_many_tokens_as_there_is_room_for(stories: Path) -> None:
    """Each beam has a quarter of the cells that the prompt's 5 tokens leave; the last token takes none."""
    told = json.loads(run(stories, "-n", "-1", "-c", "45", "--json").stdout)
    assert told["texts"][0]["n_generated"] == 11


def test_ctrl_c_prints_the_best_so_far(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = kvg.Request.results

    def interrupted(request: kvg.Request, timeout: float | None = None) -> list[kvg.Completion]:
        monkeypatch.undo()
        for _ in range(6):
            request._advance()
        raise KeyboardInterrupt

    monkeypatch.setattr(kvg.Request, "results", interrupted)
    done = run(stories, "-n", "20", "--json")
    assert kvg.Request.results is results and done.exit_code == 130
    text = json.loads(done.stdout)["texts"][0]
    assert (text["finish_reason"], text["n_generated"]) == ("cancelled", 6)


@pytest.mark.parametrize(
    ("arguments", "named", "code"),
    [
        (("--temp", "0.5"), "temperature", 1),
        (("--keep", "4"), "--keep", 1),
        (("--n-best", "5"), "--n-best 5", 2),
        (("-n", "500"), "2001 cells", 1),
        (("--length-penalty", "x"), "--length-penalty", 2),
    ],
)
def test_what_is_refused(stories: Path, arguments: tuple[str, ...], named: str, code: int) -> None:
    refused = run(stories, *arguments)
    assert refused.exit_code == code and named in refused.stderr and not refused.stdout
