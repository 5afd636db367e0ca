"""Plans beside allocations: all outputs, adapters, drafts and embeddings, in three shapes of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import chance
from support.adapters import write_adapter
from support.architectures import ArchSpec
from support.planned import ENCODERS, MODELS, SHAPES, Compared, compare, compare_with_draft

Architecture = Callable[[ArchSpec], Path]
DRAFT = ArchSpec("llama", 2)
KINDS = ("outputs", "adapter", "draft")
CASES = [
    *[(kind, spec, shape) for spec in MODELS for shape in SHAPES for kind in KINDS],
    *[("embeddings", spec, shape) for spec in ENCODERS for shape in SHAPES],
]
TRIED = CASES if chance.THOROUGH else CASES[4::11]  # each kind, each shape


def compared(
    kind: str, spec: ArchSpec, shape: dict[str, Any], architecture: Architecture, folder: Path
) -> Iterator[Compared]:
    path = architecture(spec)
    match kind:
        case "outputs":
            yield from compare(path, "cpu", "f16", **shape, n_outputs_max=shape["n_batch"])
        case "adapter":
            adapter = write_adapter(folder / "adapter.gguf", path)
            yield from compare(path, "cpu", "f16", adapter=adapter, **shape)
        case "draft":
            yield from compare_with_draft(path, architecture(DRAFT), shape)
        case _:
            yield from compare(path, "cpu", "f16", **shape)


@pytest.mark.parametrize(("kind", "spec", "shape"), TRIED, ids=str)
def test_within_two_per_cent_and_never_above(
    architecture: Architecture, tmp_path: Path, kind: str, spec: ArchSpec, shape: dict[str, Any]
) -> None:
    for found in compared(kind, spec, shape, architecture, tmp_path):
        assert found.error <= 0.02, found


def test_a_commit_tries_each_kind_and_shape() -> None:
    assert len(CASES) == 3 * (3 * len(MODELS) + len(ENCODERS))
    assert {kind for kind, _, _ in TRIED} == {*KINDS, "embeddings"}
    assert {str(shape) for _, _, shape in TRIED} == {str(shape) for shape in SHAPES}
