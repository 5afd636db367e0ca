"""How much memory a model and a context would use, how long steps last, and what a device can do."""

from pykvgraph.plan.memory_model import MemoryModel
from pykvgraph.plan.time_model import TimeModel

__all__ = ["MemoryModel", "TimeModel"]
