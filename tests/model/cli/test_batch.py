"""`pykvgraph batch`: every prompt of a file gets an answer or an error, whatever ends it in between."""

from __future__ import annotations

import codecs
import fcntl
import importlib
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.drafting import always_pays
from support.models import SMALL, ModelSpec

import pykvgraph as kvg
from pykvgraph.cli import main
from pykvgraph.cli.answer_file import AnswerFile

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


def test_compare(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is shared the second time; lines whose answers are drawn anew are left out."""
    engines: list[kvg.EngineStats] = []
    close = kvg.Engine.close

    def look(engine: kvg.Engine) -> None:
        engines.append(engine.stats())
        close(engine)

    monkeypatch.setattr(kvg.Engine, "close", look)
    begins = [{"prompt": TEXT * 3 + TEXT[:n], "max_tokens": 6} for n in range(1, 30, 6)]
    prompts = [
        *begins,
        {**begins[0], "temperature": 1.0},
        {**begins[0], "n": 2, "temperature": 1.0, "seed": 5},
    ]
    result = batch([*prompts, {"prompt": 3}], "-np", "2", "--json", "--compare")
    assert result.exit_code == 1
    found = json.loads(result.stdout)["compared"]
    assert found == {"n_answers": 7, "n_equal": 7, "n_drawn": 1, "differences": []}
    shared, alone = engines
    assert shared.prefix_hit_tokens > 100 and alone.prefix_hit_tokens == 0


def test_compare_finds_what_differs(batch: Batch, stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time the first prompt has another end: what is told of it is what logits say."""
    submit, asked = kvg.Engine.submit, ["Once upon a time", "Tom and Sam"]

    def garbled(engine: kvg.Engine, prompt: Any, params: Any, **more: Any) -> kvg.Request:
        if not engine._loop.stepper._running_set.shares and prompt == asked[0]:
            prompt = "Once upon a time, Lily and"
        return submit(engine, prompt, params, **more)

    monkeypatch.setattr(kvg.Engine, "submit", garbled)
    result = batch([{"prompt": prompt, "max_tokens": 8} for prompt in asked], "--compare", "--json")
    assert result.exit_code == 0, result.output
    compared = json.loads(result.stdout)["compared"]
    assert (compared["n_answers"], compared["n_equal"]) == (2, 1)
    (found,) = compared["differences"]
    with kvg.Model(stories, device="cpu") as model, kvg.Context(model, n_ctx=256) as ctx:
        ids = model.tokenizer.encode(asked[0])
        mine = [piece.token for piece in kvg.generate(ctx, ids, max_tokens=8)]
        ctx.reset()
        garbled_ids = model.tokenizer.encode("Once upon a time, Lily and")
        its = [piece.token for piece in kvg.generate(ctx, garbled_ids, max_tokens=8)]
        n = next(i for i, pair in enumerate(zip(mine, its, strict=True)) if pair[0] != pair[1])
        ctx.reset()
        logits = [ctx.append(token) for token in [*ids, *mine[:n]]][-1]
    assert (found["line"], found["sample"], found["token"]) == (1, 0, n)
    assert (found["shared"], found["alone"]) == (mine[n], its[n])
    assert found["gap"] == pytest.approx(float(logits[its[n]] - logits[mine[n]]), abs=1e-3)
    assert found["gap"] < 0


def test_a_draft_model(
    batch: Batch, answers: Answers, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is its own draft: greedy, everything holds, and texts are those without drafts."""
    always_pays(monkeypatch)
    long = [{**prompt, "max_tokens": 12} for prompt in PLAIN[:3]]
    result = batch(long, "-np", "1", "--json", "-md", str(stories), "--draft-max", "3")
    assert result.exit_code == 0, result.output
    totals = json.loads(result.stdout)
    assert totals["n_drafted"] == totals["n_accepted"] >= 3 * 8  # behind 1 by the prompt: 1 + 3, 1 + 3, 1 + 2
    assert [found["text"] for _, found in sorted(answers().items())] == generated(stories, long)


def test_a_draft_model_of_another_vocabulary(batch: Batch, model_file: Callable[[ModelSpec], Path]) -> None:
    result = batch(PLAIN[:1], "-md", str(model_file(SMALL)))
    assert (result.exit_code, "draft: its vocabulary has" in result.stderr) == (1, True)
    twice = batch(PLAIN[:1], "-md", str(model_file(SMALL)), "-hfd", "a/b")
    assert (twice.exit_code, "leave one out" in twice.stderr) == (2, True)


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
        ({"prompt": "a", "n_predict": 5}, "it is 'max_tokens' here"),
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


@pytest.mark.parametrize(
    "others",
    [
        PLAIN[1:3],  # the first line is gone
        [{"prompt": "A new one"}, *PLAIN[:2]],
        [PLAIN[0], {**PLAIN[1], "prompt": "Another"}],
        [PLAIN[0], {**PLAIN[1], "max_tokens": 7}],
        [PLAIN[0], b"nonsense"],
    ],
    ids=str,
)
def test_answers_to_other_prompts_are_not_mixed(batch: Batch, tmp_path: Path, others: list[Any]) -> None:
    batch(PLAIN[:2])
    before = (tmp_path / "answers").read_bytes()
    result = batch(others)
    assert result.exit_code == 1
    assert re.search(r"line \d has an answer to something else. Give another file with -o", result.stderr)
    assert (tmp_path / "answers").read_bytes() == before


def test_answers_of_another_model_are_not_mixed(
    batch: Batch, tmp_path: Path, model_file: Callable[[ModelSpec], Path]
) -> None:
    batch([{"tokens": [5, 6], "max_tokens": 2}])
    before = (tmp_path / "answers").read_bytes()
    prompts, answers = str(tmp_path / "prompts"), str(tmp_path / "answers")
    command = ["batch", "-m", str(model_file(SMALL)), "-c", "64", "-f", prompts, "-o", answers]
    result = CliRunner().invoke(main, command)
    assert (result.exit_code, "line 1 has an answer to something else" in result.stderr) == (1, True)
    assert (tmp_path / "answers").read_bytes() == before


def test_a_link_stays_one_and_the_mode_stays(batch: Batch, answers: Answers, tmp_path: Path) -> None:
    """Where errors are taken out, and the file is written anew."""
    batch([PLAIN[0], {"prompt": 5}])
    real = tmp_path / "there"
    (tmp_path / "answers").rename(real)
    real.chmod(0o640)
    (tmp_path / "answers").symlink_to(real)
    assert batch(PLAIN[:2]).exit_code == 0
    assert sorted(answers()) == [1, 2]
    assert (tmp_path / "answers").is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640


def test_a_second_run_on_the_same_answers_is_refused(batch: Batch, answers: Answers, tmp_path: Path) -> None:
    with open(tmp_path / "answers", "a", encoding="utf-8") as first:
        fcntl.flock(first, fcntl.LOCK_EX)
        result = batch(PLAIN[:1])
    assert (result.exit_code, "another run" in result.stderr) == (1, True)
    assert batch([PLAIN[0], {"prompt": 5}]).exit_code == 1
    with AnswerFile(str(tmp_path / "answers")):  # takes the error out
        assert "another run" in batch(PLAIN[:2]).stderr
    assert sorted(answers()) == [1]
    assert batch(PLAIN[:2]).exit_code == 0


def test_empty_lines_and_a_byte_order_mark_are_passed_over(
    batch: Batch, answers: Answers, tmp_path: Path
) -> None:
    first = json.dumps(PLAIN[0]).encode()
    assert batch([codecs.BOM_UTF8 + first, b"", PLAIN[1]]).exit_code == 0
    assert sorted(answers()) == [1, 3]
    path = tmp_path / "answers"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\n\n"))
    result = batch([first, b" ", PLAIN[1], PLAIN[2]], "--json")
    assert (result.exit_code, json.loads(result.stdout)["n_skipped"]) == (0, 2)


@pytest.mark.parametrize("id", ["NaN", "[1e999]", "-Infinity"])
def test_an_id_that_is_no_json_is_refused(batch: Batch, tmp_path: Path, id: str) -> None:
    def refuse(_: str) -> None:
        raise AssertionError("no JSON")

    batch([f'{{"prompt": "a", "id": {id}}}'.encode()])
    text = (tmp_path / "answers").read_text(encoding="utf-8")
    assert "the id is no JSON" in json.loads(text, parse_constant=refuse)["error"]["message"]


def test_a_model_without_a_template_is_told_of_once(batch: Batch) -> None:
    messages = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    told = "the model has no chat template: turns are lines of User: and Assistant:\n"
    assert batch([messages, messages]).stderr.count(told) == 1
    assert told not in batch([messages, messages, PLAIN[0]]).stderr  # the first two are there


def test_prompts_of_a_pipe_are_answered_as_they_come(stories: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pykvgraph",
        "batch",
        "-m",
        str(stories),
        "-c",
        "512",
        "-f",
        "-",
        "-o",
        "-",
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None and process.stdout is not None
        alarm = threading.Timer(60, process.kill)
        alarm.start()
        for number, prompt in enumerate(PLAIN[:3], 1):
            process.stdin.write(json.dumps(prompt).encode() + b"\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["line"] == number  # before the next one is written
        assert process.communicate(timeout=60)[0] == b""
        alarm.cancel()
    assert process.returncode == 0


@pytest.mark.parametrize("n_columns", [60, 80, 130])
def test_progress_is_one_line_of_the_terminal(
    batch: Batch, stories: Path, tmp_path: Path, n_columns: int
) -> None:
    """Which is as wide as the terminal, and ends at 100 % when empty lines follow the last prompt."""
    lines = [json.dumps(prompt) for prompt in (*PLAIN, {"prompt": "a", "grammar": "root ::= nobody"})]
    (tmp_path / "prompts").write_text("\n".join(lines) + "\n" * 300, encoding="utf-8")
    end, its_end = pty.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("4H", 24, n_columns, 0, 0))
    files = ("-f", str(tmp_path / "prompts"), "-o", str(tmp_path / "answers"))
    command = [sys.executable, "-m", "pykvgraph", "batch", "-m", str(stories), "-c", "512", *files]
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(command, stderr=its_end, env={**env, "TERM": "xterm"})
    os.close(its_end)
    data = b""
    while part := _read(end):
        data += part
    os.close(end)
    assert process.wait(60) == 1
    shown = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", data.decode())
    bar, summary = re.split(r"\n(?=\d+ answers, )", shown.replace("\r\n", "\n"))
    assert summary.startswith(f"{len(PLAIN)} answers, 1 errors, ")
    assert "nobody" in (tmp_path / "answers").read_text()  # libllama's own words of the bad grammar
    drawn = [line for line in re.split(r"[\r\n]+", bar) if line]
    assert "100%" in drawn[-1] and all("%" in line and len(line) <= n_columns for line in drawn)
    assert len(drawn[-1]) == n_columns and "\n" not in bar


def _read(end: int) -> bytes:
    try:
        return os.read(end, 4096)
    except OSError:  # the other end is closed
        return b""


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
