"""The command line on a real model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from click.testing import CliRunner, Result
from support.architectures import ArchSpec
from support.ctrl_c import heard as ctrl_c_heard
from support.kept_graphs import grow_graphs
from support.kv_types import GGML_TYPES

import pykvgraph as kvg
from pykvgraph.cli import main


def run(*arguments: str | Path, env: dict[str, str] | None = None) -> Result:
    env = {"COLUMNS": "80", **(env or {})}
    return CliRunner().invoke(main, [str(argument) for argument in arguments], env=env, prog_name="pykvgraph")


def run_json(*arguments: str | Path) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


def generate(stories: Path, *arguments: str) -> dict[str, Any]:
    return run_json("generate", "-m", stories, "-t", "1", *arguments)


def test_a_model_of_states_alone(architecture: Callable[[ArchSpec], Path]) -> None:
    """Every verb does what it does for others."""
    path = architecture(ArchSpec("mamba2", n_layer=2, state_heads=8))
    info = run("info", "-m", path)
    assert info.exit_code == 0, info.output
    assert len(generate(path, "-p", "a", "-n", "40", "-c", "24")["tokens"]) == 40
    result = run("cells", "-m", path, "-c", "12")
    assert "\n12 cells: " in result.stdout


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"pykvgraph {kvg.__version__}\n")


def test_info_json() -> None:
    info = run_json("info")
    assert info["pykvgraph"] == kvg.__version__
    assert info["llama_cpp_python"] == "0.3.36"
    assert info["ggml"]["running"] == info["ggml"]["built"] == "0.25.3"
    assert all(Path(path).is_file() for path in info["libraries"])
    (cpu,) = (device for device in info["devices"] if device["type"] == "cpu")
    assert cpu["name"] == "CPU"
    assert 0 < cpu["memory_free"] <= cpu["memory_total"]


def test_info_tells_what_the_cpu_can() -> None:
    (cpu,) = (device for device in run_json("info")["devices"] if device["type"] == "cpu")
    assert {answer["cache_type"] for answer in cpu["abilities"]} == set(GGML_TYPES)
    assert all(answer["attention"] == "attend" for answer in cpu["abilities"])
    assert all(answer["shift_on_device"] and answer["can_defrag"] for answer in cpu["abilities"])


@pytest.mark.parametrize("n_ctx", [256, 5000])
def test_info_predicts_memory(stories: Path, n_ctx: int) -> None:
    """Within 2% of what a model and a context hold then."""
    sizes = ("-c", str(n_ctx), "-ub", "64", "-ctk", "f32", "-t", "1", "-dev", "cpu")
    (cpu,) = run_json("info", "-m", stories, *sizes)["memory"]
    with (
        kvg.Model(stories, device="cpu") as model,
        kvg.Context(model, n_ctx=n_ctx, n_ubatch=64, type_k="f32", n_threads=1) as ctx,
    ):
        grow_graphs(ctx)
        (held,) = ctx.devices
        assert cpu["device"] == held.device == "CPU"
        for name in ("weight_bytes", "cache_bytes", "compute_bytes"):
            assert abs(cpu[name] - getattr(held, name)) <= 0.02 * getattr(held, name)
        assert held.cache_bytes == ctx.kv.bytes
        assert abs(held.weight_bytes - model.weight_bytes) <= 0.02 * model.weight_bytes
    shown = run("info", "-m", stories, *sizes).stdout.splitlines()
    assert shown[-2].split()[:2] == ["takes", "on"]
    assert shown[-1].split()[:2] == ["CPU", "5"]


def test_info_shows_all_of_it_in_80_columns() -> None:
    info, shown = run_json("info"), run("info").stdout
    lines = shown.splitlines()
    assert all(f"  {path}" in lines for path in info["libraries"])
    table = lines[lines.index("") + 1 :]
    assert all(len(line.rstrip()) <= 80 for line in table if line.strip() not in info["libraries"])
    assert all(any(line.startswith(device["name"]) for line in lines) for device in info["devices"])


def test_inspect_json_has_what_another_reader_finds(stories: Path) -> None:
    report = run_json("inspect", stories)
    reader = gguf.GGUFReader(stories)
    expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert report["metadata"] == expected
    assert report["size"] == stories.stat().st_size
    assert [
        (tensor["name"], tensor["type"].upper(), tuple(tensor["shape"]), tensor["offset"], tensor["size"])
        for tensor in report["tensors"]
    ] == [
        (t.name, t.tensor_type.name, tuple(t.shape.tolist()), t.data_offset, t.n_bytes)
        for t in reader.tensors
    ]


def test_inspect_names_the_recipe(stories: Path) -> None:
    report = run_json("inspect", "-m", stories)
    recipe = report["recipe"]
    assert report["reason"] is None
    assert (recipe["arch"], recipe["n_layer"], recipe["n_embd"]) == ("llama", 5, 64)
    assert (recipe["n_head"], recipe["n_head_kv"], recipe["head_dim"]) == (8, 4, 8)
    assert (recipe["n_vocab"], recipe["n_ctx_train"]) == (512, 512)
    assert recipe["n_params"] == sum(int(t.n_elements) for t in gguf.GGUFReader(stories).tensors)


def test_inspect_is_for_reading(stories: Path) -> None:
    shown = run("inspect", stories).stdout
    assert "runs as llama:\n" in shown
    assert "8 of 8, on 4 of K and V, each for 2" in shown
    assert "speaks SentencePiece (llama) of 512 tokens" in shown
    assert '512 items: "<unk>", "<s>", "</s>"' in shown
    assert "blk.4.ffn_down.weight" in shown
    assert "172 x 64" in shown
    assert re.search(r"layer_norm_rms_epsilon +1e-05 *$", shown, re.MULTILINE)
    lines = shown.splitlines()[1:]  # the first one has the path
    assert max(map(len, lines)) <= 80
    assert len(lines) < 90  # of 512 tokens and scores, only some


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """A good GGUF file that is no model for us, with text that would steer a terminal."""
    path = tmp_path / "strange.gguf"
    writer = gguf.GGUFWriter(path, "perceptron")
    writer.add_string("general.name", "\x1b[31mred[/red]\nand more")
    writer.add_float32("some.infinity", float("inf"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_inspect_says_why_a_file_does_not_run(strange: Path) -> None:
    result = run("inspect", strange)
    report = json.loads(run("inspect", strange, "--json").stdout)
    assert report["recipe"] is None
    assert "perceptron" in report["reason"]
    assert report["metadata"]["some.infinity"] is None
    assert result.exit_code == 1
    assert "does not run: " in result.stdout
    assert "does not speak: has no tokenizer" in result.stdout
    assert r"\x1b[31mred[/red]\nand more" in result.stdout
    assert "\x1b" not in result.stdout


def test_generate_is_greedy_and_streams(stories: Path, golden_story: str) -> None:
    report = generate(stories, "-n", "256")
    assert report["text"].strip() == golden_story.strip()
    assert (len(report["tokens"]), report["finish_reason"]) == (256, "length")
    result = run("generate", "-m", stories, "-t", "1")
    assert (result.stdout, result.stderr) == (report["text"] + "\n", "")


def test_generate_goes_on_from_a_prompt_to_a_stop_string(stories: Path, golden_story: str) -> None:
    prompt = golden_story[:60]
    report = generate(stories, "-p", prompt, "--stop", "never said", "--stop", " One day")
    assert prompt + report["text"] == golden_story[: golden_story.index(" One day")]
    assert report["finish_reason"] == "stop"


def test_generate_keeps_k_and_v_in_a_type(stories: Path, golden_story: str) -> None:
    """BF16 is near enough for the story to begin alike; heads of 8 are no blocks."""
    done = run("generate", "-m", str(stories), "-n", "24", "-ctk", "f32", "-ctv", "bf16")
    assert done.exit_code == 0
    assert golden_story.strip().startswith(done.stdout.strip()[:60])
    refused = run("generate", "-m", str(stories), "-n", "4", "-ctk", "q8_0")
    assert refused.exit_code == 1
    assert "blocks of 32" in refused.stderr


def test_layers_for_a_gpu_that_is_not_there(stories: Path) -> None:
    if any(device.type == "gpu" for device in kvg.devices()):
        pytest.skip("there is one")
    done = run("generate", "-m", str(stories), "-n", "3", "-ngl", "2")
    assert done.exit_code == 0
    assert done.stderr.startswith("No GPU")
    assert run("generate", "-m", str(stories), "-n", "3").stderr == ""


def test_generate_outlasts_the_context(stories: Path) -> None:
    report = generate(stories, "-n", "600", "-c", "256", "--keep", "4", "-b", "32", "-ub", "16")
    # BOS and 599 tokens were decoded, 344 more than there are cells; each shift empties 126
    assert len(report["tokens"]) == 600
    assert [shift["n_discard"] for shift in report["shifts"]] == [126] * 3
    assert all(shift["stats"]["moved_cells"] == 126 for shift in report["shifts"])
    assert report["n_ctx"] == 256


def test_generate_draws_by_its_seed(stories: Path) -> None:
    first, again, other = (
        generate(stories, "-n", "40", "--temp", "1", "-s", seed)["tokens"] for seed in ("1", "1", "2")
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("verb", ["inspect", "generate"])
def test_a_missing_file_is_one_line(tmp_path: Path, verb: str) -> None:
    path = str(tmp_path / "nobody.gguf")
    result = run(verb, "-m", path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert path in result.stderr


@pytest.mark.parametrize("verb", ["inspect", "generate"])
def test_a_damaged_file_is_one_line(tmp_path: Path, stories: Path, verb: str) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(stories.read_bytes()[: stories.stat().st_size // 2])
    result = run(verb, "-m", path)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1


def test_an_unknown_device_is_named(stories: Path) -> None:
    result = run("generate", "-m", stories, env={"KVGRAPH_DEVICE": "abacus"})
    assert (result.exit_code, result.stdout) == (1, "")
    assert "'abacus'" in result.stderr


def test_an_error_on_the_way_ends_the_line(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_arguments: Any, **_settings: Any) -> Iterator[kvg.Piece]:
        yield kvg.Piece("Once", 0, 0.0, None)
        raise kvg.DeviceError("it broke")

    monkeypatch.setattr(kvg, "generate", failing)
    result = run("generate", "-m", stories, "-t", "1")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "Once\n", "Error: it broke\n")


def test_generate_keeps_what_fits_a_small_context(stories: Path) -> None:
    report = generate(stories, "-c", "16", "-n", "40")
    assert len(report["tokens"]) == 40
    assert {shift["n_keep"] for shift in report["shifts"]} == {4}


def test_a_prompt_longer_than_the_context_needs_keep(stories: Path) -> None:
    long = "the cat and the dog " * 10
    result = run("generate", "-m", stories, "-t", "1", "-c", "16", "-p", long)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the prompt has" in result.stderr and "--keep" in result.stderr
    assert len(generate(stories, "-c", "16", "-n", "4", "--keep", "4", "-p", long)["tokens"]) == 4


def test_generate_with_a_grammar_and_penalties(stories: Path) -> None:
    report = generate(
        stories, "-p", "Once", "--grammar", "root ::= [0-9] [0-9]", "-l", "5-inf", "-l", "6+0.5"
    )
    assert report["text"].isdigit() and report["finish_reason"] == "stop"
    assert len(set(generate(stories, "-n", "30", "--repeat-penalty", "9")["tokens"])) == 30


def test_generate_refuses_to_keep_all_before_it_writes(stories: Path) -> None:
    result = run("generate", "-m", stories, "-t", "1", "-c", "16", "--keep", "16")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "--keep 16" in result.stderr and "-c" in result.stderr


def run_module(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
    command = [sys.executable, "-m", "pykvgraph", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, env=environment, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("cells", 0),
        ("cells --json", 0),
        ("cells -", 0),
        ("cells -c 0", 2),
        ("nothing", 2),
        ("info", 0),
        ("generate -n 2 -m stories", 0),
        ("passkey --n-junk 1 --grid --i-pos 1", 2),
        ("bench -p 4 -n 0 -r 1 -m stories", 0),
    ],
)
def test_closed_streams_are_no_error(stories: Path, closed: str, line: str, code: int) -> None:
    arguments = [str(stories) if word == "stories" else word for word in line.split()]
    command = ["sh", "-c", f'exec "$0" "$@" {closed}', sys.executable, "-m", "pykvgraph", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, capture_output=True, env=environment, timeout=120, stdin=subprocess.DEVNULL
    )
    assert done.returncode == code
    assert b"Traceback" not in done.stderr


def test_a_terminal_without_unicode(stories: Path) -> None:
    shown = run_module("inspect", stories, PYTHONIOENCODING="ascii")
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert rb"\u2026" in shown.stdout
    as_json = run_module("inspect", stories, "--json", PYTHONIOENCODING="ascii")
    assert json.loads(as_json.stdout.decode("ascii"))["metadata"] == run_json("inspect", stories)["metadata"]


def test_a_narrow_terminal_loses_nothing(stories: Path) -> None:
    shown = run_module("inspect", stories, COLUMNS="40", PYTHONIOENCODING="utf-8").stdout.decode()
    table = shown[shown.index("\n\n") :]
    assert max(map(len, table.splitlines())) <= 40
    assert "llama" in table and "512" in table and "items" in table and "KiB" in table


def test_help_imports_no_more_than_it_needs() -> None:
    script = (
        "import sys\n"
        "from pykvgraph.cli import main\n"
        "main(['generate', '--help'], standalone_mode=False)\n"
        "print({'rich', 'llama_cpp'} & set(sys.modules))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env
    )
    assert shown.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["info", "--help"], ["info"], ["inspect", "MODEL", "--json"]]
)
def test_output_that_can_not_be_written(stories: Path, arguments: list[str]) -> None:
    """A full disk is an error of one line, no traceback, and the exit code says it."""
    command = [str(stories) if argument == "MODEL" else argument for argument in arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pykvgraph", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


def test_ctrl_c_tells_what_there_is(stories: Path) -> None:
    """The pieces until then, as JSON, and exit code 130; with the seed, the text can be had again."""
    command = [sys.executable, "-m", "pykvgraph", "generate", "-m", str(stories), "-n", "-1", "--temp", "1"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with ctrl_c_heard():
        process = subprocess.Popen(
            [*command, "-c", "513", "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
    with process:
        assert process.stderr is not None
        assert "trained on" in process.stderr.readline()  # the context is there
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        told = json.loads(process.communicate(timeout=60)[0])
    assert process.returncode == 130
    assert told["finish_reason"] is None
    assert told["n_generated"] == len(told["tokens"]) > 0
    assert told["n_prompt"] == 1
    same = generate(stories, "-n", "5", "--temp", "1", "-s", str(told["seed"]))
    assert same["tokens"] == told["tokens"][:5]


def test_a_context_beyond_the_training_is_told_once(stories: Path) -> None:
    result = run("generate", "-m", stories, "-n", "1", "-c", "513")
    assert result.exit_code == 0
    assert result.stderr == "-c 513: the model was trained on 512 tokens.\n"
    assert run("generate", "-m", stories, "-n", "1", "-c", "512").stderr == ""
