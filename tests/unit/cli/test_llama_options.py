"""Every option and variable of llama-server is taken, taken without an effect, or refused by name."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from support.llama_help import Listed, listed_by_file, listed_by_help

from pykvgraph.cli import main
from pykvgraph.cli.llama_options import LlamaOption, llama_options

ROOT = Path(__file__).parents[3]
LISTED = listed_by_file()
# of llama-cli's and llama-completion's README, 2026: what llama-server doesn't have
OF_CLI = """
    --verbose-prompt; -sys TEXT; --system-prompt TEXT; -sysf FILE; --system-prompt-file FILE; -co on
    --color on; --display-prompt; --no-display-prompt; --show-timings; --no-show-timings; -ptc 8
    --print-token-count 8
    -cnv; --conversation; -no-cnv; --no-conversation; -st; --single-turn; -i; --interactive; -if
    --interactive-first; -mli; --multiline-input; --in-prefix-bos; --in-prefix TEXT; --in-suffix TEXT
    --prompt-cache FILE; --prompt-cache-all; --prompt-cache-ro; --simple-io; -gan 2; --grp-attn-n 2; -gaw 64
    --grp-attn-w 64; --image FILE; --audio FILE; --video FILE; -f FILE; --file FILE; -bf FILE
    --binary-file FILE; -p TEXT; --prompt TEXT
"""


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, arguments, env={"COLUMNS": "100", **(env or {})}, prog_name="pykvgraph")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What a verb is called with, in place of running it."""
    seen: dict[str, Any] = {}
    for verb in ("serve", "generate", "chat"):
        monkeypatch.setattr(main.commands[verb], "callback", lambda **values: seen.update(values))
    yield seen


def params_of(verb: str) -> dict[str, click.Option]:
    """By each name."""
    command = main.commands[verb]
    ctx = click.Context(command, info_name=verb, help_option_names=["-h", "--help"])
    return {
        name: param
        for param in command.get_params(ctx)
        if isinstance(param, click.Option)
        for name in (*param.opts, *param.secondary_opts)
    }


def option_of(name: str) -> LlamaOption:
    (found,) = [option for option in llama_options() if name in option.names]
    return found


def words_of(name: str, n_values: int | None) -> list[str]:
    return [name, *["8"] * (1 if n_values is None else n_values)]


def test_llama_servers_list_is_read_as_it_prints_it() -> None:
    text = """\
----- common params -----

-h,    --help, --usage                  print usage and exit
-c,    --ctx-size N                     size of the prompt context (default: 0, 0 = loaded from model)
                                        (env: LLAMA_ARG_CTX_SIZE)
-kvo,  --kv-offload, -nkvo, --no-kv-offload
                                        whether (default: enabled)
-ot,   --override-tensor <tensor name pattern>=<buffer type>,...
                                        override tensor buffer type
"""
    assert listed_by_help(text) == [
        Listed(("-h", "--help", "--usage"), "", ""),
        Listed(("-c", "--ctx-size"), "N", "LLAMA_ARG_CTX_SIZE"),
        Listed(("-kvo", "--kv-offload", "-nkvo", "--no-kv-offload"), "", ""),
        Listed(("-ot", "--override-tensor"), "<tensor name pattern>=<buffer type>,...", ""),
    ]


@pytest.mark.parametrize("verb", ["serve", "generate", "chat"])
def test_every_option_is_known_with_its_values(verb: str) -> None:
    """With as many words behind it as llama-server takes."""
    params = params_of(verb)
    names = [name for listed in LISTED for name in listed.names]
    assert len(names) > 400
    assert [name for name in names if name not in params] == []
    for listed in LISTED:
        n_values = len(listed.value.split()) if listed.value in ("START END", "TARGET DRAFT") else 1
        for name in listed.names:
            param = params[name]
            assert (param.is_flag or param.count) == (not listed.value), name
            if listed.value:
                assert param.nargs == n_values, name


def test_every_variable_is_known_by_its_option() -> None:
    for listed in LISTED:
        if listed.variable:
            option = option_of(listed.names[0])
            assert listed.variable in option.variables, listed


