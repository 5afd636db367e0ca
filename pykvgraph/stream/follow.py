"""A sequence leaves while it grows: `following`."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from pykvgraph._native.kv import read_bounds
from pykvgraph.checks import integer
from pykvgraph.context.context import Context
from pykvgraph.errors import DeviceError, InvalidArgumentError, KVGraphError, TransportError
from pykvgraph.stream.layout import Layout
from pykvgraph.stream.send import flush, level_of, shape_for, whole
from pykvgraph.stream.shape import Shape
from pykvgraph.stream.steps import Region, State, end, read_state, split_rows, step, step_headers, text, token
from pykvgraph.stream.tap import Tap, Tapped, TapReport

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_BYTES = 256 << 20  # that wait to be sent
STATE_EVERY = 64  # tokens, of which so many at most are decoded again at the other end


def following(
    ctx: Context, seq: int, layout: Layout, level: int | None = None, text: Sequence[int] | None = None
) -> Following:
    """Sends a sequence as it is, and from then on what each decode adds to it; call send() after each.

    At the other end `stream_in` takes all of it, or `arrivals` step by step. Until the end only decodes may
    change the sequence, and what removes tokens at its end. Decodes of other sequences don't matter.

    level: 0: regions as `stream_out` makes them, sent by send(). 1: packed; one token takes a region for K of
    all layers, and one for V. 2: besides, each layer's rows of several tokens leave while the graph computes
    what comes after them. 3: besides, send() doesn't wait. None: as KVGRAPH_STREAM_LEVEL says, else 3.

    text: the tokens of the text, as far as they are known; they go too, and those that send() gets. At the
    other end they are the `text` of `arrivals`. None: no text.

    States of recurrent layers, which are large, go with prompts, with every 64th token, and at the end.
    Raises what `stream_out` raises.
    """
    return Following(ctx, seq, layout, level, text)


class Following:
    """What `following` returns; the end of its `with` block ends the stream."""

    def __init__(
        self, ctx: Context, seq: int, layout: Layout, level: int | None, said: Sequence[int] | None
    ) -> None:
        self.level = level_of(level)
        self._n_adapted = ctx.kv._n_adapted
        self._shape = shape_for(ctx, layout, whole=False)
        self._seq = integer(seq, "seq", 0, ctx.n_seq_max - 1)
        self._ctx = ctx
        self._layout = layout
        self._is_open = True
        self._n_text = None if said is None else 0
        self._sender: Sender | None = None
        self._tap = Tap(ctx.kv._handle, self._seq, MAX_BYTES if self.level >= 2 else 0)
        try:
            self._end = self._stated = ctx.kv._handle.call(self._begin)
            flush(self._text(said or ()), together=self.level > 0)
            if self.level >= 2:
                self._sender = Sender(self._tap, self._shape, layout)
        except BaseException:
            self.abandon()
            raise

    def send(self, said: Sequence[int] = ()) -> None:
        """What the sequence has got, or has no more, since the last call; said: tokens that its text has got.

        Call it after each decode of the sequence, and after tokens were removed. Up to level 2 it is sent
        when this returns. Raises InvalidArgumentError when the stream has ended, or for several decodes at
        once; TransportError when the other end is gone or doesn't keep up, or a decode failed half way. Then
        nothing more is sent; the context isn't affected.
        """
        self._do(lambda context, told: chain(self._text(said), self._news(context, told)))

    def close(self) -> None:
        """Sends what is left, and that nothing follows. A second call does nothing."""
        if self._is_open:
            self._do(self._last_news, is_last=True)
            self._end_all()

    def end(self) -> None:
        """As close(), but without states of recurrent layers: the receiver has those of an earlier step."""
        if self._is_open:
            self._do(lambda _context, _told: end(self._layout), is_last=True)
            self._end_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()

    def abandon(self) -> None:
        """Ends it as it is: nothing more is sent, and the transports are closed."""
        self._layout.close()
        self._end_all()

    def _begin(self, context: int) -> int:
        flush(self._whole(context), together=self.level > 0)
        return self._last(context)

    def _whole(self, context: int) -> Iterator[Region]:
        return whole(
            context, self._shape, self._seq, self._ctx.kv._pending.saved, self._layout, self.level == 0
        )

    def _last(self, context: int) -> int:
        return read_bounds(context, self._ctx.n_seq_max)[1][self._seq]

    def _do(self, news: Callable[[int, TapReport], Iterator[Region]], is_last: bool = False) -> None:
        """Sends what news(context, what was done since the last call) gives."""
        if not self._is_open:
            raise InvalidArgumentError("the stream has ended: follow the sequence anew")
        try:
            if self._ctx.kv._n_adapted != self._n_adapted:
                raise InvalidArgumentError("the adapters have changed: follow the sequence anew")
            told = self._tap.tell()
            if told.n_decodes > 1:
                raise InvalidArgumentError(
                    f"{told.n_decodes} decodes since the last send(): call it after each"
                )
            if self._sender is None:
                self._ctx.kv._handle.call(lambda context: flush(news(context, told), together=self.level > 0))
                return
            regions = self._ctx.kv._handle.call(lambda context: list(news(context, told)))
            self._sender.put(regions, waits=self.level == 2 or is_last)
        except BaseException:
            self.abandon()
            raise

    def _news(self, context: int, told: TapReport) -> Iterator[Region]:
        last = self._last(context)
        is_here = told.taken == last and told.n_decodes > 0  # all of it left while it was computed
        changed = [position for position in (told.first, last + 1) if 0 <= position <= self._end]
        begin = last + 1 if is_here else min([self._end + 1, *changed])
        goes_back = bool(changed) or (told.taken >= 0 and not is_here)
        if begin > last and not goes_back and not is_here:
            return
        if goes_back and self._shape.has_windows_or_states:  # they can't go back as they like
            self._end = self._stated = last
            yield from self._whole(context)
            return
        n = last + 1 - begin
        is_due = n != 1 or last - self._stated >= STATE_EVERY
        state = read_state(context, self._shape, self._seq) if is_due else None
        self._end = last
        self._stated = last if state is not None else self._stated
        if n == 1 and self.level > 0:
            yield from token(context, self._shape, self._layout, self._seq, begin, state)
        elif not is_here or state is not None:
            yield from self._step(context, begin, state)

    def _last_news(self, context: int, told: TapReport) -> Iterator[Region]:
        yield from self._news(context, told)
        state = read_state(context, self._shape, self._seq) if self._stated != self._end else None
        if state is not None:
            yield from self._step(context, self._end + 1, state)
        yield from end(self._layout)

    def _text(self, said: Sequence[int]) -> Iterator[Region]:
        """It goes before the rows: whoever has these knows which tokens follow."""
        if self._n_text is not None:
            yield from text(self._layout, self._n_text, said)
            self._n_text += len(said)

    def _step(self, context: int, begin: int, state: State | None) -> Iterator[Region]:
        return step(context, self._shape, self._layout, self._seq, begin, self.level == 0, state)

    def _end_all(self) -> None:
        self._is_open = False
        if self._sender:
            self._sender.close()
        self._tap.close()


class Sender:
    """The thread that flushes: what the tap gives, and what is put in between."""

    def __init__(self, tap: Tap, shape: Shape, layout: Layout) -> None:
        self.tap = tap
        self._shape = shape
        self._layout = layout
        self._order = sorted(shape.rows)  # of layers, as a graph computes them
        self._n_taken = 0  # layers of the micro-batch that is being computed
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._taken: list[_Job] = []  # jobs that the thread is at
        self._is_over = False  # there are no more
        self._n_bytes = 0  # of jobs
        self._lock = threading.Lock()  # of it
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pykvgraph stream", daemon=True)
        self._thread.start()

    def put(self, regions: list[Region], *, waits: bool) -> None:
        """They are flushed when what was tapped before is. waits: until then. Raises what flush() does."""
        n_bytes = sum(region.n_bytes for region in regions)
        job = _Job(regions, n_bytes, Future() if waits else None)
        with self._lock:
            if self._n_bytes and self._n_bytes + n_bytes > MAX_BYTES:
                raise TransportError(f"the other end doesn't keep up: {self._n_bytes} bytes wait to be sent")
            self._n_bytes += n_bytes
        self._jobs.put(job)
        self.tap.mark()  # only now: the thread wakes once, and finds the job
        if self._error is not None:
            raise TransportError(str(self._error)) from self._error
        if job.sent is not None:
            job.sent.result()

    def close(self) -> None:
        """Ends the thread when it has sent what was put."""
        if self._thread.is_alive():
            self._jobs.put(None)
            with contextlib.suppress(KVGraphError):
                self.tap.mark()
            self._thread.join()

    def _run(self) -> None:
        try:
            after: Tapped | None = None
            while not self._is_over:
                item, after = after or self.tap.next(), None
                if not item.is_mark:
                    flush(self._rows(item), together=True)
                    continue
                after = self._take_jobs()
                if self._taken:
                    self._require_whole()
                flush((region for job in self._taken for region in job.regions), together=True)
                with self._lock:
                    self._n_bytes -= sum(job.n_bytes for job in self._taken)
                for job in self._taken:
                    if job.sent is not None:
                        job.sent.set_result(None)
                self._taken.clear()
        except BaseException as error:
            slow = isinstance(error, DeviceError)  # the tap is over
            failure = TransportError(f"the other end doesn't keep up: {error}") if slow else error
            self._error = failure
            self._layout.close()
            while True:
                for job in self._taken:
                    if job.sent is not None and not job.sent.done():
                        job.sent.set_exception(failure)
                self._taken.clear()
                if self._is_over:
                    return
                self._take_job()

    def _take_jobs(self) -> Tapped | None:
        """The job of a mark, and those of the marks behind it: several tokens, when the other end lags.

        Returns what comes after them, as far as it has come.
        """
        while True:
            self._take_job()
            after = None if self._is_over else self.tap.now()
            if after is None or not after.is_mark:
                return after

    def _take_job(self) -> None:
        job = self._jobs.get()
        if job is None:
            self._is_over = True
        else:
            self._taken.append(job)

    def _rows(self, item: Tapped) -> Iterator[Region]:
        layer = self._shape.geometry.groups[item.group].layers[item.layer]
        if layer != self._order[self._n_taken]:
            self._n_taken = self._n_taken or 1
            self._require_whole()
        if self._n_taken == 0:
            positions = [item.positions] * len(self._shape.room)
            yield from step_headers(self._layout, int(item.positions[0]), positions, None, False)
        self._n_taken = (self._n_taken + 1) % len(self._order)
        for transport, layers in self._layout.parts:
            if layer in layers:
                yield from split_rows(transport, self._shape, layer, item.rows, None)

    def _require_whole(self) -> None:
        if self._n_taken:
            raise TransportError("a decode failed half way, when a part of it was sent: follow anew")


class _Job(NamedTuple):
    """Regions to be flushed together. sent: for who waits; None: nobody does."""

    regions: list[Region]
    n_bytes: int
    sent: Future[None] | None
