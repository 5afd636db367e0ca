"""`pykvgraph inspect`: the recipe in words, and what keeps a file from running or from speaking."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.architectures import ArchSpec
from support.gguf_bytes import FLOAT32, STRING, UINT32
from support.gguf_parts import Parts, Tensor, take_apart
from support.hostile import byte_level
from support.models import SMALL, TINY, TWO_GROUPS, ModelSpec, write_split

import pykvgraph as kvg
from pykvgraph.cli import main
from pykvgraph.model.architectures import architectures, figure_text

ModelFile = Callable[[ModelSpec], Path]


def inspect(path: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["inspect", str(path), *options], env={"COLUMNS": "80"})


def words(path: Path) -> list[str]:
    """What is told before the tables, one blank between words."""
    result = inspect(path)
    assert result.exit_code == 0
    head = result.stdout[: result.stdout.index("\n\n")].splitlines()
    assert max(map(len, head[1:])) <= 80
    return [" ".join(line.split()) for line in head]


def test_a_recipe_in_words(model_file: ModelFile) -> None:
    path = model_file(replace(SMALL, rope_scale=4.0, rope_factors=True))
    assert words(path)[1:] == [
        "runs as llama:",
        "layers 2 of width 64",
        "heads 4 of 16, on 2 of K and V, each for 2",
        "cells group 0: every position, all layers",
        "rope 16 of 16 dimensions, base 10,000, scaled: linear by 4, a factor",
        "for each frequency",
        "vocabulary 288 tokens",
        "trained for 4,096 positions",
        "weights 110,920 in 433.3 KiB: 22 f32",
        "speaks SentencePiece (llama) of 288 tokens",
    ]


def test_layers_that_differ(model_file: ModelFile) -> None:
    told = words(model_file(TWO_GROUPS))
    assert "heads layers 0, 2: 4 of 16, on 2 of K and V, each for 2; layer 1: 4 of" in told
    assert "cells group 0: every position, layers 0, 2" in told
    assert "cells group 1: every position, layer 1" in told


def test_layers_that_read_the_k_and_v_of_others(architecture: Callable[[ArchSpec], Path]) -> None:
    path = architecture(ArchSpec("gemma4", n_layer=6, window=24, head_dim_window=64, n_shared=4))
    told = words(path)
    assert "cells group 0: every position, layer 1" in told
    assert "cells group 1: a window of 24 positions, layer 0" in told
    assert "K and V layers 2, 4: those of layer 0" in told
    assert "K and V layers 3, 5: those of layer 1" in told
    assert [layer["kv_from"] for layer in json.loads(inspect(path, "--json").stdout)["layers"]] == [
        *(0, 1, 0, 1, 0, 1)
    ]
    with kvg.Model(path, device="cpu") as model:
        assert [layer.kv_from for layer in model.layers] == [0, 1, 0, 1, 0, 1]


def test_a_split_model(tmp_path: Path) -> None:
    paths = write_split(SMALL, tmp_path)
    size = sum(path.stat().st_size for path in paths)
    assert words(paths[0])[0].endswith(f"{size / 1024:.1f} KiB in 5 files, 21 keys, 21 tensors")
    report = json.loads(inspect(paths[0], "--json").stdout)
    assert report["parts"] == [str(path) for path in paths]
    assert report["size"] == size
    assert {tensor["part"] for tensor in report["tensors"]} == {0, 1, 2, 3, 4}
    later = inspect(paths[2])
    assert later.exit_code == 1
    assert "open the first" in later.stderr


def without(name: str) -> Callable[[Parts], object]:
    def change(parts: Parts) -> None:
        parts.keys = [key for key in parts.keys if key.name != name.encode()]

    return change


def key(name: str, kind: int, value: Any) -> Callable[[Parts], object]:
    return lambda parts: parts.set(name, kind, value)


SILENT = {
    "no kind": (without("tokenizer.ggml.model"), "has no tokenizer (tokenizer.ggml.model is missing)"),
    "none": (key("tokenizer.ggml.model", STRING, b"none"), "has no tokenizer"),
    "an unknown kind": (key("tokenizer.ggml.model", STRING, b"of tomorrow"), "is 'of tomorrow'"),
    "no merges": (without("tokenizer.ggml.merges"), "tokenizer.ggml.merges' is missing"),
    "an unknown pre-tokenizer": (key("tokenizer.ggml.pre", STRING, b"of tomorrow"), "'of tomorrow'"),
}
STILL = {
    "no recipe": (key("general.architecture", STRING, b"rwkv6"), "'rwkv6' has no recipe"),
    "an unknown tensor": (
        lambda parts: parts.tensors.append(Tensor(b"blk.0.odd", [4], 0, bytes(16))),
        "tensor 'blk.0.odd' is not part of the recipe",
    ),
    "an unknown scaling": (key("llama.rope.scaling.type", STRING, b"of tomorrow"), "scaling 'of tomorrow'"),
    "a missing key": (without("llama.context_length"), "context_length"),
    "a number that can't be": (key("llama.rope.freq_base", FLOAT32, -1.0), "freq_base"),
    "too many heads": (key("llama.attention.head_count_kv", UINT32, 3), "heads"),
}


@pytest.mark.parametrize(("change", "reason"), SILENT.values(), ids=SILENT.keys())
def test_what_keeps_a_file_from_speaking(
    model_file: ModelFile, tmp_path: Path, change: Callable[[Parts], object], reason: str
) -> None:
    told, report = _changed(model_file, tmp_path, change)
    assert "runs as llama:" in told
    assert "does not speak: " in told
    assert reason in told
    assert reason in report["tokenizer_reason"]
    assert report["tokenizer"] is None
    assert report["reason"] is None


@pytest.mark.parametrize(("change", "reason"), STILL.values(), ids=STILL.keys())
def test_what_keeps_a_file_from_running(
    model_file: ModelFile, tmp_path: Path, change: Callable[[Parts], object], reason: str
) -> None:
    told, report = _changed(model_file, tmp_path, change)
    assert "does not run: " in told
    assert reason in told
    assert reason in report["reason"]
    assert "speaks byte-level BPE (gpt2) of 288 tokens, texts split as gpt-2 does" in told
    assert report["recipe"] is None
    assert report["layers"] == []


def _changed(model_file: ModelFile, folder: Path, change: Callable[[Parts], object]) -> tuple[str, Any]:
    """What is told of a byte-level model that was changed, in one line and as JSON."""
    parts = byte_level(take_apart(model_file(TINY).read_bytes()))
    change(parts)
    parts.raw().write(folder / "model.gguf")
    shown, as_json = inspect(folder / "model.gguf"), inspect(folder / "model.gguf", "--json")
    assert (shown.exit_code, as_json.exit_code) == (1, 1)
    head = shown.stdout[: shown.stdout.index("\n\n")]
    assert max(map(len, head.splitlines()[1:])) <= 80
    assert str(folder) not in "".join(head.splitlines()[1:])
    return " ".join(head.split()), json.loads(as_json.stdout)


def test_the_list_fits_a_terminal() -> None:
    """No figure is cut in 80 columns."""
    result = CliRunner().invoke(main, ["inspect", "--list"], env={"COLUMNS": "80"})
    rows = {row.split()[0]: row.split() for row in result.stdout.splitlines() if len(row.split()) > 4}
    for each in architectures():
        known = [figure for figure in (each.exact, each.worst, each.own, each.edited) if figure is not None]
        shown = [str(each.files), *map(figure_text, known)]
        assert rows[each.name][1 : 1 + len(shown)] == shown
    refused = CliRunner().invoke(main, ["inspect", "--list", "model.gguf"])
    assert refused.exit_code == 2 and "--list" in refused.output