def test_each_name_says_one_thing() -> None:
    names = [name for option in llama_options() for name in option.names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "option", [each for each in llama_options() if each.effect == "none"], ids=lambda option: option.names[0]
)
def test_an_option_without_an_effect_says_so(seen: dict[str, Any], option: LlamaOption) -> None:
    for name in option.names:
        result = run("serve", "-m", "a.gguf", *words_of(name, option.n_values), "-c", "64")
        assert (result.exit_code, result.stdout) == (0, ""), result.stderr
        assert result.stderr == f"{name} has no effect here: {option.note}.\n"
        assert seen.pop("n_ctx") == 64


@pytest.mark.parametrize(
    "option",
    [each for each in llama_options() if each.effect == "refused"],
    ids=lambda option: option.names[0],
)
def test_an_option_that_is_refused_is_named(seen: dict[str, Any], option: LlamaOption) -> None:
    for name in option.names:
        result = run("serve", "-m", "a.gguf", *words_of(name, option.n_values))
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == f"Error: {name} is not taken here: {option.note}.\n"
    assert not seen


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("-np auto", {"n_parallel": -1}),
        ("-np -1", {"n_parallel": -1}),
        ("-fa", {"flash_attn": "on"}),
        ("-fa -c 8", {"flash_attn": "on", "n_ctx": 8}),
        ("-fa off", {"flash_attn": "off"}),
        ("--flash-attn 1", {"flash_attn": "on"}),
        ("-c 0", {"n_ctx": 0}),
        ("-ngl all", {"n_gpu_layers": -1}),
        ("-ngl auto", {"n_gpu_layers": -1}),
        ("-t -1 -tb -1", {"n_threads": None, "n_threads_batch": None}),
        ("-nkvo -kvo", {"no_kv_offload": False}),
        ("--kv-offload -nkvo", {"no_kv_offload": True}),
        ("-ctxcp 8 -c8", {"n_ctx": 8}),
        ("-fit on -fitt 1024 --ctx-size=8", {"n_ctx": 8}),
        ("-cd 512 -ngld 1 -devd none -c 8", {"n_ctx": 8}),
        ("-dt 0.2 -n9", {"defrag_threshold": 0.2, "n_predict": 9}),
        ("--predict 9", {"n_predict": 9}),
        ("--typical-p 0.5 --mirostat 2", {"typical_p": 0.5, "mirostat": 2}),
        ("--temperature 0.5", {"temp": 0.5}),
        ("-hfr a/b -hff c.gguf", {"hf_repo": "a/b", "hf_file": "c.gguf"}),
        ("-l 5-1 --logit-bias 6+inf", {"logit_bias": ((5, -1.0), (6, float("inf")))}),
        ("--special --ignore-eos --no-escape", {"special": True, "ignore_eos": True, "escape": False}),
        (r"--no-escape --dry-sequence-breaker '\n'", {"dry_sequence_breakers": (r"\n",)}),
        (r"--dry-sequence-breaker '\n' --no-escape", {"dry_sequence_breakers": (r"\n",)}),
        (r"--dry-sequence-breaker '\n'", {"dry_sequence_breakers": ("\n",)}),
        ("--reuse-port --tags a,b", {"reuse_port": True, "tags": "a,b"}),
        ("--no-prefill-assistant", {"prefill_assistant": False}),
        ("-rea off --reasoning-effort high", {"reasoning": "off", "reasoning_effort": "high"}),
        ("--lora-init-without-apply", {"lora_at_rest": True}),
        ("--verbosity 4 -v", {"verbosity": 4, "verbose": True}),
        ("--offline", {"offline": True}),
        ("--ctx_size 8 --n_predict=9 --backend_sampling", {"n_ctx": 8, "n_predict": 9}),
        ("--host 127.0.0.1,::1", {"host": ("127.0.0.1", "::1")}),
        ("-a a,--ctx_size", {"alias": "a,--ctx_size"}),
        ("--no-webui", {"webui": False}),
    ],
)
def test_what_users_of_llama_server_type(seen: dict[str, Any], line: str, values: dict[str, Any]) -> None:
    result = run("serve", *shlex.split(line))
    assert result.exit_code == 0, result.stderr
    assert {name: seen[name] for name in values} == values


