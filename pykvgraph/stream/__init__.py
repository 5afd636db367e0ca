"""Caches that travel: regions of bytes from one end to another, over memory, files, sockets or MPI."""

from pykvgraph.stream.opening import open
from pykvgraph.stream.transport import Transport

__all__ = ["Transport", "open"]
