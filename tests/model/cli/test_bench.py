"""`pykvgraph bench`: every test on every engine; what is fast is for people to judge."""

from __future__ import annotations

import csv
import importlib
import io
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support import other_server
from support.architectures import ArchSpec
from support.judge import nmse
from support.kv_types import EVEN_BLOCKS
from support.models import ModelSpec

import pykvgraph as kvg
from pykvgraph.bench import requests, tests, turns
from pykvgraph.bench.engines import LibllamaEngine, OurEngine
from pykvgraph.bench.libllama import LibllamaModel
from pykvgraph.bench.streams import N_GENERATED
from pykvgraph.bench.tests import EXTRA_TESTS
from pykvgraph.cli import main
from pykvgraph.cli.bench_rows import quantile
from pykvgraph.params.params import ContextParams

ModelFile = Callable[[ModelSpec], Path]
# the function `bench` hides its module
bench_verb = importlib.import_module("pykvgraph.cli.bench")
LIBLLAMA = ["libllama -fa 1", "libllama -fa 0"]


def bench(stories: Path, arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "-m", str(stories), "-t", "1", *arguments.split()])


def test_prompts_and_generation_beside_libllama(stories: Path) -> None:
    result = bench(stories, "-p 8,16 -n 4 -d 0,64 -r 2 --vs libllama -o json")
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(result.stdout)["results"]
    wanted = [(test, depth) for depth in (0, 64) for test in ("pp8", "pp16", "tg4")]
    assert [(row["test"], row["depth"], row["engine"]) for row in rows] == [
        (*test, engine) for test in wanted for engine in ("pykvgraph", *LIBLLAMA)
    ]
    amounts = {"pp8": 8, "pp16": 16, "tg4": 4}
    for i, row in enumerate(rows):
        rates = [amounts[row["test"]] / seconds for seconds in row["seconds"]]
        assert len(rates) == 2
        assert row["mean"] == pytest.approx(statistics.fmean(rates))
        assert row["deviation"] == pytest.approx(statistics.stdev(rates))
        ours = rows[i - i % 3]
        assert row["ratio"] == (None if i % 3 == 0 else pytest.approx(ours["median"] / row["median"]))


