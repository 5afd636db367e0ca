"""A stage of a pipeline: what it does with its cache, and the loop of those behind the first."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from pykvgraph.checks import native_path, shown
from pykvgraph.context.context import Context
from pykvgraph.errors import InvalidArgumentError, KVGraphError, StateError
from pykvgraph.stream.layout import Layout, crossings
from pykvgraph.stream.receive import stream_in
from pykvgraph.stream.send import stream_out
from pykvgraph.stream.stage_frame import (
    FrameKind,
    FrameLimits,
    StageFrame,
    noted,
    pack_batch,
    pack_logits,
    receive_frame,
    unpack_batch,
)
from pykvgraph.stream.transports.opening import open as open_transport
from pykvgraph.stream.transports.transport import Transport

Folder = str | os.PathLike[str] | None
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LONGEST = 4000  # characters of what a stage says of a failure
_EDITS = ("seq_rm", "seq_cp", "seq_keep", "seq_add", "seq_div", "defrag", "update", "clear")


class StageCache:
    """What is done to the cache of one stage when the first one says so.

    folder: where save() and load() have sequences; None: nowhere.
    """

    def __init__(self, ctx: Context, folder: Folder) -> None:
        if not isinstance(ctx, Context):
            raise InvalidArgumentError(f"ctx must be a pykvgraph.Context, got {shown(ctx)}")
        self.ctx = ctx
        self.own = ctx.model.stage
        self._folder = None if folder is None else os.fsdecode(native_path(folder))

    @property
    def limits(self) -> FrameLimits:
        """Of frames for this stage."""
        ctx = self.ctx
        return FrameLimits(ctx.n_batch, ctx.n_seq_max, ctx.model.n_embd, ctx.model.n_vocab)

    def facts(self) -> dict[str, Any]:
        """What all stages have in common: then their caches are alike, cell by cell."""
        ctx = self.ctx
        names = ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "type_k", "type_v", "swa_full")
        same = {name: getattr(ctx, name) for name in names}
        model = ctx.model._fingerprint(ctx.adapters).hex()
        return {"model": model, **same, "defrag_threshold": ctx.defrag_threshold}

    def call(self, name: str, arguments: Sequence[Any]) -> None:
        """Raises what the call raises, and InvalidArgumentError for a call that there isn't."""
        calls = {each: getattr(self.ctx.kv, each) for each in _EDITS} | {"save": self.save, "load": self.load}
        if name not in calls:
            raise InvalidArgumentError(f"a stage has no call {shown(name)}")
        try:
            calls[name](*arguments)
        except TypeError as error:  # too few arguments, or too many
            raise InvalidArgumentError(f"{name}: {error}") from None

    def save(self, seq: int, name: str, cuts: Sequence[Sequence[int]]) -> None:
        """The layers of a sequence, in pieces for the stages of a pipeline that has these cuts."""
        pieces = self._pieces(name, [self.own], self._all(cuts))
        if there := [place for place in pieces if os.path.isdir(place)]:
            raise StateError(f"{there[0]} is there: a sequence of this name was saved")
        with closing(Layout(_opened(pieces))) as layout:
            stream_out(self.ctx, seq, layout)

    def load(self, seq: int, name: str, cuts: Sequence[Sequence[int]]) -> None:
        """The layers that are here, of a sequence that a pipeline with these cuts has saved."""
        pieces = self._pieces(name, self._all(cuts), [self.own])
        if missing := [place for place in pieces if not os.path.isdir(place)]:
            raise StateError(f"{missing[0]} is missing: no such sequence was saved, or with other cuts")
        with closing(Layout(_opened(pieces))) as layout:
            stream_in(self.ctx, seq, layout)
        for place in pieces:
            with contextlib.suppress(OSError):  # of another stage, or with a file of somebody else's
                os.rmdir(place)

    def _all(self, cuts: Sequence[Sequence[int]]) -> list[range]:
        found = ranges(cuts)
        if found[-1].stop != self.ctx.model.n_layer:
            raise InvalidArgumentError(f"cuts end at layer {found[-1].stop}, of {self.ctx.model.n_layer}")
        return found

    def _pieces(self, name: str, source: Sequence[range], target: Sequence[range]) -> dict[str, range]:
        """The folders of the layers that travel together, and these layers."""
        if self._folder is None:
            raise InvalidArgumentError("a stage has no folder for sequences: give it one")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidArgumentError(f"a name has 1 to 64 letters, digits, _ or -, got {shown(name)}")
        place = os.path.join(self._folder, name)
        pieces = crossings(source, target).values()
        return {os.path.join(place, f"{piece.start}-{piece.stop}"): piece for piece in pieces}


def _opened(pieces: Mapping[str, range]) -> dict[Transport, range]:
    return {open_transport(f"file:{place}"): layers for place, layers in pieces.items()}


