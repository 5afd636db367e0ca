"""The command line without a model: help, options, environment, errors. Needs no native library."""

from __future__ import annotations

import math
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from pykvgraph.cli import main
from pykvgraph.cli.prompt import prompt_options
from pykvgraph.cli.verb import Verb, option
from pykvgraph.errors import CacheFullError, InvalidArgumentError, KVGraphError, UnsupportedError

VERBS = sorted(main.commands)


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, arguments, env={"COLUMNS": "80", **(env or {})}, prog_name="pykvgraph")


def options(verb: str) -> list[click.Option]:
    return [param for param in main.commands[verb].params if isinstance(param, click.Option)]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What `generate` is called with, in place of running it."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(main.commands["generate"], "callback", lambda **values: seen.update(values))
    yield seen


def test_the_verbs_of_this_version() -> None:
    assert VERBS == [
        "batch",
        "bench",
        "cache",
        "cells",
        "chat",
        "cluster",
        "generate",
        "info",
        "inspect",
        "passkey",
        "perplexity",
        "plan",
        "quality",
        "rerank",
        "serve",
    ]
    shown = run("--help").stdout
    assert all(verb in shown for verb in VERBS)
    assert "..." not in shown.partition("Commands:")[2]  # no summary is cut


@pytest.mark.parametrize("verb", [None, *VERBS])
def test_help_has_an_example(verb: str | None) -> None:
    arguments = [verb] if verb else []
    result = run(*arguments, "--help")
    assert result.exit_code == 0
    assert f"\n    pykvgraph {verb or ''}" in result.stdout.partition("Examples:")[2]
    assert run(*arguments, "-h").stdout == result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_every_variable(verb: str) -> None:
    words = " ".join(run(verb, "--help").stdout.split())
    assert all(f"env var: {', '.join(opt.envvar or ())}" in words for opt in options(verb))


@pytest.mark.parametrize(
    ("variable", "default"),
    [
        ("PROMPT", '""'),
        ("PREDICT, KVGRAPH_N_PREDICT", "256"),
        ("CTX_SIZE", "(the model's, at most 4096)"),
        ("BATCH_SIZE", "512"),
        ("UBATCH_SIZE", "512"),
        ("THREADS", "(all CPUs; 1 for a model under 10 million parameters)"),
        ("DEVICE", "auto"),
        ("TEMP, KVGRAPH_TEMPERATURE", "0.0"),
        ("TOP_K", "40"),
        ("TOP_P", "0.95"),
        ("MIN_P", "0.05"),
        ("SEED", "(random)"),
        ("KEEP", "(32, at most a quarter of -c)"),
    ],
)
def test_help_shows_defaults(variable: str, default: str) -> None:
    words = " ".join(run("generate", "--help").stdout.split())
    assert f"env var: KVGRAPH_{variable}; default: {default}" in words


def test_help_shows_what_may_be_typed() -> None:
    """-1 is outside of no range, and a newline is an escape."""
    words = " ".join(run("generate", "--help").stdout.split())
    assert "KVGRAPH_N_PREDICT; default: 256]" in words
    assert r'default: (\n : " *)]' in words


def test_a_variable_means_the_same_everywhere() -> None:
    names: dict[Any, set[str]] = {}
    for verb in VERBS:
        for opt in options(verb):
            long_names = [name for name in opt.opts if name.startswith("--")]
            for variable, long_name in zip(opt.envvar or (), long_names, strict=True):
                names.setdefault(variable, set()).add(long_name)
    assert all(str(variable).startswith("KVGRAPH_") for variable in names)
    assert all(len(spellings) == 1 for spellings in names.values())


