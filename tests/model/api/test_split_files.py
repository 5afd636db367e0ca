"""A model in several files is the same model: logits, tokenizer, saved states, memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.engines import prompt_then_singles, random_ids
from support.judge import judge
from support.models import N_VOCAB, SMALL, ModelSpec, WeightType, write_model, write_split

import pykvgraph as kvg

ModelFile = Callable[[ModelSpec], Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_split(SMALL, tmp_path_factory.mktemp("split"))


@pytest.mark.parametrize("weights", [WeightType.F32, WeightType.Q8_0])
@pytest.mark.parametrize("most_tensors", [1, 20])
def test_logits_are_libllamas(tmp_path: Path, weights: WeightType, most_tensors: int) -> None:
    """Weights that are mapped, and laid out anew; one tensor a file, and nearly all in one."""
    paths = write_split(replace(SMALL, weights=weights), tmp_path, most_tensors)
    ids = random_ids(30, N_VOCAB)
    assert len(paths) == {1: 21, 20: 2}[most_tensors]
    judge(paths[0], lambda engine: prompt_then_singles(engine, ids, 20), attentions=("auto",))


def test_what_the_files_have(files: list[Path], model_file: ModelFile) -> None:
    with kvg.GgufFile(files[0]) as split, kvg.GgufFile(model_file(SMALL)) as whole:
        assert split.parts == tuple((path, path.stat().st_size) for path in files)
        assert len(whole.parts) == 1
        assert [tensor.name for tensor in split.tensors] == [tensor.name for tensor in whole.tensors]
        assert [tensor.part for tensor in split.tensors] == [index // 5 for index in range(21)]
        assert {tensor.part for tensor in whole.tensors} == {0}
        assert split.model_info() == whole.model_info()
        assert split.metadata["split.count"] == 5


def test_a_text_and_its_state(files: list[Path], model_file: ModelFile) -> None:
    """What a split model saved, the same model in one file goes on with; another model's part is noticed."""
    with kvg.Model(files[0], device="cpu") as split, kvg.Model(model_file(SMALL), device="cpu") as whole:
        assert split.tokenizer.encode("the cat") == whole.tokenizer.encode("the cat")
        first, second = kvg.Context(split, n_ctx=64), kvg.Context(whole, n_ctx=64)
        pieces = [piece.token for piece in kvg.generate(first, "the cat", max_tokens=5)]
        second.kv.load(first.kv.save(seq=0), seq=0)
        assert second.kv.pending_token(0) == pieces[-1]
        assert [piece.token for piece in kvg.generate(second, "", max_tokens=3)] == [
            piece.token for piece in kvg.generate(first, "", max_tokens=3)
        ]


def test_a_state_knows_every_part(files: list[Path], tmp_path: Path) -> None:
    """The last file has nothing but the output's weights."""
    copies = [tmp_path / path.name for path in files]
    for path, copy in zip(files, copies, strict=True):
        copy.write_bytes(path.read_bytes())
    data = bytearray(copies[-1].read_bytes())
    data[-1] ^= 1
    copies[-1].write_bytes(data)
    with kvg.Model(files[0], device="cpu") as model, kvg.Model(copies[0], device="cpu") as other:
        ctx = kvg.Context(model, n_ctx=16)
        batch = kvg.Batch()
        batch.extend([1, 2, 3], 0)
        ctx.decode(batch)
        with pytest.raises(kvg.StateError, match="another model"):
            kvg.Context(other, n_ctx=16).kv.load(ctx.kv.save(seq=0), seq=0)


def test_memory_is_planned_for_all_parts(files: list[Path], model_file: ModelFile) -> None:
    split, whole = (kvg.plan_memory(path, device="cpu") for path in (files[0], model_file(SMALL)))
    assert split == whole


@pytest.mark.parametrize("most_tensors", [1, 20])
def test_stages(tmp_path: Path, most_tensors: int) -> None:
    """Each maps the files, or their parts, that have its layers."""
    path = write_split(SMALL, tmp_path, most_tensors)[0]
    batch = kvg.Batch()
    batch.extend([1, 2, 3], 0)
    with (
        kvg.Model(path, device="cpu") as whole,
        kvg.Model(path, device="cpu", layers=range(1)) as first,
        kvg.Model(path, device="cpu", layers=range(1, 2)) as last,
    ):
        contexts = [kvg.Context(model, n_ctx=16) for model in (whole, first, last)]
        contexts[0].decode(batch)
        contexts[1].decode(batch)
        contexts[2].decode(batch, hidden=contexts[1].embeddings())
        assert np.array_equal(contexts[2].logits(), contexts[0].logits())


def test_links_into_a_store(files: list[Path], tmp_path: Path) -> None:
    """As download caches lay them out: the names are links, the files are called otherwise."""
    for index, path in enumerate(files):
        stored = tmp_path / f"blob{index}"
        stored.write_bytes(path.read_bytes())
        (tmp_path / path.name).symlink_to(stored)
    with kvg.Model(tmp_path / files[0].name, device="cpu") as model:
        assert model.n_layer == SMALL.n_layer
        assert model.tokenizer.n_vocab == N_VOCAB


def test_a_relative_path(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files[0].parent)
    with kvg.GgufFile(files[0].name) as file:
        assert file.parts[1][0] == files[1]


def test_the_files_may_go_once_they_are_open(tmp_path: Path) -> None:
    paths = write_split(SMALL, tmp_path)
    with kvg.Model(paths[0], device="cpu") as model:
        for path in paths:
            os.unlink(path)
        assert model.tokenizer.decode(model.tokenizer.encode("the cat")) == "the cat"
        batch = kvg.Batch()
        batch.extend([1, 2, 3], 0)
        kvg.Context(model, n_ctx=16).decode(batch)


def test_one_part_is_a_whole_model(tmp_path: Path) -> None:
    """As a splitter writes a model that fits one file; its name may be any."""
    paths = write_split(SMALL, tmp_path, 100)
    path = paths[0] if paths else write_model(SMALL, tmp_path)
    os.rename(path, tmp_path / "model.gguf")
    with kvg.GgufFile(tmp_path / "model.gguf") as file:
        assert len(file.parts) == 1
