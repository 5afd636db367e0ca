"""kv_overrides: values of metadata keys in place of a file's, for our own reader and for libllama's alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from support.engines import decode, open_context, random_ids, run_of
from support.gguf_parts import take_apart
from support.models import N_VOCAB, SMALL, TINY, ModelSpec
from support.mutations import ODD_INTEGERS

import pykvgraph as kvg
from pykvgraph.cli.where import Where, where_options
from pykvgraph.model.tokenizer import Tokenizer
from pykvgraph.prefix import block

ModelFile = Callable[[ModelSpec], Path]
TOKENS = run_of(random_ids(20, N_VOCAB))
BASE = "llama.rope.freq_base"
BOS = "tokenizer.ggml.add_bos_token"


def logits(path: Path, **overrides: Any) -> np.ndarray:
    with (
        kvg.Model(path, device="cpu", kv_overrides=overrides or None) as model,
        open_context(model, n_ctx=64) as ctx,
    ):
        return decode(ctx, TOKENS)


def test_a_number_is_as_in_a_file_that_says_so(model_file: ModelFile) -> None:
    plain, other = model_file(SMALL), model_file(replace(SMALL, rope_base=500000.0))
    assert np.array_equal(logits(plain, **{BASE: 500000.0}), logits(other))
    assert np.array_equal(logits(other, **{BASE: 10000.0}), logits(plain))
    assert not np.array_equal(logits(plain), logits(other))


def test_a_key_that_the_file_has_not(model_file: ModelFile, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    parts = take_apart(model_file(SMALL).read_bytes())
    parts.keys = [key for key in parts.keys if key.name != b"llama.attention.layer_norm_rms_epsilon"]
    parts.raw().write(path)
    with pytest.raises(kvg.ModelLoadError, match="layer_norm_rms_epsilon"):
        kvg.Model(path, device="cpu")
    given: dict[str, bool | int | float | str] = {
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "of.mine": "text",
        "of.my.own": 3,
    }
    with kvg.Model(path, device="cpu", kv_overrides=given) as model:
        assert (model.metadata["of.mine"], model.metadata["of.my.own"]) == ("text", 3)
        assert model.kv_overrides == given


def test_the_tokenizer_hears_of_it(stories: Path) -> None:
    """libllama's own: the ids are the same without BOS, and it ends where it is told to."""
    with kvg.Model(stories, device="cpu") as plain:
        ids = plain.tokenizer.encode("Once upon a time")
        assert ids[0] == plain.tokenizer.bos and plain.tokenizer.eos == 2
    overrides: dict[str, bool | int | float | str] = {BOS: False, "tokenizer.ggml.eos_token_id": 5}
    with kvg.Model(stories, device="cpu", kv_overrides=overrides) as model:
        assert model.tokenizer.encode("Once upon a time") == ids[1:]
        assert model.tokenizer.eos == 5 and model.tokenizer.is_eog(5)
    assert Tokenizer.from_file(stories, kv_overrides=overrides).encode("Once") == ids[1:2]
    llm = kvg.Llama(str(stories), n_gpu_layers=0, kv_overrides=overrides)
    assert llm.token_eos() == 5


def test_cells_belong_to_overrides(model_file: ModelFile) -> None:
    path = model_file(SMALL)
    with (
        kvg.Model(path, device="cpu") as plain,
        kvg.Model(path, device="cpu", kv_overrides={BASE: 20000.0}) as model,
        kvg.Model(path, device="cpu", kv_overrides={BASE: 20000.0}) as same,
    ):
        keys = []
        with open_context(model, n_ctx=64) as ctx:
            decode(ctx, TOKENS)
            state = ctx.kv.save(0)
            keys.append(block.root_key(ctx))
        with open_context(same, n_ctx=64) as ctx:
            ctx.kv.load(state, 0)
            keys.append(block.root_key(ctx))
        with open_context(plain, n_ctx=64) as ctx:
            keys.append(block.root_key(ctx))
            with pytest.raises(kvg.StateError, match="model"):
                ctx.kv.load(state, 0)
        assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    "overrides",
    [
        3,
        {3: 4},
        {"": 1},
        {"a\0b": 1},
        {"a" * 128: 1},
        {"of.mine": "x" * 128},
        {"of.mine": "\ud800"},
        {"of.mine": None},
        {"of.mine": float("nan")},
        {"of.mine": 2**63},
        {"general.alignment": 64},
        {"split.count": 3},
        {BASE: 10000},  # a float in the file
        {"llama.block_count": 2.0},
        {"llama.block_count": True},
        {"general.architecture": 1},
        {"tokenizer.ggml.tokens": "a"},  # an array
    ],
    ids=str,
)
def test_what_is_wrong_is_refused(model_file: ModelFile, overrides: Any) -> None:
    with pytest.raises(kvg.InvalidArgumentError):
        kvg.Model(model_file(SMALL), device="cpu", kv_overrides=overrides)