def test_several_of_one_reason_share_a_line(seen: dict[str, Any]) -> None:
    result = run("serve", "--poll", "50", "-C", "f", "--prio", "2", "--no-perf")
    told = result.stderr.splitlines()
    assert len(told) == 3
    assert told[0].startswith("-C, --prio have no effect here: ")


@pytest.mark.parametrize("word", ["-ctfoo", "-xyz", "-ngx", "-tbx"])
def test_an_unknown_word_is_named_whole(seen: dict[str, Any], word: str) -> None:
    """And not read as an option of one letter, with the rest as its value."""
    result = run("serve", word, "8")
    assert result.exit_code == 2
    assert word in result.stderr.partition("Error: ")[2]
    assert "-c" not in result.stderr.partition("Error: ")[2].replace(word, "").split()
    assert not seen


def test_a_bad_number_behind_its_letter_is_told_as_such(seen: dict[str, Any]) -> None:
    assert "'8x'" in run("serve", "-c8x").stderr


@pytest.mark.parametrize("verb", sorted(main.commands))
def test_each_verb_has_the_version(verb: str) -> None:
    assert run(verb, "--version").stdout == run("--version").stdout
    assert run("--version").stdout.startswith("pykvgraph ")


def test_usage_is_help() -> None:
    assert run("serve", "--usage").stdout == run("serve", "--help").stdout


def test_help_has_only_what_has_an_effect() -> None:
    words = set(run("serve", "--help").stdout.replace(",", " ").split())
    for option in llama_options():
        if option.names != ("--version",) and not option.note.startswith("of llama-cli: "):
            assert words.isdisjoint(option.names) == (option.effect != "taken")


# the environment


@pytest.mark.parametrize(
    ("env", "values"),
    [
        ({"LLAMA_ARG_CTX_SIZE": "64"}, {"n_ctx": 64}),
        ({"LLAMA_ARG_CTX_SIZE": "64", "KVGRAPH_CTX_SIZE": "65"}, {"n_ctx": 65}),
        ({"LLAMA_ARG_CTX_SIZE": ""}, {"n_ctx": 0}),
        ({"LLAMA_ARG_KV_OFFLOAD": "0"}, {"no_kv_offload": True}),
        ({"LLAMA_ARG_KV_OFFLOAD": "enabled"}, {"no_kv_offload": False}),
        ({"LLAMA_ARG_NO_KV_OFFLOAD": "1"}, {"no_kv_offload": True}),
        ({"LLAMA_ARG_NO_WEBUI": "1"}, {"webui": False}),
        ({"LLAMA_ARG_ENDPOINT_METRICS": "on"}, {"metrics": True}),
        ({"LLAMA_ARG_ENDPOINT_SLOTS": "disabled"}, {"slots": False}),
        ({"LLAMA_ARG_FLASH_ATTN": "enabled"}, {"flash_attn": "on"}),
        ({"LLAMA_ARG_ALIAS": "enabled"}, {"alias": "enabled"}),
        ({"LLAMA_ARG_N_PARALLEL": "auto"}, {"n_parallel": -1}),
        ({"LLAMA_ARG_PREFILL_ASSISTANT": "false"}, {"prefill_assistant": False}),
        ({"LLAMA_ARG_REPEAT_PENALTY": "1.1"}, {"repeat_penalty": 1.1}),
    ],
)
def test_llama_servers_variables(seen: dict[str, Any], env: dict[str, str], values: dict[str, Any]) -> None:
    result = run("serve", env=env)
    assert (result.exit_code, result.output) == (0, "")
    assert {name: seen[name] for name in values} == values
    seen.clear()
    assert run("generate", "-m", "a.gguf", env=env).exit_code == 0  # which reads none of them
    assert seen["n_ctx"] == (65 if "KVGRAPH_CTX_SIZE" in env else None)


