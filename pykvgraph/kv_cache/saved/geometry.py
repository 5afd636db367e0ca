"""What a saved row fits: another model, another cache type or another shape is another geometry."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pykvgraph._native.ffi import KvgGroupKind, KvgType
from pykvgraph.errors import StateError
from pykvgraph.model.gguf_file import fingerprint_under

HADAMARD = 256  # added to a type whose rows are kept times a Hadamard matrix
LONG_ROPE = 512  # added to K's type when K was rotated with LongRoPE's factors for long contexts


@dataclass(frozen=True)
class GroupGeometry:
    """Rows of one group of cells."""

    kind: int  # KvgGroupKind
    window: int  # 0 where there is none
    layers: tuple[int, ...]
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    type_k: int  # KvgType, with HADAMARD and LONG_ROPE where they apply
    type_v: int
    cell_bytes: int  # K and V of all of its layers

    @property
    def n_layer(self) -> int:
        """How many layers the group has."""
        return len(self.layers)


@dataclass(frozen=True)
class Geometry:
    """Of all groups."""

    model: bytes  # its fingerprint, 16 bytes
    groups: tuple[GroupGeometry, ...]
    state_bytes: int = 0  # of a row of recurrent states; not among what MODL says


def under(geometry: Geometry, adapters: bytes) -> Geometry:
    """The geometry of cells that were decoded under adapters with this key; b"": none, and it is the same."""
    return replace(geometry, model=fingerprint_under(geometry.model, adapters)) if adapters else geometry


_NUMBERS = ("n_head_kv", "head_dim_k", "head_dim_v", "type_k", "type_v", "cell_bytes")
_NAMES = ("kind", "window", "n_layer", "layers", *_NUMBERS)


def check_geometry(saved: Geometry, here: Geometry) -> None:
    """Raises StateError, which names the difference, unless both are the same."""
    check_model(saved.model, here)
    check_number("the number of groups", len(saved.groups), len(here.groups))
    for index, (theirs, ours) in enumerate(zip(saved.groups, here.groups, strict=True)):
        where = f" in group {index}" if index else ""
        for name in _NAMES:
            check_number(name, getattr(theirs, name), getattr(ours, name), where)


def check_model(saved: bytes, here: Geometry) -> None:
    """Raises StateError unless the fingerprint is the model's."""
    if saved != here.model:
        raise StateError(
            "the state was saved from another model, or under other adapters: K and V mean nothing here"
        )


def check_number(name: str, theirs: object, ours: object, where: str = "") -> None:
    """Raises StateError unless both are equal."""
    if theirs == ours:
        return
    if name.startswith("type_"):
        theirs, ours = _type_name(theirs), _type_name(ours)
    elif name == "kind":
        theirs, ours = _kind_name(theirs), _kind_name(ours)
    raise StateError(
        f"the state was saved from a cache with {name} = {theirs}{where}; this one has {ours}: open the "
        "context as that one was"
    )


def _kind_name(kind: object) -> str:
    known = next((known for known in KvgGroupKind if known == kind), None)
    return known.name.removeprefix("KVG_GROUP_").lower() if known is not None else f"{kind} (unknown here)"


def _type_name(kind: object) -> str:
    assert isinstance(kind, int)
    known = next((known for known in KvgType if known == kind % HADAMARD), None)
    if known is None or kind >= 2 * LONG_ROPE:
        return f"{kind}, which is unknown here"
    name = known.name.removeprefix("KVG_TYPE_").lower()
    name += " with hadamard" if kind & HADAMARD else ""
    return f"{name}, rotated for a context longer than the original one" if kind & LONG_ROPE else name
