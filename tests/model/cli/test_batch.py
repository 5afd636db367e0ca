"""`pykvgraph batch`: every prompt of a file gets an answer or an error, whatever ends it in between."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import pykvgraph as kvg
from pykvgraph.cli import main

batch_verb = importlib.import_module("pykvgraph.cli.batch")  # the function hides its module
Batch = Callable[..., Result]
Answers = Callable[[], dict[int, dict[str, Any]]]
TEXT = "Once upon a time, there was a little girl named"
PLAIN = [{"prompt": TEXT[:n], "max_tokens": 6, "id": f"n{n}"} for n in range(1, 40, 3)]


@pytest.fixture
def batch(stories: Path, tmp_path: Path) -> Batch:
    """Writes the prompts, and answers them."""

    def run(prompts: list[Any], *options: str) -> Result:
        lines = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in prompts]
        (tmp_path / "prompts").write_bytes(b"".join(line + b"\n" for line in lines))
        files = ("-f", str(tmp_path / "prompts"), "-o", str(tmp_path / "answers"))
        return CliRunner().invoke(main, ["batch", "-m", str(stories), "-c", "1024", *files, *options])

    return run


@pytest.fixture
def answers(tmp_path: Path) -> Answers:
    """The answers by line; none of them is there twice."""

    def read() -> dict[int, dict[str, Any]]:
        lines = (tmp_path / "answers").read_text(encoding="utf-8").splitlines()
        found = {answer["line"]: answer for answer in map(json.loads, lines)}
        assert len(found) == len(lines)
        return found

    return read


def generated(stories: Path, prompts: list[dict[str, Any]]) -> list[str]:
    """The likeliest text behind each, alone."""
    found = []
    with kvg.Model(stories, device="cpu") as model:
        for prompt in prompts:
            with kvg.Context(model, n_ctx=256) as ctx:
                pieces = kvg.generate(ctx, prompt["prompt"], max_tokens=prompt["max_tokens"])
                found.append("".join(piece.text for piece in pieces))
    return found


def test_each_prompt_gets_its_answer(batch: Batch, answers: Answers, stories: Path) -> None:
    result = batch(PLAIN, "-np", "4", "--json")
    assert result.exit_code == 0, result.output
    found = answers()
    assert [found[n]["id"] for n in sorted(found)] == [prompt["id"] for prompt in PLAIN]
    assert [found[n]["text"] for n in sorted(found)] == generated(stories, PLAIN)
    assert {each["finish_reason"] for each in found.values()} == {"length"}
    assert all(0 < each["seconds"] < 60 for each in found.values())
    totals = json.loads(result.stdout)
    assert (totals["n_answered"], totals["n_errors"], totals["n_skipped"]) == (len(PLAIN), 0, 0)
    assert totals["n_generated"] == 6 * len(PLAIN)
    assert totals["n_prompt"] == sum(each["n_prompt"] for each in found.values())


def test_a_prompt_is_a_text_or_tokens_or_messages(batch: Batch, answers: Answers, stories: Path) -> None:
    with kvg.Model(stories, device="cpu") as model:
        ids = model.tokenizer.encode("User: Who is Lily?\nAssistant:")
    prompts: list[dict[str, Any]] = [
        {"prompt": "User: Who is Lily?\nAssistant:"},
        {"tokens": ids},
        {"messages": [{"role": "user", "content": "Who is Lily?"}]},
        {"prompt": "User: Who is Lily?\nAssistant:", "n": 2, "temperature": 1.0, "seed": 1},
    ]
    assert batch([{**prompt, "max_tokens": 8} for prompt in prompts]).exit_code == 0
    found = answers()
    assert {found[n]["text"] for n in (1, 2, 3)} == {found[1]["text"]}
    assert {each["n_prompt"] for each in found.values()} == {len(ids)}
    samples = [sample["text"] for sample in found[4]["samples"]]
    assert len(samples) == 2 and samples[0] != samples[1] and "text" not in found[4]


def test_shared_prefixes_are_told(batch: Batch, answers: Answers) -> None:
    prompts = [{"prompt": f"{TEXT} Lily. {TEXT} Tim. {TEXT} {name}", "max_tokens": 2} for name in "ABC"]
    assert batch(prompts).exit_code == 0
    assert sorted(each["n_cached"] > 30 for each in answers().values()) == [False, True, True]


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b"nonsense", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[1]", "a JSON object"),
        ({}, "one of prompt, messages, tokens"),
        ({"prompt": "a", "tokens": [1]}, "one of prompt, messages, tokens"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "\ud800"}, "UTF-8"),
        ({"tokens": [1, "a"]}, "tokens"),
        ({"tokens": [10**9]}, "tokens[0]"),
        ({"tokens": []}, "empty"),
        ({"messages": "a"}, "messages"),
        ({"prompt": "a", "temprature": 1}, "'temprature'"),
        ({"prompt": "a", "temperature": "warm"}, "temperature"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 5000}, "5001 cells"),
        ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": [[1]]}, "logit_bias"),
        ({"prompt": "a", "grammar": "root ::= ("}, "grammar"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_broken_line_stops_nobody(batch: Batch, answers: Answers, line: Any, named: str) -> None:
    result = batch([PLAIN[0], line, PLAIN[1]])
    assert result.exit_code == 1
    found = answers()
    assert sorted(found) == [1, 2, 3]
    assert "text" in found[1] and "text" in found[3]
    error = found[2]["error"]
    assert issubclass(getattr(kvg, error["type"]), kvg.KVGraphError)
    assert error["message"].startswith("line 2: ") and named in error["message"]


def test_a_line_too_long_is_not_read_whole(
    batch: Batch, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    question = importlib.import_module("pykvgraph.cli.question")
    monkeypatch.setattr(question, "LONGEST_LINE", 100)
    assert batch([PLAIN[0], {"prompt": "a" * 1000}, PLAIN[1]]).exit_code == 1
    found = answers()
    assert sorted(found) == [1, 2, 3]
    assert "longer" in found[2]["error"]["message"]


def test_biases_are_json_objects(batch: Batch, answers: Answers) -> None:
    """Of which the keys are texts: each prompt may go on with one token alone."""
    prompts = [{"prompt": TEXT, "max_tokens": 3, "logit_bias": {str(token): 1e6}} for token in (100, 101)]
    assert batch([*prompts, {**prompts[0], "logit_bias": [[100, 1e6]]}]).exit_code == 0
    found = answers()
    assert found[1]["text"] != found[2]["text"] and found[1]["text"] == found[3]["text"]


def test_after_ctrl_c_it_goes_on(
    batch: Batch, answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted again and again, it answers each prompt once, as in one go."""
    batch(PLAIN)
    whole = {number: answer["text"] for number, answer in answers().items()}
    (tmp_path / "answers").unlink()
    step, n_left = kvg.Engine.step, 0

    def interrupted(engine: kvg.Engine) -> bool:
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(kvg.Engine, "step", interrupted)
    counts = []
    for _ in range(9):
        n_left = 8
        result = batch(PLAIN, "-np", "2")
        counts.append(len(answers()))
        if result.exit_code == 0:
            break
        assert result.exit_code == 130 and "the same command goes on" in result.stderr
    assert 0 < counts[0] < counts[1] < counts[-1] == len(PLAIN)
    assert {number: answer["text"] for number, answer in answers().items()} == whole