def test_llama_cpp_spellings(parsed: dict[str, Any]) -> None:
    result = run(
        *shlex.split("generate -m a.gguf -p hello -n 5 -c 64 -b 32 -ub 16 -t 2 -tb 3 -dev cpu -s 7 --json"),
        *shlex.split("-ngl 3 -ts 3,1 -nkvo -kvt host --rpc localhost:50052 -ctk q8_0 -ctv f32 --swa-full"),
        *shlex.split("--override-kv llama.rope.freq_base=float:5e5,tokenizer.ggml.add_bos_token=bool:false"),
        *shlex.split(
            "-dt 0.2 --margin 5 --spec-type draft-simple -hfd a/b --draft-max 8 --lora a.gguf,b.gguf "
            "--lora-scaled c.gguf:0.5"
        ),
        *shlex.split("-e --temp 0.5 --top-k 9 --top-p 0.8 --min-p 0.1 --keep 4 --stop x --stop 'y z'"),
        *shlex.split("--typical 0.7 --repeat-penalty 1.1 --repeat-last-n 32 --presence-penalty 0.2"),
        *shlex.split("--frequency-penalty 0.3 --mirostat 2 --mirostat-ent 4 --mirostat-lr 0.2"),
        *shlex.split("--top-nsigma 1.5 --xtc-probability 0.5 --xtc-threshold 0.2 --dynatemp-range 0.3"),
        *shlex.split("--dynatemp-exp 2 --dry-multiplier 0.8 --dry-base 2 --dry-allowed-length 3"),
        *shlex.split(r"--dry-penalty-last-n 9 --dry-sequence-breaker none --dry-sequence-breaker '\n'"),
        *shlex.split(
            "-l 5-inf -l 15043+1.5 --grammar 'root ::= [a]' -j '{}' -fa 1 --log-file a.log -lv 2 -v"
        ),
        *shlex.split("--rope-scaling yarn --rope-scale 2 --rope-freq-base 5e5 --yarn-orig-ctx 128"),
        *shlex.split("--adaptive-target 0.3 --adaptive-decay 0.5 --log-disable --offline -hft secret"),
        *shlex.split("--beam-width 4 --n-best 2 --length-penalty 0.5"),
    )
    assert (result.exit_code, result.output) == (0, "")
    assert parsed == {
        "spec_type": "draft-simple",
        "typical_p": 0.7,
        "repeat_penalty": 1.1,
        "penalty_last_n": 32,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "top_n_sigma": 1.5,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "dynatemp_range": 0.3,
        "dynatemp_exponent": 2.0,
        "dry_multiplier": 0.8,
        "dry_base": 2.0,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 9,
        "dry_sequence_breakers": ("\n",),
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
        "logit_bias": ((5, -math.inf), (15043, 1.5)),
        "grammar": "root ::= [a]",
        "grammar_file": None,
        "json_schema": "{}",
        "json_schema_file": None,
        "adaptive_target": 0.3,
        "adaptive_decay": 0.5,
        "flash_attn": "on",
        "rope_scaling": "yarn",
        "rope_scale": 2.0,
        "rope_freq_scale": None,
        "rope_freq_base": 5e5,
        "yarn_orig_ctx": 128,
        "verbosity": 2,
        "verbose": True,
        "log_file": "a.log",
        "log_disable": True,
        "model": "a.gguf",
        "hf_repo": None,
        "hf_file": None,
        "hf_token": "secret",
        "offline": True,
        "model_url": None,
        "prompt": "hello",
        "prompt_file": None,
        "escape": True,
        "max_tokens": 5,
        "n_ctx": 64,
        "n_batch": 32,
        "n_ubatch": 16,
        "type_k": "q8_0",
        "type_v": "f32",
        "swa_full": True,
        "defrag_threshold": 0.2,
        "margin": 5,
        "model_draft": None,
        "draft_repo": "a/b",
        "draft_max": 8,
        "n_threads": 2,
        "n_threads_batch": 3,
        "device": "cpu",
        "n_gpu_layers": 3,
        "tensor_split": (3.0, 1.0),
        "no_kv_offload": True,
        "kv_tier": "host",
        "rpc": "localhost:50052",
        "override_kv": ((("llama.rope.freq_base", 5e5), ("tokenizer.ggml.add_bos_token", False)),),
        "lora": ((("a.gguf", 1.0), ("b.gguf", 1.0)),),
        "lora_scaled": ((("c.gguf", 0.5),),),
        "seed": 7,
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.8,
        "min_p": 0.1,
        "n_keep": 4,
        "beam_width": 4,
        "n_best": 2,
        "length_penalty": 0.5,
        "as_json": True,
        "stop": ("x", "y z"),
    }


