"""Which rows of the table have the tensors that a file has."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import gguf
from gguf_copy import Source

from pykvgraph.model.architectures import architectures

MODEL = Path(__file__).resolve().parent.parent / "native" / "src" / "model"
MOST = 3
SCALES = (".scale", ".input_scale")


@dataclass(frozen=True)
class Row:
    """likeness: tensors of both, as a share of those of either. beyond: those of the file alone."""

    arch: str
    likeness: float
    place: str
    beyond: list[str]
    missing: list[str]


def nearest_rows(source: Source) -> list[Row]:
    """The most alike first; the gguf package knows what files of each architecture may have."""
    mine = _kinds(re.sub(r"^blk\.\d+\.", "blk.N.", name) for name in source.names)
    rows = []
    for row in architectures():
        theirs = _names(row.name)
        if theirs:
            likeness = len(mine & theirs) / len(mine | theirs)
            missing = sorted(theirs - mine - {"rope_freqs", "output"})
            rows.append(Row(row.name, likeness, row_of(row.name), sorted(mine - theirs), missing))
    return sorted(rows, key=lambda row: row.likeness, reverse=True)[:MOST]


def row_of(arch: str) -> str:
    """File and line."""
    for path in sorted(MODEL.glob("recipes_*.cpp")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if f'"{arch}"' in line:
                return f"native/src/model/{path.name}:{number}"
    return "native/src/model"


def _names(arch: str) -> set[str]:
    """Without those of layers that only predict further tokens: no row runs them."""
    kinds = [kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch]
    names = (
        gguf.TENSOR_NAMES[tensor].replace("{bid}", "N")
        for kind in kinds
        for tensor in gguf.MODEL_TENSORS[kind]
    )
    return _kinds(name for name in names if ".nextn." not in name)


def _kinds(names: Iterable[str]) -> set[str]:
    """A matrix and its bias are one kind; so is a bias without a matrix. Q, K and V in one are three."""
    found = {
        name.removesuffix(".weight").removesuffix(".bias") for name in names if not name.endswith(SCALES)
    }
    fused = {name for name in found if name.endswith(".attn_qkv")}
    return found - fused | {name[: -len("qkv")] + part for name in fused for part in "qkv"}
