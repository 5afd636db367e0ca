"""Run GGUF models from Python, with a KV cache whose cells the program can look at, edit, save and share.

    import pykvgraph as kvg

    with kvg.Model("model.gguf") as model, kvg.Context(model, n_ctx=4096) as ctx:
        for piece in kvg.generate(ctx, "Once upon a time", on_full=kvg.ContextShift(n_keep=32)):
            print(piece.text, end="")

Importing pykvgraph opens the native library libkvgraph. It raises ImportError when libkvgraph or the ggml
that it uses is missing or has the wrong version, and InvalidArgumentError when the variable KVGRAPH_LOG is
set to a bad value. The command `pykvgraph` prints such an error in one line and exits.
"""

from pykvgraph import interrupted as _interrupted

if _interrupted.is_the_command():
    _interrupted.end_at_ctrl_c()

import sys as _sys
from errno import ENOMEM as _ENOMEM
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from pykvgraph._native.fork import importing as _importing
from pykvgraph._native.library import library as _library
from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context
from pykvgraph.context.context_shift import ContextShift, self_extend
from pykvgraph.context.document import Document
from pykvgraph.context.forgetting import Forget
from pykvgraph.errors import (
    CacheFullError,
    CopyError,
    DeviceError,
    InvalidArgumentError,
    KVGraphError,
    ModelLoadError,
    StateError,
    TransportError,
    UnsupportedError,
)
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.kv_cache.hold import Hold
from pykvgraph.model.adapter import Adapter
from pykvgraph.model.gguf_file import GgufFile
from pykvgraph.model.model import Model
from pykvgraph.model.tokenizer import Tokenizer
from pykvgraph.params.params import SamplingParams, ThoughtLimit
from pykvgraph.sampling.sampler import Sampler
from pykvgraph.sequence.decode_loop import generate
from pykvgraph.types import (
    CellGroup,
    CellsView,
    ForgetReport,
    LayerSpec,
    ModelInfo,
    Piece,
    Scores,
    SeqBounds,
    SeqCount,
    ShiftReport,
    TensorInfo,
    UpdateStats,
)

if _TYPE_CHECKING:
    from pykvgraph import plan
    from pykvgraph.engine import Engine, Request, Window
    from pykvgraph.engine.types import (
        CacheUse,
        Completion,
        EngineLook,
        EngineStats,
        Miss,
        Pin,
        TextLook,
        TierStats,
    )
    from pykvgraph.kv_cache.reserved_cells import Incoming, Place, RawRows
    from pykvgraph.llama import Llama
    from pykvgraph.model.device import add_rpc_server, devices, library_info
    from pykvgraph.model.device_types import Abilities, DeviceInfo, DevicePart, LibraryInfo
    from pykvgraph.plan.device_abilities import abilities
    from pykvgraph.plan.memory import plan_memory
    from pykvgraph.sequence.edits import Sequence
    from pykvgraph.sequence.long_reader import LongReader
    from pykvgraph.tiers.options import Tiers

# What is imported when somebody asks for it: the way to a first token is short.
_LATE = {
    "pykvgraph": ("plan",),
    "pykvgraph.model.device": ("add_rpc_server", "devices", "library_info"),
    "pykvgraph.model.device_types": ("Abilities", "DeviceInfo", "DevicePart", "LibraryInfo"),
    "pykvgraph.engine": ("Engine", "Request", "Window"),
    "pykvgraph.engine.types": (
        "CacheUse",
        "Completion",
        "EngineLook",
        "EngineStats",
        "Miss",
        "Pin",
        "TextLook",
        "TierStats",
    ),
    "pykvgraph.kv_cache.reserved_cells": ("Incoming", "Place", "RawRows"),
    "pykvgraph.llama": ("Llama",),
    "pykvgraph.sequence.edits": ("Sequence",),
    "pykvgraph.sequence.long_reader": ("LongReader",),
    "pykvgraph.plan.device_abilities": ("abilities",),
    "pykvgraph.plan.memory": ("plan_memory",),
    "pykvgraph.tiers.options": ("Tiers",),
}
_MODULES = {name: module for module, names in _LATE.items() for name in names}


def __getattr__(name: str) -> _Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _importing:
        try:
            if module == __name__:
                return _import_module(f"{__name__}.{name}")
            value = globals()[name] = getattr(_import_module(module), name)
        except OSError as error:
            if error.errno == _ENOMEM:  # from reading a folder of modules
                raise MemoryError(f"no memory to import {module}") from error
            raise
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


try:
    __version__ = _library().version
except (ImportError, InvalidArgumentError) as _error:
    if _interrupted.is_the_command():
        _sys.exit(f"Error: {' '.join(str(_error).split())}")
    raise

__all__ = [
    "Abilities",
    "Adapter",
    "Batch",
    "CacheFullError",
    "CacheUse",
    "CellGroup",
    "CellsView",
    "Completion",
    "Context",
    "ContextShift",
    "CopyError",
    "DeviceError",
    "DeviceInfo",
    "DevicePart",
    "Document",
    "Engine",
    "EngineLook",
    "EngineStats",
    "Forget",
    "ForgetReport",
    "GgufFile",
    "Hold",
    "Incoming",
    "InvalidArgumentError",
    "KVCache",
    "KVGraphError",
    "LayerSpec",
    "LibraryInfo",
    "Llama",
    "LongReader",
    "Miss",
    "Model",
    "ModelInfo",
    "ModelLoadError",
    "Piece",
    "Pin",
    "Place",
    "RawRows",
    "Request",
    "Sampler",
    "SamplingParams",
    "Scores",
    "SeqBounds",
    "SeqCount",
    "Sequence",
    "ShiftReport",
    "StateError",
    "TensorInfo",
    "TextLook",
    "ThoughtLimit",
    "TierStats",
    "Tiers",
    "Tokenizer",
    "TransportError",
    "UnsupportedError",
    "UpdateStats",
    "Window",
    "__version__",
    "abilities",
    "add_rpc_server",
    "devices",
    "generate",
    "library_info",
    "plan",
    "plan_memory",
    "self_extend",
]