def test_environment_sets_what_is_not_typed(parsed: dict[str, Any]) -> None:
    env = {
        "KVGRAPH_MODEL": "b.gguf",
        "KVGRAPH_N_PREDICT": "6",
        "KVGRAPH_TOP_P": "0.25",
        "KVGRAPH_STOP": "one text",
        "KVGRAPH_JSON": "1",
    }
    assert run("generate", "-n", "5", env=env).exit_code == 0
    assert parsed["model"] == "b.gguf"
    assert parsed["max_tokens"] == 5
    assert parsed["top_p"] == 0.25
    assert parsed["stop"] == ("one text",)
    assert parsed["as_json"] is True


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KVGRAPH_N_PREDICT", "many"),
        ("KVGRAPH_N_PREDICT", "0"),
        ("KVGRAPH_CTX_SIZE", "-1"),
        ("KVGRAPH_BATCH_SIZE", "1.5"),
        ("KVGRAPH_UBATCH_SIZE", "0"),
        ("KVGRAPH_THREADS", "all"),
        ("KVGRAPH_THREADS_BATCH", "0"),
        ("KVGRAPH_TEMP", "hot"),
        ("KVGRAPH_TOP_K", "-1"),
        ("KVGRAPH_TOP_P", "1.01"),
        ("KVGRAPH_MIN_P", "-0.1"),
        ("KVGRAPH_SEED", "4294967295"),
        ("KVGRAPH_KEEP", "-1"),
        ("KVGRAPH_JSON", "perhaps"),
    ],
)
def test_a_bad_variable_is_named(parsed: dict[str, Any], variable: str, value: str) -> None:
    result = run("generate", "-m", "a.gguf", env={variable: value})
    assert result.exit_code == 2
    assert result.stdout == ""
    assert variable in result.stderr
    assert value in result.stderr
    assert not parsed


@pytest.mark.parametrize(
    "arguments", [["generate"], ["inspect"], ["talk"], ["info", "--jsn"], ["generate", "-m", "a", "-n"]]
)
def test_usage_errors_exit_with_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Error: " in result.stderr


@pytest.mark.parametrize(
    "option",
    [
        ["-c", "9"],
        ["-ub", "9"],
        ["-ctk", "f32"],
        ["-t", "1"],
        ["-ngl", "1"],
        ["-dev", "cpu"],
        ["-nkvo"],
        ["-kvt", "host"],
    ],
)
def test_what_depends_on_a_model_needs_one(option: list[str]) -> None:
    """And a variable, which is there for every verb, doesn't."""
    result = run("info", *option)
    assert result.exit_code == 2
    assert f"{option[0]} is about a model's memory: give -m too" in result.stderr
    from_outside = {"KVGRAPH_CTX_SIZE": "9", "KVGRAPH_RPC": "nowhere:1"}
    assert "give -m" not in CliRunner().invoke(main, ["info"], env=from_outside).stderr