def test_errors_and_cut_off_lines_are_tried_again(batch: Batch, answers: Answers, tmp_path: Path) -> None:
    path = tmp_path / "answers"
    batch([*PLAIN[:3], {"prompt": 5}])
    kept = [line for line in path.read_bytes().splitlines(keepends=True) if b"error" not in line]
    path.write_bytes(kept[0] + kept[1] + kept[2][:-9])
    result = batch([*PLAIN[:3], PLAIN[3]], "--json")
    assert result.exit_code == 0, result.output
    totals = json.loads(result.stdout)
    assert (totals["n_skipped"], totals["n_answered"], totals["n_errors"]) == (2, 2, 0)
    assert path.read_bytes().startswith(kept[0] + kept[1])
    assert sorted(answers()) == [1, 2, 3, 4]
    batch([*PLAIN[:4], {"prompt": 5}])
    assert batch(PLAIN[:5]).exit_code == 0
    assert sorted(answers()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "text", ["my notes\n", '{"prompt": "a"}\n', '{"line": true}\n', "notes", "[1]\n", '{"line": 1}\nnotes']
)
def test_another_file_is_not_touched(batch: Batch, tmp_path: Path, text: str) -> None:
    (tmp_path / "answers").write_text(text)
    result = batch(PLAIN[:1])
    assert result.exit_code == 1
    assert "give another file" in result.stderr
    assert (tmp_path / "answers").read_text() == text


def test_answers_to_other_prompts_are_not_mixed(batch: Batch, tmp_path: Path) -> None:
    batch(PLAIN[:2])
    before = (tmp_path / "answers").read_bytes()
    result = batch(PLAIN[1:3])
    assert result.exit_code == 1
    assert "line 1 has another id" in result.stderr
    assert (tmp_path / "answers").read_bytes() == before


def test_a_long_file_is_read_as_it_goes(
    batch: Batch, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, ahead = kvg.Engine.step, []

    def counted(engine: kvg.Engine) -> bool:
        stats = engine.stats()
        ahead.append(stats.n_running + stats.n_waiting)
        return step(engine)

    monkeypatch.setattr(kvg.Engine, "step", counted)
    assert batch([{"tokens": [1], "max_tokens": 1}] * 300).exit_code == 0
    assert len(answers()) == 300
    assert max(ahead) == batch_verb.N_AT_A_TIME


def test_the_rest_is_told_when_the_device_fails(
    batch: Batch, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends the engine ends the program in one line; what was answered before stays."""

    def fails(_: kvg.Engine) -> bool:
        raise kvg.DeviceError("it burns")

    monkeypatch.setattr(kvg.Engine, "step", fails)
    result = batch([{"prompt": 5}, *PLAIN])
    assert result.exit_code == 1
    assert result.stderr == "Error: it burns\n"
    assert sorted(answers()) == [1]
