"""The first stage of a pipeline: it has the tokens, gets the logits, and tells the others what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pykvgraph import errors
from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context
from pykvgraph.errors import InvalidArgumentError, KVGraphError, StateError
from pykvgraph.stream.stage import Folder, StageCache, differing, ranges, undo
from pykvgraph.stream.stage_frame import FrameKind, StageFrame, noted, pack_batch, receive_frame
from pykvgraph.stream.transports.transport import Transport

if TYPE_CHECKING:
    from typing_extensions import Self


class Pipeline:
    """Decodes with a model whose layers several processes have, one stage behind the other.

    This process has the first stage; the others run `run_stage`. One thread uses it.

    ctx: of a model that was loaded with layers=range(0, b). after: an end whose other one the stage of layer
    b has. before: the same of the last stage, which sends the logits. Both None: ctx has all layers, and the
    pipeline is this process. folder: as for `run_stage`.

    stages: the layers of each. Raises InvalidArgumentError, TransportError, and StateError where the stages
    don't fit together: another model, adapter or size of the context, or a gap between layers.
    """

    def __init__(
        self,
        ctx: Context,
        after: Transport | None = None,
        before: Transport | None = None,
        folder: Folder = None,
    ) -> None:
        self._cache = StageCache(ctx, folder)
        self._ctx = ctx
        if self._cache.own.start:
            raise InvalidArgumentError(f"a pipeline begins with layer 0, got {self._cache.own}")
        if (after is None or before is None) != ctx.model._has_output or (after is None) != (before is None):
            raise InvalidArgumentError("a stage with others behind it has two transports, after and before")
        self._ends = None if after is None or before is None else (after, before)
        self._broken = ""
        try:
            self.stages = self._greet()
        except BaseException:
            self._shut()
            raise

    def decode(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Computes a batch in all stages: afterwards its tokens are in the cache of each.

        Returns the logits of its outputs, float32 (n_outputs, n_vocab), in batch order. All or nothing: after
        an error no stage has the tokens. Raises what Context.decode raises, in whichever stage, and
        TransportError when a stage is gone, or StateError when it sends what it should not: then the pipeline
        is over, as after Ctrl-C in the middle, and the caches are as they are.
        """
        self._require_intact()
        self._ctx.decode(batch)
        if self._ends is None:
            return self._ctx.logits()
        arrays = batch.snapshot()
        try:
            answer = self._around(pack_batch(arrays, self._ctx.embeddings()))
            if answer.kind == FrameKind.FAILED:
                undo(self._ctx)
                self._expect(FrameKind.UNDO, self._around(StageFrame(FrameKind.UNDO)))
            else:
                self._expect(FrameKind.LOGITS, answer, int(arrays.logits.sum()))
        except BaseException:  # the other stages may be a batch ahead, or their answer still under way
            self._shut()
            raise
        if answer.kind == FrameKind.FAILED:
            raise _error_of(answer)
        shape = (answer.n, self._ctx.model.n_vocab)
        logits: npt.NDArray[np.float32] = answer.body.view(np.float32).reshape(shape)
        return logits

    def append(self, token: int, seq: int = 0) -> npt.NDArray[np.float32]:
        """Decodes one token at the end of a sequence; returns its logits, float32 (n_vocab,)."""
        batch = Batch()
        batch.add(token, self._ctx.kv.seq_pos_max(seq) + 1, (seq,), logits=True)
        logits: npt.NDArray[np.float32] = self.decode(batch)[0]
        return logits

    def seq_pos_max(self, seq: int = 0) -> int:
        """The last position of a sequence; -1: it is empty."""
        return self._ctx.kv.seq_pos_max(seq)

    def edit(self, name: str, *arguments: Any) -> None:
        """Does the same to the cache of each stage: edit("seq_rm", 0, 5, -1).

        name: seq_rm, seq_cp, seq_keep, seq_add, seq_div, defrag, update or clear, a method of KVCache; then
        its arguments. Raises what the method raises: in this stage, with nothing changed; in a later one the
        caches differ from then on, and only edit("clear") makes them alike again.
        """
        if name != "clear":
            self._require_intact()
        self._call(name, arguments)
        self._broken = ""

    def save(self, seq: int, name: str, cuts: Sequence[range] | None = None) -> None:
        """Each stage puts its layers of a sequence into its folder, for load().

        name: 1 to 64 letters, digits, _ or -; new for each. cuts: the layers of each stage of the pipeline
        that will load it; None: the same as here. Raises as edit(), and what stream_out() raises.
        """
        self._require_intact()
        self._call("save", (seq, name, _pairs(self.stages if cuts is None else cuts)))

    def load(self, seq: int, name: str, cuts: Sequence[range] | None = None) -> None:
        """Each stage takes its layers of a sequence that was saved, into one that is empty.

        What is taken is removed from the folders. cuts: the layers of each stage of the pipeline that saved
        it, which need not be those of this one; None: they are. Raises as edit(), and what stream_in()
        raises.
        """
        self._require_intact()
        self._call("load", (seq, name, _pairs(self.stages if cuts is None else cuts)))

    def close(self) -> None:
        """The other stages end."""
        if self._ends is not None:
            with contextlib.suppress(KVGraphError):  # a stage that is gone has ended
                self._around(StageFrame(FrameKind.END))
            self._shut()

    def _shut(self) -> None:
        for end in self._ends or ():
            end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _greet(self) -> tuple[range, ...]:
        own, n_layer = self._cache.own, self._ctx.model.n_layer
        facts = self._cache.facts()
        answer = self._around(noted(FrameKind.HELLO, {**facts, "stages": [[own.start, own.stop]]}))
        if answer.kind == FrameKind.FAILED:
            raise _error_of(answer)
        note = answer.note()
        if reason := differing(note, facts):
            raise StateError(f"the last stage is of another pipeline: {reason}")
        stages = ranges(note["stages"])
        if stages[-1].stop != n_layer:
            raise StateError(f"the stages have layers 0 to {stages[-1].stop - 1} of {n_layer}")
        return tuple(stages)

    def _call(self, name: str, arguments: Sequence[Any]) -> None:
        frame = noted(FrameKind.CALL, [name, list(arguments)])  # what can't be told changes no stage
        self._cache.call(name, arguments)
        if self._ends is None:
            return
        try:
            answer = self._around(frame)
            if answer.kind != FrameKind.FAILED:
                self._expect(FrameKind.CALL, answer)
        except BaseException:
            self._shut()
            raise
        if answer.kind == FrameKind.FAILED:
            error = _error_of(answer)
            if name != "save":  # which changes no cache
                self._broken = str(error)
            raise error

    def _expect(self, kind: FrameKind, answer: StageFrame, n: int = 0) -> None:
        if (answer.kind, answer.n) != (kind, n):
            raise StateError(
                f"the last stage has sent {answer.kind.name} of {answer.n}, in place of {kind.name} of {n}"
            )

    def _around(self, frame: StageFrame) -> StageFrame:
        """What comes back from the last stage."""
        if self._ends is None:
            return frame
        after, before = self._ends
        frame.send(after)
        return receive_frame(before, self._cache.limits)

    def _require_intact(self) -> None:
        if self._broken:
            raise StateError(f'the stages differ, as one of them failed ({self._broken}); edit("clear")')


def _pairs(cuts: Sequence[range]) -> list[list[int]]:
    pairs = [[each.start, each.stop] for each in cuts]
    ranges(pairs)
    return pairs


def _error_of(answer: StageFrame) -> KVGraphError:
    """What a stage has met, as the error that it is."""
    note = answer.note()
    if not (isinstance(note, list) and len(note) == 2 and all(isinstance(each, str) for each in note)):
        raise StateError("a stage has failed, and doesn't say how")
    kind = getattr(errors, note[0], None)
    if isinstance(kind, type) and issubclass(kind, KVGraphError):
        return kind(note[1])
    return errors.DeviceError(f"{note[0]} in {note[1]}")  # MemoryError
