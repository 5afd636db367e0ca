"""The texts of quality's tasks by definitions that are written anew here, and their scores by hand."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from pykvgraph.demos.dialogue import KINDS
from pykvgraph.demos.passkey import JUNK
from pykvgraph.demos.quality_tasks import TASKS, Probe, TaskText, WordSource, fitted
from pykvgraph.errors import InvalidArgumentError

PAGES = "".join(
    path.read_text(encoding="utf-8") for path in sorted((Path(__file__).parents[3] / "docs").glob("s*.md"))
)
SOURCE = WordSource.of(PAGES)
SEEDS = ("1", "2", "3")


def words(text: TaskText) -> int:
    """In place of tokens."""
    return len(text.text.split()) + 20


def made(name: str, seed: str, length: int = 600) -> TaskText:
    return fitted(name, SOURCE, seed, length, words)


@pytest.mark.parametrize(
    ("answers", "wanted", "said", "score"),
    [
        (("1234567",), True, " 1234567.", 1.0),
        (("1234567",), True, " 123456", 0.0),
        (("AB", "CD", "EF", "GH"), True, "ab, cd and x", 0.5),
        (("river", "Tree"), True, "TREES and RIVERS", 1.0),
        (("4711",), False, "4711", 0.0),
        (("4711",), False, "4712", 1.0),
        (("4711",), True, "", 0.0),
    ],
)
def test_scores(answers: tuple[str, ...], wanted: bool, said: str, score: float) -> None:
    assert Probe("?", answers, wanted).score(said) == score


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", [500, 900, 5000])
def test_as_long_as_it_may_be(name: str, length: int) -> None:
    """A piece more would be too long; the same seed makes the same text, and another one another."""
    if name == "chat" and length < 900:
        with pytest.raises(InvalidArgumentError, match=r"chat needs \d+ tokens or more"):
            made(name, "1", length)
        return
    text = made(name, "1", length)
    assert words(text) <= length
    if name != "chat":
        longest = {"erase": 60, "cwe": 40, "fwe": 20, "early": 45}.get(name, 25)  # words of a piece
        assert words(text) > length - longest
    assert text == made(name, "1", length) != made(name, "2", length)


@pytest.mark.parametrize("name", TASKS)
def test_too_short(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name} needs"):
        made(name, "1", 21)


@pytest.mark.parametrize("seed", SEEDS)
def test_niah_single_1(seed: str) -> None:
    """One seven-digit number in noise, under a name of two words."""
    text = made("niah_single_1", seed)
    (probe,) = text.probes
    ((key, value),) = re.findall(r"The secret number of (\S+) is (\d{7})\.", text.text)
    assert probe.answers == (value,) and key in probe.question and value not in probe.question
    assert all(word in SOURCE.words for word in key.split("-")) and len(key.split("-")) == 2
    _, *lines = text.text.split("\n")
    assert {line for line in lines if "secret" not in line} == {JUNK.strip()}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("niah_multikey_2", r"[a-z]+-[a-z]+", r"\d{7}"),
        ("niah_multikey_3", r"[0-9a-f-]{36}", r"[0-9a-f-]{36}"),
    ],
)
def test_niah_multikey(name: str, key: str, value: str, seed: str) -> None:
    """Every line is a secret; one of them is asked for."""
    text = made(name, seed)
    (probe,) = text.probes
    _, *lines = text.text.split("\n")
    pairs = dict(re.findall(rf"^The secret \w+ of ({key}) is ({value})\.$", "\n".join(lines), re.MULTILINE))
    assert len(pairs) == len(lines) > 20
    (asked,) = [each for each in pairs if each in probe.question]
    assert probe.answers == (pairs[asked],)


@pytest.mark.parametrize("seed", SEEDS)
def test_vt(seed: str) -> None:
    """Whoever follows the assignments has the five names; the example before them is answered rightly."""
    text = made("vt", seed)
    (probe,) = text.probes
    example, task = text.text.split("\n\n")
    wanted = re.search(r"value (\d{5})", probe.question)
    assert wanted is not None
    assert sorted(holders(task, wanted[1])) == sorted(probe.answers) and len(set(probe.answers)) == 5
    answered, of_example = example.rsplit(" are ", 1)[1].split(), re.search(r"value (\d{5})", example)
    assert of_example is not None
    assert sorted(holders(example, of_example[1])) == sorted(answered)


def holders(text: str, value: str) -> list[str]:
    values: dict[str, str] = {}
    for name, given in re.findall(r"^([A-Z]+) = (\w+)\.$", text, re.MULTILINE):
        values[name] = values.get(given, given)
    return [name for name, held in values.items() if held == value]


@pytest.mark.parametrize(("length", "n_common", "n_other"), [(900, 6, 1), (5000, 30, 3)])
def test_cwe(length: int, n_common: int, n_other: int) -> None:
    text = made("cwe", "1", length)
    (probe,) = text.probes
    example, task = text.text.split("\n\n")
    counts = Counter(re.findall(r"\d+\. ([a-z]+)", task))
    assert {word for word, n in counts.items() if n == n_common} == set(probe.answers)
    assert len(probe.answers) == 10 and set(counts.values()) == {n_common, n_other}
    listed, answer = example.split("\nQuestion")
    common = [word for word, _ in Counter(re.findall(r"\d+\. ([a-z]+)", listed)).most_common(10)]
    assert sorted(re.findall(r"\d+\. ([a-z]+)", answer)) == sorted(common)


def test_fwe() -> None:
    """A zeta distribution with exponent 2: shares of 1/k^2; the commonest are dots."""
    text = made("fwe", "1", 5000)
    (probe,) = text.probes
    _, code = text.text.split("\n")
    counts = Counter(code.split()).most_common()
    assert counts[0][0] == "..." and tuple(word for word, _ in counts[1:4]) == probe.answers
    n = counts[0][1]
    assert [count for _, count in counts[1:4]] == pytest.approx([n / 4, n / 9, n / 16], abs=1.5)


@pytest.mark.parametrize("seed", [str(i) for i in range(12)])
def test_erase(seed: str) -> None:
    """What is to be erased isn't in the text, and would stand between two sentences of it."""
    text = made("erase", seed)
    assert text.cut is not None
    at, sentence = text.cut
    kept, gone = text.probes
    assert kept.wanted and not gone.wanted
    assert text.text.count(kept.answers[0]) == 2 and gone.answers[0] not in text.text
    assert sentence.count(gone.answers[0]) == 2 and sentence.startswith(" The pass key of ")
    assert text.text[at - 1] != " " and text.text[at : at + 1] in (" ", "")
    whole = text.text[:at] + sentence + text.text[at:]
    assert "  " not in whole and whole.count("The pass key of") == 2


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "told_at"), [("chat", (4, 14, 24, 34, 44)), ("early", (1, 3, 5, 7, 9))])
def test_chat(seed: str, name: str, told_at: tuple[int, ...]) -> None:
    """Fifty turns; each fact is told once, in its turn, and asked for behind them."""
    text = made(name, seed, 2000)
    turns = text.text.split("\nUser: ")
    assert len(turns) == 50 and len(text.probes) == 5
    for turn, probe in zip(told_at, text.probes, strict=True):
        (value,) = probe.answers
        assert value in turns[turn]
        question, begun = probe.question.removeprefix("\nUser: ").split("\nAssistant: ")
        kinds = [kind for kind in KINDS if question in kind.questions and value in kind.values]
        assert any(kind.answer.startswith(f"{begun} {{v}}") for kind in kinds)
        told = turns[turn].partition("\n")[0].removeprefix("User: ")
        assert any(told == telling.format(v=value) for kind in kinds for telling in kind.tellings)


def test_a_source_with_few_words() -> None:
    source = WordSource.of("Three words here. And some more text.")
    assert source.words == ("more", "some", "words")
    assert source.sentences == ("Three words here.", "And some more text.")
    with pytest.raises(InvalidArgumentError, match="different words"):
        TASKS["cwe"](source, Random(1), 100, 900)