def ranges(cuts: Sequence[Sequence[int]]) -> list[range]:
    """Raises InvalidArgumentError for what are no layers of stages, one behind the other from 0 on."""
    try:
        found = [range(begin, end) for begin, end in cuts]
        begins = [0, *(layers.stop for layers in found[:-1])]
        fits = bool(found) and all(found) and [each.start for each in found] == begins
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise InvalidArgumentError(f"cuts must be the layers of each stage, from 0 on, got {shown(cuts)}")
    return found


def run_stage(ctx: Context, before: Transport, after: Transport, folder: Folder = None) -> None:
    """Does what the first stage (`Pipeline`) says, until it says that this is the end.

    ctx: of a model that was loaded with layers=range(a, b), a > 0. before: an end whose other one the stage
    of layer a - 1 has. after: the same of layer b; of the last stage, the first one has it. folder: where
    `Pipeline.save` and `load` have this stage's part of sequences; None: nowhere.

    What a batch or a call gets wrong, the first stage raises. Raises TransportError when a neighbour is gone,
    and StateError for what isn't right, or when the stages don't fit together; then both transports are
    closed.
    """
    worker = _StageWorker(StageCache(ctx, folder), before, after)
    try:
        worker.run()
    finally:
        before.close()
        after.close()


class _StageWorker:
    """The loop of one stage behind the first."""

    def __init__(self, cache: StageCache, before: Transport, after: Transport) -> None:
        self._cache = cache
        self._ctx = cache.ctx
        self._before = before
        self._after = after
        self._has_last = False  # whether the last batch was decoded here

    def run(self) -> None:
        while (frame := receive_frame(self._before, self._cache.limits)).kind != FrameKind.END:
            if frame.kind == FrameKind.HELLO:
                self._greet(frame.note())
                continue
            self._answer(frame).send(self._after)
        frame.send(self._after)

    def _greet(self, note: Any) -> None:
        """Stands in line behind the stages that have said what they are."""
        own = self._cache.own
        reason = differing(note, self._cache.facts())
        try:
            stages = [] if reason else ranges(note["stages"])
        except InvalidArgumentError as error:
            stages, reason = [], str(error)
        if stages and stages[-1].stop != own.start:
            reason = f"its layers begin at {own.start}, and the stage before it ends at {stages[-1].stop}"
        if reason:
            text = f"the stage with {_layers(own)} doesn't fit: {reason}"
            noted(FrameKind.FAILED, ["StateError", text]).send(self._after)
            raise StateError(text)
        note["stages"] = [[each.start, each.stop] for each in (*stages, own)]
        noted(FrameKind.HELLO, note).send(self._after)

    def _answer(self, frame: StageFrame) -> StageFrame:
        """What the next stage gets."""
        if frame.kind == FrameKind.FAILED:
            self._has_last = False  # it has not come here
        elif frame.kind == FrameKind.UNDO and self._has_last:
            undo(self._ctx)
            self._has_last = False
        elif frame.kind in (FrameKind.BATCH, FrameKind.CALL):
            try:
                return self._done(frame)
            except (KVGraphError, MemoryError) as error:
                text = f"{_layers(self._cache.own)}: {error}"[:_LONGEST]
                return noted(FrameKind.FAILED, [type(error).__name__, text])
        return frame

    def _done(self, frame: StageFrame) -> StageFrame:
        self._has_last = False
        if frame.kind == FrameKind.CALL:
            name, arguments = call_of(frame.note())
            self._cache.call(name, arguments)
            return frame
        batch, hidden = unpack_batch(frame, self._ctx.model.n_embd)
        self._ctx.decode(batch, hidden=hidden)
        self._has_last = True
        if self._ctx.model._has_output:
            return pack_logits(self._ctx.logits_view())
        return pack_batch(batch.snapshot(), self._ctx.embeddings())


def undo(ctx: Context) -> None:
    """Takes the last batch back. Nothing else may have changed its sequences since."""
    ctx._handle.call(ctx._outputs.take_back)


def differing(note: Any, facts: dict[str, Any]) -> str:
    """In what a stage's note differs from what is here; "": in nothing."""
    if not isinstance(note, dict) or not isinstance(note.get("stages"), list):
        return "it has got what is no note of a stage"
    names = [name for name, value in facts.items() if note.get(name) != value]
    if not names:
        return ""
    return f"{names[0]} is {shown(facts[names[0]])} there, and {shown(note.get(names[0]))} in stages before"


def call_of(note: Any) -> tuple[str, list[Any]]:
    """Raises StateError."""
    if not isinstance(note, list) or [type(each) for each in note] != [str, list]:
        raise StateError("a stage has sent what is no call")
    return note[0], note[1]


def _layers(own: range) -> str:
    return f"layers {own.start} to {own.stop - 1}"
