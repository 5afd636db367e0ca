"""`--lora` and `--lora-scaled` of each verb, and `lora_path` of Llama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from support.adapters import write_adapter

import pykvgraph as kvg
from pykvgraph.cli import main
from pykvgraph.cli.adapters import Adapters, adapter_options

STORIES = Path(__file__).parents[2] / "data" / "stories260K.gguf"
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapters") / "a.gguf", STORIES, alpha=4.0)


def told(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, [arguments[0], "-m", str(STORIES), "-dev", "none", *arguments[1:]])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def expected(adapter: Path, scale: float, n: int = 8) -> list[int]:
    """By Context itself."""
    with kvg.Model(STORIES, device="cpu") as model:
        pairs = [(model.load_adapter(adapter), scale)]
        with kvg.Context(model, n_ctx=64, adapters=pairs) as ctx:
            return [piece.token for piece in kvg.generate(ctx, PROMPT, max_tokens=n)]


def test_generate(adapter: Path) -> None:
    common = ("generate", "-p", PROMPT, "-n", "8", "--json")
    assert told(*common, "--lora", str(adapter))["tokens"] == expected(adapter, 1.0)
    assert told(*common, "--lora-scaled", f"{adapter}:0.5")["tokens"] == expected(adapter, 0.5)
    assert expected(adapter, 1.0) != expected(adapter, 0.5) != expected(adapter, 0.0)


def test_batch(adapter: Path, tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts", tmp_path / "answers"
    prompts.write_text(json.dumps({"prompt": PROMPT, "max_tokens": 8}) + "\n")
    told("batch", "-f", str(prompts), "-o", str(answers), "-c", "256", "--lora", str(adapter), "--json")
    text = json.loads(answers.read_text())["text"]
    with kvg.Model(STORIES, device="cpu") as model:
        assert text == model.tokenizer.decode(expected(adapter, 1.0))
    # answers under other adapters are another model's
    command = [
        "batch",
        "-m",
        str(STORIES),
        "-dev",
        "none",
        "-f",
        str(prompts),
        "-o",
        str(answers),
        "-c",
        "256",
    ]
    assert CliRunner().invoke(main, command).exit_code == 1


def test_bench(adapter: Path) -> None:
    result = CliRunner().invoke(
        main,
        [
            "bench",
            "-m",
            str(STORIES),
            "-dev",
            "none",
            "-p",
            "8",
            "-n",
            "4",
            "-r",
            "1",
            "--lora",
            str(adapter),
        ],
    )
    assert result.exit_code == 0, result.output
    refused = CliRunner().invoke(
        main, ["bench", "-m", str(STORIES), "--vs", "libllama", "--lora", str(adapter)]
    )
    assert refused.exit_code == 1 and "--lora" in refused.output


def test_llama(adapter: Path) -> None:
    llm = kvg.Llama(str(STORIES), n_gpu_layers=0, lora_path=str(adapter), lora_scale=0.5)
    ids = llm.tokenize(PROMPT.encode())
    said = []
    for token in llm.generate(ids, temp=0.0):
        said.append(token)
        if len(said) == 8:
            break
    assert said == expected(adapter, 0.5)
    with pytest.raises(FileNotFoundError):
        kvg.Llama(str(STORIES), n_gpu_layers=0, lora_path=str(adapter.parent / "none.gguf"))


@click.command()
@adapter_options
def show(adapters: Adapters) -> None:
    click.echo(json.dumps(adapters.given))


def parsed(*arguments: str, **env: str) -> Any:
    result = CliRunner().invoke(show, arguments, env=env)
    return json.loads(result.stdout) if result.exit_code == 0 else result.output


def test_lists() -> None:
    assert parsed() == []
    assert parsed("--lora", "a,b", "--lora", '"c,d",e') == [["a", 1], ["b", 1], ["c,d", 1], ["e", 1]]
    assert parsed("--lora", '"a\nb",c') == [["a\nb", 1], ["c", 1]]
    for wrong in ("a\nb", "a\rb", "a\n"):
        assert "line break" in parsed("--lora", wrong)
    assert parsed("--lora-scaled", "a:0.5,b:x:-2", "--lora", "c") == [["c", 1], ["a", 0.5], ["b:x", -2]]
    assert parsed(KVGRAPH_LORA="a b,c") == [["a b", 1], ["c", 1]]
    for wrong in ("a", "a:", ":1", "a:b", "a:nan", "a:1.1e6", "a:1,b", ""):
        assert "FILE:SCALE" in parsed("--lora-scaled", wrong)
    assert "empty" in parsed("--lora", "a,,b")
