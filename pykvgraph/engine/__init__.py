"""The engine: many requests on one cache, batched as they come, with the prefixes that they share."""

from pykvgraph.engine.engine import Engine
from pykvgraph.engine.request import Request
from pykvgraph.engine.context_window import Window

__all__ = ["Engine", "Request", "Window"]
