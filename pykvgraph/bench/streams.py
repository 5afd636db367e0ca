"""What it costs to stream a sequence while it grows: the prompt, and the tokens behind it, by turns."""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pykvgraph.bench.tiers import decode_prompt, prompt_batches
from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context
from pykvgraph.model.model import Model
from pykvgraph.stream import Layout, Transport, arrivals
from pykvgraph.stream.follow import following

LEVELS = (None, 0, 1, 2, 3)  # None: nothing is streamed
_LEVEL_NAMES = ("naive", "+ buffered copies", "+ layer by layer", "all")
N_GENERATED = 32
TURNS_OF_TOKENS = 4  # for each repetition of the prompt
_SPARE = 64  # cells
# regions: the cells that the next stream needs, 0: there is none; the last position that the other end has
_NEXT, _HAS = "next", "has"
_OVER = "over"  # the other end's last one
_NUMBER = struct.Struct("<q")


@dataclass(frozen=True)
class StreamSpeed:
    """Medians of turns. level: None: nothing is streamed.

    prompt: seconds until the other end has the prompt. behind: of these, those behind the last decode. token:
    seconds for each of N_GENERATED tokens, until the other end has them all. prompt_more, token_more: what
    the turn without streaming didn't take: seconds, and a share of `token`. total: seconds of the prompt and
    of all N_GENERATED tokens; total_more: a share of it, as those of its parts say.
    """

    transport: str
    level: int | None
    depth: int
    prompt: float
    behind: float
    prompt_more: float
    token: float
    token_more: float
    total: float
    total_more: float

    @property
    def name(self) -> str:
        """Of the level, as in figure 7 of DejaVu's paper."""
        return "no streaming" if self.level is None else _LEVEL_NAMES[self.level]


@dataclass(frozen=True)
class _Turn:
    """A prompt's seconds, and of these those behind its last decode."""

    prompt: float
    behind: float


def measure_streams(
    model: Model,
    end: Transport,
    depth: int,
    n_repetitions: int,
    sizes: Mapping[str, Any],
    tick: Callable[[], None],
) -> list[StreamSpeed]:
    """Each level by turns; the first turns don't count. The other end is in receive() until end_of().

    The prompt's cells lie between others, every second one, so that level 0 has something to do. tick: called
    after each turn. Raises what streams raise.
    """
    prompts: dict[int | None, list[_Turn]] = {level: [] for level in LEVELS}
    tokens: dict[int | None, list[float]] = {level: [] for level in LEVELS}
    n_ctx = 2 * depth + N_GENERATED + _SPARE
    with Context(model, **{**sizes, "n_ctx": n_ctx, "n_seq_max": 3, "defrag_threshold": -1}) as ctx:
        layout = Layout({end: range(model.n_layer)})
        _take_every_second_cell(ctx, depth)
        for turn in range(n_repetitions + 1):
            for level in _in_turn(turn):
                prompts[level].append(_prompt(ctx, layout, end, level, depth))
                tick()
        ctx.reset()
        decode_prompt(ctx, depth)
        for turn in range(TURNS_OF_TOKENS * n_repetitions + 1):
            for level in _in_turn(turn):
                tokens[level].append(_tokens(ctx, layout, end, level, depth))
                tick()
    return [_speed(end.address.partition(":")[0], level, depth, prompts, tokens) for level in LEVELS]


def n_ticks(n_repetitions: int) -> int:
    """How often measure_streams() calls `tick`."""
    return len(LEVELS) * (n_repetitions + 1 + TURNS_OF_TOKENS * n_repetitions + 1)


def end_of(end: Transport) -> None:
    """Tells the other end that nothing follows."""
    end.flush(_NEXT, _NUMBER.pack(0))
    end.fetch(_OVER, bytearray())


def receive(model: Model, end: Transport, sizes: Mapping[str, Any]) -> int:
    """The other end: takes what comes into a cache, and tells what it has. Returns how many streams came."""
    layout = Layout({end: range(model.n_layer)})
    n_streams, ctx = 0, None
    try:
        while n_cells := _number(end, _NEXT):
            if ctx is None or ctx.n_ctx < n_cells:
                if ctx is not None:
                    ctx.close()
                ctx = Context(model, **{**sizes, "n_ctx": n_cells, "n_seq_max": 1})
            ctx.reset()
            for last in arrivals(ctx, 0, layout):
                end.flush(_HAS, _NUMBER.pack(last))
            n_streams += 1
    finally:
        if ctx is not None:
            ctx.close()
    end.flush(_OVER, b"")
    return n_streams


