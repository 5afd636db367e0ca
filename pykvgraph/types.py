"""The records that calls return; their fields can't be changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt


class Scores(NamedTuple):
    """The likeliest token of each output, from a softmax over the output's logits."""

    best: npt.NDArray[np.int32]  # (n_outputs,): the likeliest token, the lowest id among equals
    best_logprob: npt.NDArray[np.float32]  # (n_outputs,): the logarithm of its probability
    log_sum: npt.NDArray[np.float32]  # (n_outputs,): log(sum(exp(logits))); log probability = logit - log_sum


@dataclass(frozen=True)
class ModelInfo:
    """The sizes of a model, as Model's attributes of the same names."""

    arch: str
    device: str  # "" when only the file was read
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    n_ctx_train: int
    n_params: int
    weight_bytes: int
    encodes: bool
    n_classes: int = 0
    classifies_by_mean: bool = False
    n_draft_heads: int = 0
    has_draft_head: bool = False
    n_embd_target: int = 0
    kept_on_cpu: tuple[str, ...] = ()


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in a GGUF file."""

    name: str
    type: str  # ggml's name: "f32", "q4_K", ...
    shape: tuple[int, ...]  # elements per dimension, innermost first, as ggml counts
    offset: int  # bytes from the start of its file
    size: int  # bytes
    part: int = 0  # which file of a split model has it, from 0 on; 0 for a whole one


@dataclass(frozen=True)
class UpdateStats:
    """What an update did to K and V. As a string: "0 cells shifted, 254 waiting, 254 moved, 0.3 ms".

    shifted_cells: cells whose K was rotated. waiting_cells: cells whose K-shift is still pending after the
    update, because attention rotates the queries for them (KVCache.update). moved_cells: cells that defrag
    moved. moved_bytes: their K and V in all layers. graphs: ggml graphs that were run. seconds: time taken.
    aged_cells: cells whose K and V went from their fresh type to their old one (type_k="f16:q4_0@1024").
    """

    shifted_cells: int
    waiting_cells: int
    moved_cells: int
    moved_bytes: int
    graphs: int
    seconds: float
    aged_cells: int = 0

    def __str__(self) -> str:
        waiting = f", {self.waiting_cells} waiting" if self.waiting_cells else ""
        milliseconds = f"{self.seconds * 1000:.1f} ms"
        return f"{self.shifted_cells} cells shifted{waiting}, {self.moved_cells} moved, {milliseconds}"


class SeqBounds(NamedTuple):
    """The lowest and highest position and the number of cells of every sequence; the index is its id."""

    pos_min: npt.NDArray[np.int32]  # (n_seq_max,), -1 where a sequence has no cells
    pos_max: npt.NDArray[np.int32]  # (n_seq_max,), -1 where a sequence has no cells
    n_cells: npt.NDArray[np.int32]  # (n_seq_max,)


class SeqCount(NamedTuple):
    """How many cells a sequence sees in a range of positions.

    n_cells: all of them. n_shared: those that another sequence sees too, or a hold keeps.
    """

    n_cells: int
    n_shared: int


@dataclass(frozen=True)
class CellGroup:
    """A group of cells. Layers with equal windows and equal K and V widths share one group.

    The recurrent states of a model are a group, too, the last one. Its cells are rows: the states of all
    layers of one sequence at one place of its text.

    kind: "full": the cells have every position; "window": those that a later position can attend to; "state".
    layers: the layers whose K and V, or states, these are; none where no layer of the model attends: such
    cells only record positions. n_cells: how many cells there are. window: how
    many positions a token attends to; 0: all. n_used: cells that are not empty. n_kv: highest used cell + 1.
    cell_bytes: bytes of one cell in all layers. n_fresh: where rows age (type_k="f16:q4_0@1024"), cells
    before this one have rows of the fresh types, which cell_bytes is about, and the others have rows of the
    old ones, old_cell_bytes; 0: all cells are alike.
    """

    kind: Literal["full", "window", "state"]
    layers: tuple[int, ...]
    n_cells: int
    window: int
    n_used: int
    n_kv: int
    cell_bytes: int
    n_fresh: int = 0
    old_cell_bytes: int = 0


@dataclass(frozen=True)
class LayerSpec:
    """One layer of a model: its heads, its window, its positions.

    kind: what the layer takes from earlier tokens by: "attention", a state that recurs ("short_conv",
    "delta_net" or "mamba2"), both ("attention, mamba2"), or nothing (""). group: the layer's group of cells,
    an index into `KVCache.groups`, -1 where it doesn't attend, and the numbers below say nothing. n_head,
    n_head_kv: number of query heads, and of heads of K and V. head_dim_k, head_dim_v: size of a head of K
    (and of a query), and of a head of V. window: how many positions a token attends to; 0: all. rope: how
    many dimensions of each head the position rotates (RoPE); 0: none. kv_from: the layer whose K and V it
    reads: its own number, or that of an earlier layer; then it has none of its own.
    """

    kind: str
    group: int
    n_head: int
    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    window: int
    rope: int
    kv_from: int


class CellsView:
    """A snapshot of all cells of a group; later changes to the cache don't show in it.

    pos: int32 (n_cells,), the cell's position, -1 where the cell is empty. seq: bool (n_cells, n_seq_max),
    whether the sequence sees the cell; the array is made on first use. shift: int32 (n_cells,), how far the
    position has moved since the cell's K was last rotated; not 0: the K-shift is pending. dither: uint8
    (n_cells,), the number of the dither in the cell's K, 0 for none (docs/state-format.md). held: uint32
    (n_cells,), how many holds keep the cell. waiting: bool (n_cells,), whether the K-shift is pending and was
    left so by an update, because attention rotates the queries (KVCache.update); after the cell's group had
    another change of positions, the next update decides again, and until then no cell is waiting.
    """

    def __init__(
        self,
        pos: npt.NDArray[np.int32],
        seq: npt.NDArray[np.bool_] | Callable[[], npt.NDArray[np.bool_]],
        shift: npt.NDArray[np.int32],
        dither: npt.NDArray[np.uint8],
        held: npt.NDArray[np.uint32] | None = None,
        settled: bool = False,
    ) -> None:
        self.pos = pos
        self.shift = shift
        self.dither = dither
        self.held = np.zeros(len(pos), np.uint32) if held is None else held
        self._seq = seq
        self._settled = settled  # an update has run since any shift changed

    @property
    def seq(self) -> npt.NDArray[np.bool_]:
        """bool (n_cells, n_seq_max): whether the sequence sees the cell."""
        if callable(self._seq):
            self._seq = self._seq()
        return self._seq

    @property
    def waiting(self) -> npt.NDArray[np.bool_]:
        """bool (n_cells,): whether the cell's K-shift is left pending on purpose (KVCache.update)."""
        return self.shift != 0 if self._settled else np.zeros(len(self.shift), np.bool_)

    @property
    def n_used(self) -> int:
        """How many cells are not empty."""
        return int(np.count_nonzero(self.pos >= 0))

    @property
    def n_kv(self) -> int:
        """The index of the highest used cell + 1."""
        used = np.flatnonzero(self.pos >= 0)
        return int(used[-1]) + 1 if len(used) else 0

    def __repr__(self) -> str:
        n_waiting = int(np.count_nonzero(self.waiting))
        n_pending = int(np.count_nonzero(self.shift)) - n_waiting
        counts = {
            "holes": self.n_kv - self.n_used,
            "shared": int(np.count_nonzero(self.seq.sum(axis=1) > 1)),
            "held": int(np.count_nonzero(self.held)),
            "pending": n_pending,
            "waiting": n_waiting,
        }
        rest = "".join(f", {count} {word}" for word, count in counts.items() if count)
        n_seqs = int(np.count_nonzero(self.seq.any(axis=0)))
        return f"<CellsView: {self.n_used} of {len(self.pos)} cells used, by {n_seqs} sequences{rest}>"


