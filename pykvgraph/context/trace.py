"""What a context with kv_tier="host" copied and computed when, as a file in Chrome's trace format."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from pykvgraph._native.ffi import KvgSpan
from pykvgraph._native.library import lib

# by kvg_span_kind
_TRACKS = ("copy in", "compute", "copy out")
_AT_A_TIME = 4096


class Span(NamedTuple):
    """Something that took time; seconds of one clock."""

    track: str
    layer: int
    begin: float
    end: float
    n_bytes: int


def take_spans(context: int) -> list[Span]:
    """What was not taken yet, in the order in which it ended. Raises UnsupportedError."""
    spans: list[Span] = []
    buffer = (KvgSpan * _AT_A_TIME)()
    n = ctypes.c_int64(_AT_A_TIME)
    while n.value == _AT_A_TIME:
        lib().kvg_take_spans(context, buffer, _AT_A_TIME, ctypes.byref(n))
        spans += [
            Span(_TRACKS[each.kind], each.layer, each.begin, each.end, each.n_bytes)
            for each in buffer[: n.value]
        ]
    return spans


def write_trace(spans: Sequence[Span], path: str | os.PathLike[str]) -> None:
    """The format is Google's "Trace Event Format": complete events ("X"), microseconds from the first on."""
    start = min((span.begin for span in spans), default=0.0)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": track, "args": {"name": name}}
        for track, name in enumerate(_TRACKS)
    ]
    for span in spans:
        events.append(
            {
                "ph": "X",
                "name": f"layer {span.layer}",
                "cat": span.track,
                "pid": 0,
                "tid": _TRACKS.index(span.track),
                "ts": round((span.begin - start) * 1e6, 3),
                "dur": round((span.end - span.begin) * 1e6, 3),
                "args": {"layer": span.layer, "bytes": span.n_bytes},
            }
        )
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
