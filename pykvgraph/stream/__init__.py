"""Caches that travel: sequences, over memory, files, sockets or MPI, from one context to another."""

from pykvgraph.stream.chunks import gather, scatter
from pykvgraph.stream.follow import following
from pykvgraph.stream.layout import Layout, crossings
from pykvgraph.stream.pipeline import Pipeline
from pykvgraph.stream.receive import arrivals, stream_in
from pykvgraph.stream.replica import replica
from pykvgraph.stream.replicated import replicated
from pykvgraph.stream.send import n_flushes, stream_out
from pykvgraph.stream.split import Roles, split_workers
from pykvgraph.stream.stage import run_stage
from pykvgraph.stream.swapping import Swapping
from pykvgraph.stream.transports.listener import Listener
from pykvgraph.stream.transports.opening import listen, open
from pykvgraph.stream.transports.transport import Transport

__all__ = [
    "Layout",
    "Listener",
    "Pipeline",
    "Roles",
    "Swapping",
    "Transport",
    "arrivals",
    "crossings",
    "following",
    "gather",
    "listen",
    "n_flushes",
    "open",
    "replica",
    "replicated",
    "run_stage",
    "scatter",
    "split_workers",
    "stream_in",
    "stream_out",
]