@dataclass(frozen=True)
class ShiftReport:
    """What one context shift did.

    seq: the sequence. n_keep: how many of its first positions were kept. n_discard: how many positions were
    removed, from n_keep on; a position may have several cells, or none. n_past: the sequence's next position
    after the shift, seq_pos_max + 1. stats: what the update after it did.
    """

    seq: int
    n_keep: int
    n_discard: int
    n_past: int
    stats: UpdateStats


@dataclass(frozen=True)
class ForgetReport:
    """What a sequence has forgotten.

    seq: the sequence. positions: those that it has no cell at any more, rising, as they were then. n_cells:
    how many cells it has lost; n_left: how many it has.
    """

    seq: int
    positions: tuple[int, ...]
    n_cells: int
    n_left: int


@dataclass(frozen=True)
class Piece:
    """One sampled token, and the text that it adds.

    text: what is certain by now. It is "" for a control token, and while the bytes so far are half a
    character or may be the beginning of a stop string; a later piece has the text that was held back, also
    the last piece, whose token may be one that ends the text. token: the token's id. logprob: natural
    logarithm of the model's own probability of the token, whatever the sampler's temperature. finish_reason:
    None before the last piece; then "length", or "stop" for a stop string or a token that ends the text.
    seq: the sequence. top: the SamplingParams.top_logprobs likeliest tokens, each with its logprob, the
    likeliest first.
    """

    text: str
    token: int
    logprob: float
    finish_reason: Literal["stop", "length"] | None
    seq: int = 0
    top: tuple[tuple[int, float], ...] = ()
