"""What calls return: frozen records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class DeviceInfo:
    """A device that ggml can compute on."""

    name: str  # as `Model(device=...)` takes it
    description: str
    type: Literal["cpu", "gpu", "accel"]
    memory_free: int  # bytes; 0 when the device doesn't tell
    memory_total: int


@dataclass(frozen=True)
class DevicePart:
    """What a context and its model have on one device."""

    device: str
    n_layer: int  # whose weights are there, the output not counted
    n_cache: int  # whose cells are there
    weight_bytes: int  # what is mapped from the file included
    cache_bytes: int
    compute_bytes: int
    attention: str  # "flash", "plain", "attend" (the CPU kernel of this library); "" without cells
    shift_on_device: bool  # else the CPU rotates K for it; True without cells
    fallbacks: tuple[str, ...]  # operations of its layers that the CPU does


class Scores(NamedTuple):
    """What a softmax of each output row's logits says."""

    best: npt.NDArray[np.int32]  # (n_outputs,): the likeliest token, the lowest id among equals
    best_logprob: npt.NDArray[np.float32]  # (n_outputs,): the logarithm of its probability
    log_sum: npt.NDArray[np.float32]  # (n_outputs,): a token's log probability is its logit less this


@dataclass(frozen=True)
class Abilities:
    """What a device can do for a model, with the cache of one type on it."""

    cache_type: str
    attention: str  # as in DevicePart; "" when it can't run the model
    shift_on_device: bool  # else the CPU rotates K for it
    can_defrag: bool
    fallbacks: tuple[str, ...]  # operations of a decode that the CPU does
    refused: str  # why it can't run the model; ""


@dataclass(frozen=True)
class LibraryInfo:
    """The native code of this process."""

    version: str
    path: Path
    ggml_version_built: str  # what libkvgraph was compiled against
    ggml_version_running: str
    ggml_paths: tuple[Path, ...]


@dataclass(frozen=True)
class ModelInfo:
    """What the graphs need to know of a model."""

    arch: str
    device: str  # "" for a file that isn't loaded
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx_train: int
    n_params: int
    weight_bytes: int


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a GGUF file."""

    name: str
    type: str  # ggml's name: "f32", "q4_K", ...
    shape: tuple[int, ...]  # elements per dimension, innermost first, as ggml counts
    offset: int  # bytes from the start of the file
    size: int  # bytes


@dataclass(frozen=True)
class UpdateStats:
    """What an update did to K and V. As a string: "0 cells shifted, 254 waiting, 254 moved, 0.3 ms".

    shifted_cells: whose K was rotated; waiting_cells: whose K-shift is still pending, as attention turns the
    queries for them instead (KVCache.update); moved_cells, moved_bytes: by defrag; graphs: ggml's that ran.
    """

    shifted_cells: int  # cells whose K was rotated
    waiting_cells: int  # whose K-shift is pending: attention turns the queries (KVCache.update)
    moved_cells: int
    moved_bytes: int  # K and V of the moved cells, all layers
    graphs: int  # ggml graphs that were run
    seconds: float

    def __str__(self) -> str:
        waiting = f", {self.waiting_cells} waiting" if self.waiting_cells else ""
        milliseconds = f"{self.seconds * 1000:.1f} ms"
        return f"{self.shifted_cells} cells shifted{waiting}, {self.moved_cells} moved, {milliseconds}"


class SeqBounds(NamedTuple):
    """First and last position and the number of cells of every sequence: arrays by sequence id."""

    pos_min: npt.NDArray[np.int32]  # (n_seq_max,), -1 where a sequence has no cells
    pos_max: npt.NDArray[np.int32]  # (n_seq_max,), -1 where a sequence has no cells
    n_cells: npt.NDArray[np.int32]  # (n_seq_max,)


class SeqCount(NamedTuple):
    """Of a sequence's cells in a range of positions."""

    n_cells: int
    n_shared: int  # that another sequence sees too, or a hold keeps


@dataclass(frozen=True)
class CellGroup:
    """The cells of layers whose window and rows of K and V are alike."""

    kind: Literal["full", "window"]
    layers: tuple[int, ...]
    n_cells: int  # capacity
    window: int  # positions that a token attends to; 0: all
    n_used: int  # cells that are not empty
    n_kv: int  # highest used cell + 1


@dataclass(frozen=True)
class LayerSpec:
    """A layer of a model, as far as it concerns a user."""

    kind: Literal["attention"]
    group: int  # of cells: an index into `KVCache.groups`
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    window: int  # positions that a token attends to; 0: all
    rope: int  # dimensions of each head of K that positions turn; 0: none


class CellsView:
    """A snapshot of the cells; later changes to the cache don't show in it.

    pos: int32 (n_cells,), -1 where empty. seq: bool (n_cells, n_seq_max), which sequences see the cell; made
    when it is first asked for, n_seq_max bytes a cell. shift: int32 (n_cells,), position change since the
    cell's K was last rotated. dither: uint8 (n_cells,), what K carries, by number (docs/state-format.md).
    held: uint32 (n_cells,), how many holds keep the cell.
    """

    def __init__(
        self,
        pos: npt.NDArray[np.int32],
        seq: npt.NDArray[np.bool_] | Callable[[], npt.NDArray[np.bool_]],
        shift: npt.NDArray[np.int32],
        dither: npt.NDArray[np.uint8],
        held: npt.NDArray[np.uint32] | None = None,
    ) -> None:
        self.pos = pos
        self.shift = shift
        self.dither = dither
        self.held = np.zeros(len(pos), np.uint32) if held is None else held
        self._seq = seq

    @property
    def seq(self) -> npt.NDArray[np.bool_]:
        """(n_cells, n_seq_max): which sequences see the cell."""
        if callable(self._seq):
            self._seq = self._seq()
        return self._seq


@dataclass(frozen=True)
class ShiftReport:
    """What one context shift did."""

    seq: int
    n_keep: int
    n_discard: int  # positions that were given up, from n_keep on
    n_past: int  # the sequence's next position, after it
    stats: UpdateStats


@dataclass(frozen=True)
class Piece:
    """What one sampled token adds to the text."""

    text: str  # "" while half a character, or what may become a stop string, waits for the next token
    token: int
    logprob: float  # natural logarithm of the model's own probability, whatever the sampler's temperature
    finish_reason: Literal["stop", "length"] | None  # None before the last piece