def _in_turn(turn: int) -> Sequence[int | None]:
    """So that each level comes first in turn."""
    begin = turn % len(LEVELS)
    return LEVELS[begin:] + LEVELS[:begin]


def _take_every_second_cell(ctx: Context, depth: int) -> None:
    """Where a decode may place its tokens as they come; others fill the cells one after the other."""
    ids = np.random.default_rng(1).integers(0, ctx.model.n_vocab, depth)
    for begin in range(0, depth, ctx.n_batch // 2):
        batch = Batch()
        for position in range(begin, min(depth, begin + ctx.n_batch // 2)):
            for seq in (1, 2):
                batch.add(int(ids[position]), position, (seq,), logits=False)
        ctx.decode(batch)
    ctx.kv.seq_rm(2, -1, -1)


def _prompt(ctx: Context, layout: Layout, end: Transport, level: int | None, depth: int) -> _Turn:
    ctx.kv.seq_rm(0, -1, -1)
    if level is None:
        begin = time.perf_counter()
        decode_prompt(ctx, depth)
        return _Turn(time.perf_counter() - begin, 0.0)
    _announce(end, depth)
    with following(ctx, 0, layout, level) as out:
        _wait_for(end, -1)
        begin = time.perf_counter()
        for batch in prompt_batches(ctx, depth):
            ctx.decode(batch)
            decoded = time.perf_counter()
            out.send()
        _wait_for(end, depth - 1)
        done = time.perf_counter()
    return _Turn(done - begin, done - decoded)


def _tokens(ctx: Context, layout: Layout, end: Transport, level: int | None, depth: int) -> float:
    """Seconds of a token behind the prompt, whose tokens go again."""
    if level is None:
        begin = time.perf_counter()
        for token in range(N_GENERATED):
            ctx.append(token)
        seconds = time.perf_counter() - begin
    else:
        _announce(end, depth)
        with following(ctx, 0, layout, level) as out:
            _wait_for(end, depth - 1)
            begin = time.perf_counter()
            for token in range(N_GENERATED):
                ctx.append(token)
                out.send()
            _wait_for(end, depth + N_GENERATED - 1)
            seconds = time.perf_counter() - begin
    ctx.kv.rewind(0, depth)
    return seconds / N_GENERATED


def _wait_for(end: Transport, position: int) -> None:
    """Until the other end has the sequence to there."""
    while _number(end, _HAS) != position:
        pass


def _announce(end: Transport, depth: int) -> None:
    """A stream of so many tokens, and of those behind them."""
    end.flush(_NEXT, _NUMBER.pack(depth + N_GENERATED + _SPARE))


def _number(end: Transport, key: str) -> int:
    region = bytearray(_NUMBER.size)
    end.fetch(key, region)
    return int(_NUMBER.unpack(region)[0])


def _speed(
    transport: str,
    level: int | None,
    depth: int,
    prompts: Mapping[int | None, list[_Turn]],
    tokens: Mapping[int | None, list[float]],
) -> StreamSpeed:
    """Without the first turns. What is more is the median of that of each turn."""
    own, plain = prompts[level][1:], prompts[None][1:]
    said, silent = tokens[level][1:], tokens[None][1:]
    prompt, token = statistics.median(turn.prompt for turn in own), statistics.median(said)
    more = statistics.median(turn.prompt - other.prompt for turn, other in zip(own, plain, strict=True))
    share = statistics.median(seconds / other - 1 for seconds, other in zip(said, silent, strict=True))
    alone = statistics.median(turn.prompt for turn in plain), N_GENERATED * statistics.median(silent)
    return StreamSpeed(
        transport,
        level,
        depth,
        prompt,
        statistics.median(turn.behind for turn in own),
        more,
        token,
        share,
        prompt + N_GENERATED * token,
        (more + share * alone[1]) / sum(alone),
    )
