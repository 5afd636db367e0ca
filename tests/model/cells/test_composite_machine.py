"""Composite cells under every operation, beside a model of their rows in NumPy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.chance import SHARE
from support.engines import decode, open_context, run_of
from support.models import N_VOCAB, TWO_GROUPS, ModelSpec
from support.streams import connect, travel

import pykvgraph as kvg
from pykvgraph.kv_cache.composite import Composition, compose

N_CELLS, N_SEQ = 40, 3
SEQS = st.integers(0, N_SEQ - 1)
PLACES = st.integers(0, 1000)
FAR = 3e-5  # of what NumPy in float64 and rotations in float32 differ by, beside keys of length 1

Head = tuple[int, int]  # layer, head
Floats = npt.NDArray[np.float64]


class Row(NamedTuple):
    """What one head has of one token: K rotated to where it stands now, and V."""

    pos: int
    k: Floats
    v: bytes

    def moved(self, delta: int) -> Row:
        angles = delta * TWO_GROUPS.rope_base ** (-np.arange(0, len(self.k), 2) / len(self.k))
        pairs = (self.k[0::2] + 1j * self.k[1::2]) * np.exp(1j * angles)
        return Row(self.pos + delta, np.stack([pairs.real, pairs.imag], axis=-1).reshape(-1), self.v)

    def order(self) -> tuple[int, bytes, tuple[float, ...]]:
        """Tokens of one id have one V in the first layer; their K differs, where they are rows of a span."""
        return self.pos, self.v, tuple(self.k)


Text = dict[Head, list[Row]]
HEADS = [(layer, head) for layer in range(TWO_GROUPS.n_layer) for head in range(TWO_GROUPS.heads_of(layer))]


class CompositeMachine(RuleBasedStateMachine):
    """Sequences are lists of rows, a list for each head; who shares cells makes no difference to them."""

    model: ClassVar[kvg.Model]
    counts: ClassVar[Counter[str]] = Counter()

    @initialize(n=st.integers(8, 16))
    def open(self, n: int) -> None:
        types = {"type_k": "f32", "type_v": "f32"}
        self.ctx = open_context(self.model, n_ctx=N_CELLS, n_batch=16, n_seq_max=N_SEQ, **types)
        self.texts: list[Text] = [{head: [] for head in HEADS} for _ in range(N_SEQ)]
        self.held: list[tuple[kvg.Hold, Text]] = []
        self.append(0, n, 0)
        self.compose(0, 2, n - 3, 3, n)

    def teardown(self) -> None:
        if hasattr(self, "ctx"):
            self.ctx.close()

    def end(self, seq: int) -> int:
        return max((row.pos for row in self.texts[seq][HEADS[0]]), default=-1)

    def cells(self, seq: int, group: int = 0) -> list[tuple[int, int]]:
        view = self.ctx.kv.cells(group)
        return sorted((int(view.pos[i]), int(i)) for i in np.flatnonzero(view.seq[:, seq]))

    def tensors(self) -> dict[int, tuple[Floats, Floats]]:
        """K and V of each layer."""
        kv = self.ctx.kv
        return {
            layer: (kv.read_k(layer).astype(np.float64), kv.read_v(layer).astype(np.float64))
            for group in kv.groups
            for layer in group.layers
        }

    def rows(self, seq: int, tensors: dict[int, tuple[Floats, Floats]], p0: int = 0) -> Text:
        """What the cache has from a position on."""
        found: Text = {}
        for index, group in enumerate(self.ctx.kv.groups):
            cells = [each for each in self.cells(seq, index) if each[0] >= p0]
            for layer in group.layers:
                k, v = tensors[layer]
                for head in range(k.shape[1]):
                    found[layer, head] = [Row(pos, k[i, head], v[i, head].tobytes()) for pos, i in cells]
        return found

    @rule(seq=SEQS, n=st.integers(1, 6), gap=st.sampled_from([0, 0, 2]))
    def append(self, seq: int, n: int, gap: int) -> None:
        begin = self.end(seq) + 1 + gap
        if self.ctx.kv.n_free >= n and begin < 400:
            decode(
                self.ctx, run_of([3 + (seq + 7 * i + begin) % (N_VOCAB - 3) for i in range(n)], begin, (seq,))
            )
            for head, rows in self.rows(seq, self.tensors(), begin).items():
                self.texts[seq][head] += rows

    @rule(seq=SEQS, first=PLACES, length=st.integers(2, 14), n_gone=st.integers(0, 6), chance=PLACES)
    def compose(self, seq: int, first: int, length: int, n_gone: int, chance: int) -> None:
        """Of neighbouring positions that are the sequence's alone; heads choose at random."""
        views = [self.ctx.kv.cells(index) for index in range(len(self.ctx.kv.groups))]
        found = self.cells(seq)
        own = sorted({pos for pos, i in found if views[0].seq[i].sum() == 1 and not views[0].held[i]})
        others = {pos for pos, i in found if views[0].seq[i].sum() > 1 or views[0].held[i]}
        places = {pos for pos in own if pos not in others}
        places = set(sorted(places)[first % max(len(places), 1) :][:length])
        n = sum(pos in places for pos, _ in found)
        n_kept = n - n_gone % n if n else 0
        if not n_kept:
            return
        rng = np.random.default_rng(chance)
        compositions, last = [], max(places)
        left: Text = {}
        rows = self.rows(seq, self.tensors())
        for index, group in enumerate(self.ctx.kv.groups):
            cells = [i for pos, i in self.cells(seq, index) if pos in places]
            chosen = []
            for layer in group.layers:
                for head in range(TWO_GROUPS.heads_of(layer)):
                    own_rows = [row for row in rows[layer, head] if row.pos in places]
                    chosen.append(np.sort(rng.permutation(n)[:n_kept]))
                    kept = [own_rows[i]._replace(pos=last) for i in chosen[-1]]
                    left[layer, head] = [
                        r for r in self.texts[seq][layer, head] if r.pos not in places
                    ] + kept
            shape = (len(group.layers), -1, n_kept)
            compositions.append(
                Composition(index, np.array(cells, np.int32), np.array(chosen, np.int32).reshape(shape))
            )
        self.texts[seq] = left
        compose(self.ctx.kv._handle, seq, compositions)
        self.counts["composed"] += n_kept > 1
        self.counts["composed again"] += n > len(places)

    @rule(seq=SEQS, delta=st.integers(-4, 9), first=PLACES)
    def seq_add(self, seq: int, delta: int, first: int) -> None:
        """From any position on; also of shared cells, which are copied."""
        p0 = first % (self.end(seq) + 2)
        try:
            self.ctx.kv.seq_add(seq, p0, -1, delta)
        except kvg.CacheFullError:
            return
        self.counts["moved composites"] += self.has_composites(seq)
        for rows in self.texts[seq].values():
            moved = [row.moved(delta) if row.pos >= p0 else row for row in rows]
            rows[:] = [row for row in moved if row.pos >= 0]

    @rule(seq=SEQS, first=PLACES, length=st.integers(1, 3))
    def seq_rm(self, seq: int, first: int, length: int) -> None:
        p0 = first % (self.end(seq) + 2)
        self.ctx.kv.seq_rm(seq, p0, p0 + length)
        for rows in self.texts[seq].values():
            rows[:] = [row for row in rows if not p0 <= row.pos < p0 + length]

    @rule(seq=SEQS, first=PLACES, length=st.integers(1, 12), divisor=st.integers(2, 3))
    def seq_div(self, seq: int, first: int, length: int, divisor: int) -> None:
        """Whole cells may share a position then, too."""
        p0 = first % (self.end(seq) + 2)
        try:
            self.ctx.kv.seq_div(seq, p0, p0 + length, divisor)
        except kvg.CacheFullError:
            return
        self.counts["divided composites"] += self.has_composites(seq)
        for rows in self.texts[seq].values():
            rows[:] = [
                row.moved(row.pos // divisor - row.pos) if p0 <= row.pos < p0 + length else row
                for row in rows
            ]

    @rule(seq=SEQS, chance=PLACES)
    def forget(self, seq: int, chance: int) -> None:
        """Scattered positions, before the last one."""
        rng = np.random.default_rng(chance)
        places = sorted({row.pos for row in self.texts[seq][HEADS[0]]} - {self.end(seq)})
        gone = [pos for pos in places if rng.random() < 0.2]
        self.ctx.kv._seq_rm_at(seq, np.array(gone, np.int64))
        for rows in self.texts[seq].values():
            rows[:] = [row for row in rows if row.pos not in gone]

    @rule(src=SEQS, dst=SEQS)
    def seq_cp(self, src: int, dst: int) -> None:
        if src != dst:
            self.ctx.kv.seq_rm(dst, -1, -1)
            self.ctx.kv.seq_cp(src, dst, -1, -1)
            self.texts[dst] = {head: list(rows) for head, rows in self.texts[src].items()}
            self.counts["shared composites"] += self.has_composites(src)

    @rule(policy=st.sampled_from(["fill", "sort"]))
    def defrag(self, policy: str) -> None:
        self.ctx.kv.defrag("fill" if policy == "fill" else "sort")
        self.counts["defrag"] += self.ctx.kv.update().moved_cells > 0

    @rule(seq=SEQS, dst=SEQS, streams=st.booleans())
    def carry(self, seq: int, dst: int, streams: bool) -> None:
        """To another sequence, by a saved state or a stream."""
        kv = self.ctx.kv
        if streams and seq != dst and kv.n_free >= kv.seq_count(seq, -1, -1).n_cells:
            kv.seq_rm(dst, -1, -1)
            travel(self.ctx, seq, self.ctx, dst, connect(self.model.n_layer))
            self.counts["streamed composites"] += self.has_composites(seq)
        else:
            try:
                kv.load(kv.save(seq), dst)
            except kvg.CacheFullError:
                return
            self.counts["loaded composites"] += self.has_composites(seq)
        self.texts[dst] = {head: list(rows) for head, rows in self.texts[seq].items()}

    @rule(seq=SEQS, place=PLACES)
    def hold(self, seq: int, place: int) -> None:
        """What stands at one position, a composite if there is one."""
        at = Counter(row.pos for row in self.texts[seq][HEADS[0]])
        places = [pos for pos in at if at[pos] > 1] or list(at)
        if places and len(self.held) < 3:
            pos = places[place % len(places)]
            there = {head: [r for r in rows if r.pos == pos] for head, rows in self.texts[seq].items()}
            self.held.append((self.ctx.kv.hold(seq, pos, pos + 1), there))
            self.counts["held composites"] += at[pos] > 1

    @rule(seq=SEQS, which=PLACES, released=st.booleans())
    @precondition(lambda self: self.held)
    def attach(self, seq: int, which: int, released: bool) -> None:
        """To a sequence that is moved to where it begins, or to an empty one."""
        hold, there = self.held[which % len(self.held)]
        if self.end(seq) >= 0 and hold.p0 > 0:
            self.seq_add(seq, hold.p0 - 1 - self.end(seq), 0)
        if self.end(seq) == hold.p0 - 1:
            self.ctx.kv.attach(hold, seq)
            for head, rows in there.items():
                self.texts[seq][head] += rows
            self.counts["attached"] += 1
        if released:
            hold.release()
            del self.held[which % len(self.held)]

    def has_composites(self, seq: int) -> bool:
        places = [row.pos for row in self.texts[seq][HEADS[0]]]
        return len(set(places)) < len(places)

    @invariant()
    def rows_are_those_of_the_model(self) -> None:
        if not hasattr(self, "ctx"):
            return
        self.counts["steps"] += 1
        tensors = self.tensors()
        for seq, text in enumerate(self.texts):
            found = self.rows(seq, tensors)
            for head in HEADS:
                ours = sorted(found[head], key=Row.order)
                theirs = sorted(text[head], key=Row.order)
                assert [(row.pos, row.v) for row in ours] == [(row.pos, row.v) for row in theirs]
                if ours:
                    keys = [np.stack([row.k for row in rows]) for rows in (ours, theirs)]
                    assert np.abs(keys[0] - keys[1]).max() < FAR * (1 + np.abs(keys[1]).max())


def test_composites_in_any_order(model_file: Callable[[ModelSpec], Path]) -> None:
    with kvg.Model(model_file(TWO_GROUPS), device="cpu") as model:
        CompositeMachine.model = model
        run_state_machine_as_test(
            CompositeMachine,
            settings=settings(max_examples=400 // SHARE, stateful_step_count=30, deadline=None),
        )
    counts = CompositeMachine.counts
    tried = ["composed", "defrag", "moved composites", "divided composites", "held composites"]
    if SHARE == 1:  # what is rare
        tried += [
            "shared composites",
            "loaded composites",
            "streamed composites",
            "composed again",
            "attached",
        ]
    assert all(counts[name] for name in tried), counts