@pytest.mark.parametrize("output", ["md", "csv", "json"])
def test_rows_are_printed_as_they_come(stories: Path, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    """When the second test begins, the first one's row is out; Ctrl-C then leaves it there."""
    run_one, seen = bench_verb.run_one, list[str]()

    def run_second(*arguments: Any) -> Any:
        out = sys.stdout.buffer
        assert isinstance(out, io.BytesIO)
        seen.append(out.getvalue().decode())
        if len(seen) == 2:
            raise KeyboardInterrupt
        return run_one(*arguments)

    monkeypatch.setattr(bench_verb, "run_one", run_second)
    result = bench(stories, f"-p 8,16 -n 0 -r 1 -o {output}")
    assert result.exit_code == 130
    assert "pp8" in (result.stdout if output == "json" else seen[1])
    assert "pp8" not in seen[0]
    if output == "json":
        assert seen[1] == ""
        assert [row["test"] for row in json.loads(result.stdout)["results"]] == ["pp8"]


@pytest.mark.parametrize("rivals", ["", "--vs libllama"])
def test_ratios_have_a_column_where_there_are_any(stories: Path, rivals: str) -> None:
    head, *rows = bench(stories, f"-p 8 -n 0 -r 1 {rivals}").stdout.splitlines()[1:]
    assert head.split() == ["test", "depth", "engine", "median", *(["ours", "is"] if rivals else [])]
    assert len(rows) == (3 if rivals else 1)
    assert all(row.endswith("x") == ("libllama" in row) for row in rows)


def test_json_is_spelled_as_in_the_other_verbs(stories: Path) -> None:
    rows = [json.loads(bench(stories, f"-p 8 -n 0 -r 1 {how}").stdout) for how in ("--json", "-o json")]
    assert [row["results"][0]["test"] for row in rows] == ["pp8", "pp8"]


@pytest.mark.parametrize("test", EXTRA_TESTS)
def test_cache_tests(stories: Path, test: str) -> None:
    result = bench(stories, f"-p 0 -n 0 -d 100 --cache {test} -r 1 --vs libllama -o csv")
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert all(float(row["median"]) > 0 for row in rows)
    engines = {row["engine"] for row in rows}
    others = {name + streams for name in LIBLLAMA for streams in ("", ", streams")}
    assert engines == {
        "pykvgraph",
        *({} if test == "defrag" else others if test == "seqs" else LIBLLAMA),
    }


@pytest.mark.parametrize(
    "test",
    [
        tests.generation(4, 100),
        tests.first_after_shift(100),
        tests.after_shift(4, 100),
        tests.holes(4, 100, defrag=False),
        tests.holes(4, 100, defrag=True),
        tests.sequences(3, 2, 60),
    ],
    ids=lambda test: test.name,
)
def test_what_is_compared_is_the_same(stories: Path, test: tests.Test) -> None:
    """After the same test both have the same next logits, also when it began with a saved state."""
    params = ContextParams(
        n_ctx=512,
        n_seq_max=test.n_seq,
        n_threads=1,
        n_threads_batch=1,
        type_k="f32",
        type_v="f32",
        defrag_threshold=-1,
    )
    with ExitStack() as stack:
        other = LibllamaModel(stories)
        stack.callback(other.close)
        ours = OurEngine(params, stack.enter_context(kvg.Model(stories, device="cpu")))
        stack.callback(ours.close)
        theirs = LibllamaEngine(params, other, flash=False)
        stack.callback(theirs.close)
        for _ in range(2):
            for engine in (ours, theirs):
                engine.clear()
                test.run(engine)
            ends = [ours.context.kv.seq_pos_max(seq) + 1 for seq in range(test.n_seq)]
            assert all(end > 1 for end in ends)
            for engine in (ours, theirs):
                engine.step([7] * test.n_seq, ends)
            assert nmse(ours.context.logits(), theirs.logits()) <= 1e-6


def expected_turns(script: turns.Script) -> list[tuple[str, int, int]]:
    """Each prompt's name, its length, and how much of it an engine has that forgets nothing."""
    n_head, n_foot = len(script.user), len(script.assistant)
    found, n_said, n_had = [], len(script.opening), 0
    for number, message in enumerate(script.messages, 1):
        n = n_said + n_head + len(message) + n_foot
        found.append((str(number), n, n_had))
        if number in script.edits:
            n_same = {4: len(message) // 2, 8: 0}[number]
            found.append((f"{number} edited", n, n_said + n_head + n_same))
        if number == 6:
            found += [("6 again", n, n), ("6 again 2", n, n)]
        n_said, n_had = n + 64, n + 63
    return found


@pytest.mark.parametrize("with_state", [False, True], ids=["plain", "recurrent"])
def test_turns(
    stories: Path, architecture: Callable[[ArchSpec], Path], tmp_path: Path, with_state: bool
) -> None:
    """Nothing is decoded again but a last token, and what an edited message keeps where a state goes back."""
    recurrent = ArchSpec("qwen35", n_layer=4, period=4, state_heads=4)
    path, plot = architecture(recurrent) if with_state else stories, tmp_path / "turns.png"
    result = bench(path, f"-p 0 -n 0 -d 300 -r 2 --cache turns -o json --plot {plot}")
    assert result.exit_code == 0, result.output
    with kvg.Model(path, device="cpu") as model:
        script = turns.write_script(model, 300)
    expected = expected_turns(script)
    assert expected[0][1] == 300
    old = {name: n_old for name, _, n_old in expected}
    to_answer = {name: old[name] - old[name[0]] for name in ("4 edited", "8 edited")}
    # a TokenSequence is told where a message begins; an Engine has a state where the answer before it ended
    again = (
        {"TokenSequence": {"4 edited": 60}, "Engine": to_answer}
        if with_state
        else {"TokenSequence": {}, "Engine": {}}
    )
    found = json.loads(result.stdout)["turns"]
    assert len(found) == 2 * len(expected)
    for through, more in again.items():
        rows = [row for row in found if row["through"] == through]
        assert [(row["turn"], row["n_prompt"], row["n_old"]) for row in rows] == expected
        assert all(row["n_new"] == row["n_prompt"] - row["n_old"] for row in rows)
        assert all(row["first_token_ms"] > 0 for row in rows)
        some = {row["turn"]: row["n_again"] for row in rows if row["n_again"]}
        assert some == {"6 again": 1, "6 again 2": 1} | more
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_an_engine_that_keeps_nothing_decodes_all_again(stories: Path) -> None:
    class Forgetful:
        def answer(self, prompt: turns.Prompt, n_tokens: int) -> turns.Answer:
            assert prompt.ids[prompt.at :][:3] in [each[:3] for each in said]
            return turns.Answer([5] * n_tokens, 0, 1.0)

    with kvg.Model(stories, device="cpu") as model:
        script = turns.write_script(model, 300)
    said = [*script.messages, *script.edits.values()]
    heard = list(turns.converse(Forgetful(), script))
    assert [(turn.name, turn.n_prompt, turn.n_old) for turn in heard] == expected_turns(script)
    assert all(turn.n_again == turn.n_old for turn in heard)
    assert max(turn.n_prompt for turn in heard) + 64 <= script.n_cells


def test_turns_of_a_model_without_a_tokenizer(architecture: Callable[[ArchSpec], Path]) -> None:
    """Its prompts are random tokens."""
    model = kvg.Model(architecture(ArchSpec("llama", n_layer=1)), device="cpu")
    with model:
        model.has_tokenizer = False
        script = turns.write_script(model, 300)
        heard = list(turns.converse(turns.TextSpeaker(kvg.Context(model, n_ctx=script.n_cells)), script))
    assert [(turn.name, turn.n_prompt, turn.n_old) for turn in heard] == expected_turns(script)


def test_turns_for_people(stories: Path) -> None:
    lines = bench(stories, "-p 0 -n 0 -d 300 -r 1 --cache turns").stdout.splitlines()
    assert len(lines) == 1 + 2 * 17
    for through, part in (("TokenSequence", lines[1:18]), ("Engine", lines[18:])):
        assert part[0] == f"{through}, turns after a prompt of 300 tokens:"
        assert part[1].split() == ["turn", "prompt", "old", "again", "new", "first", "token"]
        assert part[-1].split()[:2] == ["all", "2"]


def test_turns_as_csv_beside_other_tests(stories: Path) -> None:
    lines = bench(stories, "-p 8 -n 0 -d 100 -r 1 --cache turns -o csv").stdout.splitlines()
    assert [line.split(",")[0] for line in lines] == ["test", "pp8", "depth", *["100"] * 28]


def test_a_quantized_cache(model_file: ModelFile) -> None:
    """Beside libllama with flash attention only: without, it takes no quantized V."""
    arguments = "-p 8 -n 2 -r 1 --vs libllama -o json -ctk q8_0 -ctv q4_0"
    result = bench(model_file(EVEN_BLOCKS), arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["results"]
    assert [row["engine"] for row in rows] == ["pykvgraph", LIBLLAMA[0]] * 2


def test_a_cache_whose_types_fall_with_age(model_file: ModelFile) -> None:
    """Its depth is decoded each time, as it can't be saved."""
    arguments = "-p 0 -n 2 -d 200 -r 2 -o json -ctk f16:q4_0@128 -ctv f16:q4_0@128"
    result = bench(model_file(EVEN_BLOCKS), arguments)
    assert result.exit_code == 0, result.output
    assert [row["depth"] for row in json.loads(result.stdout)["results"]] == [200]


def test_a_table_for_people(stories: Path) -> None:
    lines = bench(stories, "-p 8 -n 4 -r 2").stdout.splitlines()
    assert lines[0].startswith("llama, 0.3 M parameters")
    assert lines[0].endswith(", 1 thread")
    assert [line.split()[0] for line in lines[1:]] == ["test", "pp8", "tg4"]
    assert "median" in lines[1]
    assert all(" ± " in line and line.split()[-1] == "t/s" for line in lines[2:])


@pytest.mark.parametrize(
    "arguments",
    [
        "-p 0 -n 0",
        "--cache shift",
        "--cache turns",
        "--plot turns.png",
        "-d 100 --cache turns --cache prefix --plot both.png",
        "-p x",
        "-d -1",
        "--server 8",
        "--server 1x1 -d 512",
        "--vs llama-server",
        "--vs libllama -dev Vulkan0",
        "-d 100 --cache tiers",
        "-d 100 --cache tiers --cache turns --plot both.png",
        "--receive tcp:0",
        "-d 100 --cache stream --to tcp:1 --over unix",
        "-d 100 --cache stream --receive tcp:192.0.2.1:1",
        "--cache stream --receive unix:socket --plot streams.png",
        "--cache stream --receive unix:socket -o json",
    ],
)
def test_what_cannot_be_is_refused(stories: Path, arguments: str) -> None:
    result = bench(stories, arguments)
    assert result.exit_code in (1, 2)
    assert "Error: " in result.stderr


def test_requests_that_share_a_prefix(stories: Path, tmp_path: Path) -> None:
    """What must be decoded, by counting: the shared tokens once, own ones, answers but their last tokens.

    Without sharing each prompt is decoded whole.
    """
    plot = tmp_path / "prefix.svg"
    result = bench(stories, f"-p 0 -n 0 -d 64 -r 1 --cache prefix -o json --plot {plot}")
    assert plot.read_bytes().startswith(b"<?xml")
    row, apart = json.loads(result.stdout)["prefix"]
    assert (row["prefix"], apart["prefix"]) == ("shared", "not shared")
    with kvg.Model(stories) as model:
        prompts = requests.write_prompts(model, 64, (8, 64))
    assert row["n_prompt"] == sum(map(len, prompts))
    assert all(prompt[:64] == prompts[0][:64] and 72 <= len(prompt) <= 128 for prompt in prompts)
    least = 64 + row["n_prompt"] - 64 * len(prompts)
    most = least + len(prompts) * (requests.N_ANSWER - 1 + 32)  # less than a block each is not waited for
    assert least <= row["n_decoded"] <= most
    assert apart["n_prompt"] == row["n_prompt"]
    assert apart["n_decoded"] == apart["n_prompt"] + len(prompts) * (requests.N_ANSWER - 1)
    assert 0 < row["first_p50"] <= row["first_p95"]
    assert 0 < row["gap_p50"] <= row["gap_p95"] <= row["gap_max"]
    assert row["tokens_per_second"] > 0
    lines = bench(stories, "-p 0 -n 0 -d 64 -r 1 --cache prefix").stdout.splitlines()
    assert lines[1] == "requests that begin with the same 64 tokens; waits in seconds:"
    assert [line.split()[0] for line in lines[2:]] == ["prefix", "shared", "not"]


def test_streams(stories: Path, tmp_path: Path) -> None:
    """Of each level all has come at the other end, or the bench would wait for it."""
    plot = tmp_path / "stream.svg"
    arguments = f"-p 0 -n 0 -d 64 -r 1 --cache stream --over unix --over memory --plot {plot}"
    result = bench(stories, f"{arguments} -o json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["streams"]
    levels = [None, 0, 1, 2, 3]
    assert [(row["transport"], row["level"]) for row in rows] == [
        (kind, level) for kind in ("unix", "memory") for level in levels
    ]
    for row in rows:
        is_streamed = row["level"] is not None
        assert 0 <= row["behind"] < row["prompt"] and (row["behind"] > 0) == is_streamed
        assert (row["prompt_more"] != 0) == (row["token_more"] != 0) == is_streamed
        assert row["token"] > 0
        assert row["total"] == pytest.approx(row["prompt"] + N_GENERATED * row["token"])
        plain = next(each for each in rows if each["transport"] == row["transport"])  # level None
        more = row["prompt_more"] + row["token_more"] * N_GENERATED * plain["token"]
        assert row["total_more"] == pytest.approx(more / plain["total"])
    assert plot.read_bytes().startswith(b"<?xml")


@contextmanager
def receiving(stories: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """A process that waits at an address, and the command that it has printed for the other end."""
    command = [sys.executable, "-m", "pykvgraph", "bench", "-m", str(stories), "-t", "1", "--cache", "stream"]
    with subprocess.Popen([*command, "--receive", *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("waiting at ")
            yield process, shlex.split(process.stdout.readline())
        finally:
            process.terminate()


def test_streams_between_two_machines(stories: Path, tmp_path: Path) -> None:
    """As far as one has two: the commands of both ends, over TCP with a token. All comes there."""
    plot = tmp_path / "stream.svg"
    with receiving(stories, "tcp:127.0.0.1:0") as (process, told):
        assert told[:4] == ["pykvgraph", "bench", "-m", str(stories)]
        told[told.index("-d") + 1] = "64,128"
        more = ["-t", "1", "-r", "1", "--json", "--plot", str(plot)]
        result = CliRunner().invoke(main, [*told[1:], *more])
        assert result.exit_code == 0, result.output
        assert process.communicate(timeout=60)[0] == f"{2 * 4 * (2 + 5)} streams came\n"
        assert process.returncode == 0
    rows = json.loads(result.stdout)["streams"]
    assert [(row["transport"], row["depth"], row["level"]) for row in rows] == [
        ("tcp", depth, level) for depth in (64, 128) for level in (None, 0, 1, 2, 3)
    ]
    assert plot.read_bytes().startswith(b"<?xml")


def test_a_machine_that_has_another_token_or_model(
    stories: Path, model_file: ModelFile, capfd: pytest.CaptureFixture[str]
) -> None:
    """The stranger is sent away; the other model's stream is refused at both ends."""
    with receiving(stories, "tcp:127.0.0.1:0", "--stream-token", "secret") as (process, told):
        address = told[told.index("--to") + 1]
        arguments = f"-p 0 -n 0 -d 64 -r 1 --cache stream --to {address} --stream-token"
        assert "give both ends the same token" in bench(stories, f"{arguments} guessed").stderr
        result = bench(model_file(ModelSpec()), f"{arguments} secret")
        assert result.exit_code == 1
        assert "the other end is closed" in result.stderr
        assert process.wait(60) == 1
    assert "Error: " in capfd.readouterr().err


@pytest.mark.slow
def test_streams_over_mpi_and_files(stories: Path) -> None:
    if not (Path(sys.executable).parent / "mpiexec").exists():
        pytest.skip("mpich is missing")
    lines = bench(stories, "-p 0 -n 0 -d 64 -r 1 --cache stream --over mpi --over file").stdout.splitlines()
    assert [line for line in lines if "over" in line] == [
        "over mpi, a prompt of 64 tokens:",
        "over file, a prompt of 64 tokens:",
    ]
    assert [line.split()[0] for line in lines[2:8]] == ["level", "none", "0", "1", "2", "3"]


def test_servers_by_turns(stories: Path, tmp_path: Path) -> None:
    """Ours decodes what must be, by counting; of the other one, which decodes nothing, what it tells."""
    plot = tmp_path / "servers.svg"
    command = shlex.join([sys.executable, other_server.__file__])
    arguments = ["-m", str(stories), "-d", "96", "--server", "2x2", "-r", "1", "-t", "1", "--json"]
    result = CliRunner().invoke(main, ["bench", *arguments, "--vs", command, "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    ours, other = json.loads(result.stdout)["servers"]
    with kvg.Model(stories) as model:
        prompts = requests.write_prompts(model, 96, (64, 352), 4)  # 512 with the answers
    assert ours["server"] == "pykvgraph"
    assert other["server"] == f"{Path(sys.executable).name} {other_server.__file__}"
    n_answers = len(prompts) * (requests.N_ANSWER - 1)
    for row in (ours, other):
        assert row["clients"] == 2
        assert row["n_prompt"] == sum(map(len, prompts))
        assert 0 < row["first_p50"] <= row["first_p95"]
        assert 0 < row["gap_p50"] <= row["gap_p95"] <= row["gap_max"]
        assert row["tokens_per_second"] > 0
    least = 96 + sum(len(prompt) - 96 for prompt in prompts) + n_answers
    assert least <= ours["n_decoded"] <= least + 32 * len(prompts)
    assert other["n_decoded"] == sum(len(prompt) - len(prompt) // 2 for prompt in prompts) + n_answers
    assert plot.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("command", "why"),
    [("no-such-server", "no program no-such-server"), (f"{sys.executable} -c 1/0", "ZeroDivisionError")],
)
def test_a_server_that_does_not_start_is_named(stories: Path, command: str, why: str) -> None:
    arguments = ["-m", str(stories), "--server", "1x1", "-r", "1", "-t", "1", "--vs", command]
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert why in result.stderr


def test_quantiles() -> None:
    assert [quantile([3.0, 1.0, 2.0], share) for share in (0.0, 0.5, 0.95, 1.0)] == [1.0, 2.0, 3.0, 3.0]
    assert quantile(list(range(1, 101)), 0.95) == 95
