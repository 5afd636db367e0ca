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
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from pykvgraph import plan
from pykvgraph._native.library import library as _library
from pykvgraph.adapter import Adapter
from pykvgraph.batch import Batch
from pykvgraph.context import Context
from pykvgraph.context_shift import ContextShift, self_extend
from pykvgraph.device import add_rpc_server, devices, library_info
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
from pykvgraph.gguf_file import GgufFile
from pykvgraph.hold import Hold
from pykvgraph.incoming import Incoming, Place, RawRows
from pykvgraph.kv_cache import KVCache
from pykvgraph.long_reader import LongReader
from pykvgraph.model import Model
from pykvgraph.params import SamplingParams, ThoughtLimit
from pykvgraph.plan.device_abilities import abilities
from pykvgraph.plan.memory import plan_memory
from pykvgraph.text.sampling import Sampler
from pykvgraph.text.tokenizer import Tokenizer
from pykvgraph.tiers.tiers import Tiers
from pykvgraph.token_loop import generate
from pykvgraph.types import (
    Abilities,
    CellGroup,
    CellsView,
    Completion,
    DeviceInfo,
    DevicePart,
    EngineLook,
    EngineStats,
    LayerSpec,
    LibraryInfo,
    ModelInfo,
    Piece,
    Scores,
    SeqBounds,
    SeqCount,
    ShiftReport,
    TensorInfo,
    TextLook,
    TierStats,
    UpdateStats,
)

if _TYPE_CHECKING:
    from pykvgraph.engine import Engine, Request, Window
    from pykvgraph.llama import Llama


def __getattr__(name: str) -> _Any:
    """What is imported when somebody asks for it: Llama needs Jinja, Engine asyncio."""
    if name in ("Engine", "Request", "Window"):
        from pykvgraph import engine

        return getattr(engine, name)
    if name == "Llama":
        from pykvgraph.llama import Llama

        return Llama
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    "CellGroup",
    "CellsView",
    "Completion",
    "Context",
    "ContextShift",
    "CopyError",
    "DeviceError",
    "DeviceInfo",
    "DevicePart",
    "Engine",
    "EngineLook",
    "EngineStats",
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
    "Model",
    "ModelInfo",
    "ModelLoadError",
    "Piece",
    "Place",
    "RawRows",
    "Request",
    "Sampler",
    "SamplingParams",
    "Scores",
    "SeqBounds",
    "SeqCount",
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