@pytest.mark.parametrize(
    "error",
    [
        KVGraphError("a bug"),
        UnsupportedError("it can't\nbe done"),
        CacheFullError("no room"),
        OSError("what it says itself"),
        ImportError("libggml.so.0 is missing"),
    ],
)
def test_our_errors_are_one_line(error: Exception) -> None:
    result = CliRunner().invoke(failing(error), ["--place", "here"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == f"Error: {' '.join(str(error).split())}\n"


def test_errors_of_files_are_told_without_their_numbers() -> None:
    result = CliRunner().invoke(failing(FileNotFoundError(2, "No such file", "a.gguf")), ["--place", "here"])
    assert (result.exit_code, result.stderr) == (1, "Error: 'a.gguf': No such file\n")


def test_an_error_names_the_variables_in_use() -> None:
    command = failing(InvalidArgumentError("no such place"))
    result = CliRunner().invoke(command, [], env={"KVGRAPH_PLACE": "there", "KVGRAPH_TIME": ""})
    assert result.stderr == "Error: no such place (from the environment: KVGRAPH_PLACE)\n"


@pytest.mark.parametrize("error", [OSError("disk"), ImportError("library"), CacheFullError("full")])
def test_variables_are_not_blamed_for_what_is_no_bad_value(error: Exception) -> None:
    result = CliRunner().invoke(failing(error), [], env={"KVGRAPH_PLACE": "there"})
    assert result.stderr == f"Error: {error}\n"


def test_a_mistake_in_the_program_is_not_hidden() -> None:
    result = CliRunner().invoke(failing(ZeroDivisionError("a mistake")), ["--place", "here"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_a_reader_that_has_gone_is_no_error() -> None:
    result = CliRunner().invoke(failing(BrokenPipeError(32, "Broken pipe")), ["--place", "here"])
    assert (result.exit_code, result.output) == (1, "")


@pytest.mark.parametrize("variable", ["KVGRAPH_KEEP", "KVGRAPH_N_KEEP"])
def test_each_long_name_has_a_variable(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(main.commands["passkey"], "callback", lambda **values: seen.update(values))
    assert run("passkey", env={variable: "7"}).exit_code == 0
    assert seen["n_keep"] == 7
    assert run("passkey", "--keep", "8", env={variable: "7"}).exit_code == 0
    assert seen["n_keep"] == 8


def test_an_error_names_the_variable_of_two_that_is_set() -> None:
    @click.command(cls=Verb)
    @option("--place", "--spot", "place")
    def command(place: str) -> None:
        raise InvalidArgumentError("no such place")

    result = CliRunner().invoke(command, [], env={"KVGRAPH_PLACE": "", "KVGRAPH_SPOT": "there"})
    assert result.stderr == "Error: no such place (from the environment: KVGRAPH_SPOT)\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--n", "5"], "--n"),
        (["--n", "5", "--many", "1", "--many", "2", "--text", "7"], "--n or --many"),
        (["--flag"], "model"),
    ],
)
def test_no_memory_is_one_line_with_what_to_lower(arguments: list[str], told: str) -> None:
    @click.command(cls=Verb)
    @option("--n", type=int, default=3)
    @option("--many", type=int, multiple=True)
    @option("--text")
    @option("--flag", is_flag=True)
    def command(**_: Any) -> None:
        raise MemoryError

    result = CliRunner().invoke(command, arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"Error: there is not enough memory for this: try a smaller {told}\n"


@pytest.mark.slow
@pytest.mark.parametrize("as_script", [True, False])
@pytest.mark.parametrize("arguments", ["--help", "--version", "info", ""])
@pytest.mark.parametrize(
    ("variable", "told"),
    [
        ("KVGRAPH_LIB", "KVGRAPH_LIB is /nowhere"),
        ("KVGRAPH_LOG", "KVGRAPH_LOG is '/nowhere'"),
        ("LLAMA_CPP_LIB_PATH", "LLAMA_CPP_LIB_PATH is /nowhere"),
    ],
)
def test_the_command_in_a_bad_environment(
    tmp_path: Path, variable: str, told: str, arguments: str, as_script: bool
) -> None:
    script = tmp_path / "pykvgraph"  # as pip writes it
    script.write_text("import sys\nfrom pykvgraph.cli import main\nsys.exit(main())\n")
    program = [str(script)] if as_script else ["-m", "pykvgraph"]
    done = run_python(*program, *arguments.split(), **{variable: "/nowhere"})
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Error: {told}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["-c", "import pykvgraph"], ["-m", "package"], ["program.py", "pykvgraph"]], ids=str
)
def test_other_programs_get_the_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    (tmp_path / "package").mkdir()
    for name in ("program.py", "package/__init__.py"):
        (tmp_path / name).write_text("import pykvgraph\n")
    monkeypatch.chdir(tmp_path)
    done = run_python(*arguments, KVGRAPH_LIB="/nowhere")
    assert done.returncode == 1
    assert "\nImportError: KVGRAPH_LIB is /nowhere" in done.stderr