def test_what_cannot_be_run_is_refused(model_file: ModelFile) -> None:
    cases: list[tuple[str, Any, type[Exception]]] = [
        ("general.architecture", "of tomorrow", kvg.UnsupportedError),
        ("llama.block_count", 3, kvg.ModelLoadError),
        ("llama.embedding_length", 2**40, kvg.ModelLoadError),
        ("llama.block_count", -1, kvg.ModelLoadError),
        (BASE, -1.0, kvg.ModelLoadError),
    ]
    for key, value, error in cases:
        with pytest.raises(error):
            kvg.Model(model_file(SMALL), device="cpu", kv_overrides={key: value})


def test_odd_numbers_end_no_process(model_file: ModelFile) -> None:
    """Each integer of the file, as each odd one."""
    path, n_fine, n_refused = model_file(TINY), 0, 0
    with kvg.Model(path, device="cpu") as model:
        keys = [key for key, value in model.metadata.items() if type(value) is int and "align" not in key]
    assert len(keys) >= 8
    for key in keys:
        for value in (number for number in ODD_INTEGERS if -(2**63) <= number < 2**63):
            try:
                with (
                    kvg.Model(path, device="cpu", kv_overrides={key: value}) as model,
                    open_context(model, n_ctx=16) as ctx,
                ):
                    model.tokenizer.decode(model.tokenizer.encode("a b"))
                    ctx.append(1)
                n_fine += 1
            except kvg.KVGraphError:
                n_refused += 1
    assert n_fine >= 10 and n_refused >= 10


def test_plans_hear_of_it(model_file: ModelFile) -> None:
    path = model_file(SMALL)
    assert kvg.plan_memory(path, "cpu", n_ctx=64, kv_overrides={BASE: 1e6})
    with pytest.raises(kvg.ModelLoadError):
        kvg.plan_memory(path, "cpu", n_ctx=64, kv_overrides={"llama.block_count": 3})
    overrides = {"llama.context_length": 96}
    with (
        kvg.Model(path, device="cpu", kv_overrides=overrides) as model,
        open_context(model, n_ctx="auto") as ctx,
    ):
        assert ctx.n_ctx == model.n_ctx_train == 96


@click.command()
@where_options
def show(where: Where) -> None:
    click.echo(json.dumps(where.kv_overrides))


def parsed(*arguments: str, **env: str) -> Any:
    result = CliRunner().invoke(show, arguments, env=env)
    return json.loads(result.stdout) if result.exit_code == 0 else result.output


def test_the_command_line() -> None:
    assert parsed() == {}
    text = 'a=int:-3,b=float:1e3,c=bool:true,d=str:x:y,"e=str:1,2"'
    expected = {"a": -3, "b": 1000.0, "c": True, "d": "x:y", "e": "1,2"}
    assert parsed("--override-kv", text) == expected == parsed(KVGRAPH_OVERRIDE_KV=text)
    assert parsed("--override-kv", "a=int:1", "--override-kv", "a=int:2") == {"a": 2}
    none = ("a", "a=1", "=int:1", "a=int:x", "a=int:1.5", "a=int:", "a=bool:1", "a=float:x", "a=u8:1", "")
    for wrong in none:
        assert "Invalid value for '--override-kv'" in parsed("--override-kv", wrong)
