"""The engine: many requests on one cache, batched as they come, with the prefixes that they share."""

from pykvgraph.engine.context_window import Window
from pykvgraph.engine.engine import Engine
from pykvgraph.engine.request import Request

__all__ = ["Engine", "Request", "Window"]