def test_a_variable_that_is_typed_over(seen: dict[str, Any]) -> None:
    assert run("serve", "-c", "7", env={"LLAMA_ARG_CTX_SIZE": "64"}).exit_code == 0
    assert seen["n_ctx"] == 7


def test_variables_without_an_effect_and_refused_ones(seen: dict[str, Any]) -> None:
    result = run("serve", env={"LLAMA_ARG_CTX_CHECKPOINTS": "8", "LLAMA_ARG_MLOCK": "0"})
    assert result.exit_code == 0
    assert result.stderr.startswith("LLAMA_ARG_CTX_CHECKPOINTS has no effect here: ")
    assert "MLOCK" not in result.stderr  # it is what it says anyway
    seen.clear()
    result = run("serve", env={"LLAMA_ARG_MMPROJ": "a.gguf"})
    assert (result.exit_code, seen) == (2, {})
    assert result.stderr.startswith("Error: LLAMA_ARG_MMPROJ is not taken here: ")
    assert run("serve", env={"LLAMA_ARG_RERANKING": "0"}).exit_code == 0


@pytest.mark.parametrize("value", ["many", "-2"])
def test_a_bad_variable_is_named(seen: dict[str, Any], value: str) -> None:
    result = run("serve", env={"LLAMA_ARG_CTX_SIZE": value})
    assert (result.exit_code, seen) == (2, {})
    assert "(from the environment: LLAMA_ARG_CTX_SIZE)" in result.stderr
    assert value in result.stderr


# generate and chat


@pytest.mark.parametrize("verb", ["generate", "chat"])
@pytest.mark.parametrize("line", [each for row in OF_CLI.strip().splitlines() for each in row.split(";")])
def test_what_users_of_llama_cli_type(
    seen: dict[str, Any], verb: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    result = run(verb, "-m", "a.gguf", *line.split())
    name = line.split()[0]
    assert result.exit_code in (0, 2)
    assert "No such option" not in result.stderr
    assert (name in result.stderr) == (result.exit_code == 2 or option_of(name).effect != "taken")
    assert bool(seen) == (result.exit_code == 0)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("generate -cnv", "-cnv is not taken here: `pykvgraph chat` talks"),
        ("generate --port 8", "--port: `pykvgraph generate` has no such option; `pykvgraph serve` takes it"),
        ("chat -p hello", "-p: `pykvgraph chat` has no such option; `pykvgraph generate` takes it"),
        ("chat -st", "-st is not taken here: for one answer, send one message through a pipe"),
        ("serve -sysf x", "-sysf is not taken here: `pykvgraph chat` takes the text itself"),
        ("generate -sp", "-sp: `pykvgraph generate` has no such option; `pykvgraph serve` takes it"),
    ],
)
def test_an_option_of_another_verb(seen: dict[str, Any], words: str, told: str) -> None:
    result = run(*words.split())
    assert (result.exit_code, seen) == (2, {})
    assert told in result.stderr


@pytest.mark.parametrize(
    "words", ["generate -no-cnv", "generate -st", "chat -cnv", "chat -i", "chat --simple-io"]
)
def test_what_a_verb_does_anyway(seen: dict[str, Any], words: str) -> None:
    result = run(*words.split(), "-m", "a.gguf", "--no-perf", "-fa", "on", "-lv", "1")
    assert result.exit_code == 0
    assert f"{words.split()[1]} has no effect here: " in result.stderr
    assert (seen["flash_attn"], seen["verbosity"]) == ("on", 1)


# docs


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("page", ROOT / "tools" / "llama_options_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_table(tool: ModuleType) -> None:
    """`python tools/llama_options_page.py` is forgotten easily."""
    page = tool.PAGE.read_text(encoding="utf-8")
    assert tool.written(page) == page
    assert "in `generate` these have no effect: `-no-cnv`" in page
    assert "in `chat` these have no effect: `-cnv`" in page
    assert all(f"`{name}`" in page for listed in LISTED for name in listed.names)