def run_python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    paths = [str(Path(folder).parent) for folder in sys.modules["pykvgraph"].__path__]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths + sys.path), **env}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=120
    )


@pytest.mark.parametrize("arguments", [["-p", "-"], ["-f", "-"], ["-f", "prompt.txt"]])
def test_a_prompt_from_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str]
) -> None:
    """Without the newline that ends a file; escapes are read where -e is given."""
    text = "Grüße\\n\\x41\\u00e4\\\\n\\q\n"
    monkeypatch.chdir(tmp_path)
    Path("prompt.txt").write_text(text, encoding="utf-8")
    seen: list[str] = []

    @click.command()
    @prompt_options
    def verb(prompt: str) -> None:
        seen.append(prompt)

    for extra in ([], ["-e"]):
        assert CliRunner().invoke(verb, [*arguments, *extra], input=text.encode()).exit_code == 0
    assert seen == [text.removesuffix("\n"), "Grüße\nAä\\n\\q"]


def test_a_prompt_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "prompt"
    path.write_bytes(bytes([0xFF, 0xFE]))
    both = run("generate", "-m", "a.gguf", "-p", "a", "-f", str(path))
    assert (both.exit_code, "leave one out" in both.stderr) == (2, True)
    no_text = run("generate", "-m", "a.gguf", "-f", str(path))
    assert (no_text.exit_code, "not text in UTF-8" in no_text.stderr) == (1, True)
    missing = run("generate", "-m", "a.gguf", "-f", str(path) + "s")
    assert (missing.exit_code, "No such file" in missing.stderr) == (2, True)


def test_without_an_end(parsed: dict[str, Any]) -> None:
    assert run("generate", "-m", "a.gguf", "-n", "-1").exit_code == 0
    assert parsed["max_tokens"] == 2**31 - 1


@pytest.mark.parametrize("name", ["new.gif", "new", "new.PNG.txt"])
def test_a_plot_is_a_picture(tmp_path: Path, name: str) -> None:
    result = run("cells", "--plot", str(tmp_path / name))
    assert result.exit_code == 2
    assert "its suffix must be .png, .svg, .pdf" in " ".join(result.stderr.split())


def completions(line: str) -> list[str]:
    """What bash would offer for the last word."""
    env = {"_PYKVGRAPH_COMPLETE": "bash_complete", "COMP_WORDS": line}
    env["COMP_CWORD"] = str(len(line.split()) - (not line.endswith(" ")))
    result = CliRunner().invoke(main, env=env, prog_name="pykvgraph", complete_var="_PYKVGRAPH_COMPLETE")
    return result.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("pykvgraph gen", ["plain,generate"]),
        ("pykvgraph generate --temp", ["plain,--temp", "plain,--temperature"]),
        ("pykvgraph generate -ctk q8", ["plain,q8_0"]),
        ("pykvgraph bench -m ", ["file,"]),
        ("pykvgraph generate -f ", ["file,"]),
        ("pykvgraph bench --cache sh", ["plain,shift"]),
    ],
)
def test_the_shell_completes(line: str, offered: list[str]) -> None:
    assert completions(line) == offered


def test_ctrl_c_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main.commands["info"], "callback", interrupted)
    result = run("info")
    assert (result.exit_code, result.stdout) == (130, "")


MISSING = ["{}/missing/new.png", "{}/old.png/new.png", "{}/new.png/"]
PLOTS = [["cells", "--plot"], ["passkey", "--grid", "--plot"]]


