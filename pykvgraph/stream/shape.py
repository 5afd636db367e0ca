"""What the layers of a cache have to send, and what a table says of that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pykvgraph._native.kv import read_group, read_info, read_state_columns
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.kv_cache.saved.geometry import Geometry
from pykvgraph.stream.layout import Layout

T = TypeVar("T")


class RowFormat(NamedTuple):
    """What rows of K or V of a layer are like. group, place: the layer is groups[group].layers[place]."""

    layer: int
    name: str  # "k" or "v"
    group: int
    place: int
    n_bytes: int  # of a cell
    type: int

    @property
    def key(self) -> str:
        """Of a region with rows of it."""
        return f"{self.layer}:{self.name}"


class Shape:
    """What layers a context has to send; read once for a stream.

    geometry: what its cells fit. rows: of each layer that has K and V of its own. columns: of each layer that
    has a state, which numbers of a row of states are its own.
    """

    def __init__(self, context: int, geometry: Geometry) -> None:
        info = read_info(context)
        self.geometry = geometry
        self.n_layer = int(info.n_layer)
        self.state_bytes = int(info.state_bytes)
        self.has_windows_or_states = self.state_bytes > 0 or any(group.window for group in geometry.groups)
        self.room = tuple(int(read_group(context, index).n_cells) for index in range(info.n_groups))
        self.rows: dict[int, tuple[RowFormat, RowFormat]] = {}
        self.columns = read_state_columns(context)
        for index, group in enumerate(geometry.groups):
            sizes = read_group(context, index)
            for place, layer in enumerate(group.layers):
                self.rows[layer] = (
                    RowFormat(layer, "k", index, place, int(sizes.k_row_bytes), group.type_k),
                    RowFormat(layer, "v", index, place, int(sizes.v_row_bytes), group.type_v),
                )

    def columns_of(self, layers: Iterable[int]) -> npt.NDArray[np.intp]:
        """Of the states of these layers."""
        own = [self.columns[layer] for layer in layers if layer in self.columns]
        return np.concatenate(own) if own else np.empty(0, np.intp)

    def places(
        self, layers: Iterable[int], of_groups: Sequence[T]
    ) -> Iterator[tuple[list[int], tuple[RowFormat, RowFormat], T]]:
        """For each group that has any of the layers: their places in it, how its rows are, its item."""
        for index, item in enumerate(of_groups):
            own = [self.rows[layer] for layer in layers if layer in self.rows]
            here = [both for both in own if both[0].group == index]
            if here:
                yield [k.place for k, _ in here], here[0], item

    def of(self, layers: Iterable[int], with_states: bool = True) -> Geometry:
        """What a table of these layers fits: a saved state's geometry, whose cells have no rows."""
        own = frozenset(layers)
        groups = tuple(
            replace(group, layers=tuple(layer for layer in group.layers if layer in own), cell_bytes=0)
            for group in self.geometry.groups
        )
        return replace(self.geometry, groups=groups, state_bytes=4 * len(self.columns_of(own)) * with_states)

    def check(self, layout: Layout, *, whole: bool) -> None:
        """Raises InvalidArgumentError for layers that the model lacks; whole: and for one left out."""
        if unknown := sorted(layout.layers - frozenset(range(self.n_layer))):
            raise InvalidArgumentError(
                f"the layout has layer {unknown[0]}, and the model {self.n_layer} layers"
            )
        needed = self.rows.keys() | self.columns.keys()
        if whole and (missing := sorted(needed - layout.layers)):
            raise InvalidArgumentError(
                f"the layout has no transport for layer {missing[0]}: a sequence needs the rows of all layers"
            )