@pytest.mark.parametrize("arguments", PLOTS, ids="-".join)
@pytest.mark.parametrize("path", ["", "/", "{}", *MISSING])
def test_a_plot_that_cannot_be_is_told_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str], path: str
) -> None:
    (tmp_path / "old.png").touch()
    monkeypatch.setattr(main.commands[arguments[0]], "callback", lambda **_: pytest.fail("has begun"))
    result = run(*arguments, path.format(tmp_path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Invalid value for '--plot'" in result.stderr
    assert ("there is no such folder" in result.stderr) == (path in ("", *MISSING))
    assert [entry.name for entry in tmp_path.iterdir()] == ["old.png"]


@pytest.mark.parametrize("arguments", PLOTS, ids="-".join)
@pytest.mark.parametrize(
    ("path", "locked", "code"),
    [("new.png", [], 0), ("old.png", ["."], 0), ("new.png", ["."], 2), ("old.png", ["old.png"], 2)],
)
def test_a_plot_needs_a_folder_or_a_file_to_write_to(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    path: str,
    locked: list[str],
    code: int,
) -> None:
    (tmp_path / "old.png").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda name, mode: not (mode & os.W_OK and name in locked))
    seen: dict[str, Any] = {}
    monkeypatch.setattr(main.commands[arguments[0]], "callback", lambda **values: seen.update(values))
    assert run(*arguments, path).exit_code == code
    assert seen.get("plot") == (None if code else path)


def failing(error: Exception) -> click.Command:
    @click.command(cls=Verb)
    @option("--place", required=True)
    @option("--time")
    def command(place: str, time: str | None) -> None:
        raise error

    return command


@pytest.mark.parametrize("given", ["", " ", ","])
def test_a_server_without_its_key_does_not_start(given: str, tmp_path: Path) -> None:
    """A shell's variable that isn't set; everybody might ask then."""
    model = tmp_path / "model.gguf"
    model.touch()
    refused = run("serve", "-m", str(model), "--api-key", given)
    assert refused.exit_code == 2
    assert "--api-key: there is no key in it" in refused.stderr
    (tmp_path / "keys").write_text(f"# none\n{given.replace(',', '')}\n")
    refused = run("serve", "-m", str(model), "--api-key-file", str(tmp_path / "keys"))
    assert "--api-key-file: there is no key in it" in refused.stderr


@pytest.mark.parametrize("host", ["/tmp/x.sock", "x.sock", "./x"])
def test_a_server_has_no_unix_sockets(host: str, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    for typed, env in ((["--host", host], {}), ([], {"LLAMA_ARG_HOST": host})):
        refused = run("serve", "-m", str(model), *typed, env=env)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert f"{host}: this server has no UNIX sockets" in refused.stderr


@pytest.mark.parametrize("verb", ["serve", "generate", "chat", "passkey", "bench"])
@pytest.mark.parametrize("name", ["-ctk", "-ctv"])
def test_a_type_that_the_cache_lacks_is_told_by_its_option(verb: str, name: str, tmp_path: Path) -> None:
    """Before anything is loaded: the file is no model."""
    model = tmp_path / "model.gguf"
    model.touch()
    refused = run(verb, "-m", str(model), name, "iq4_nl")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert f"'{name}'" in refused.stderr and "iq4_nl" in refused.stderr
    assert "loading" not in refused.stderr and "type_" not in refused.stderr
    known = run(verb, "-m", str(model), name, "Q8_0")
    assert known.exit_code == 1, known.stderr  # for the model alone


@pytest.mark.parametrize(("host", "why"), [("127.0.0.1", "in use"), ("192.0.2.1", "address")])
def test_a_server_whose_address_cannot_be_had(host: str, why: str, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused = run("serve", "-m", str(model), "--host", host, "--port", str(port), "--api-key", "k")
    assert refused.exit_code == 1
    assert f"{host}:{port}: " in refused.stderr and why in refused.stderr.lower(), refused.stderr
    assert "another --port" in refused.stderr and "Errno" not in refused.stderr
