"""llama-cpp-python's face on pykvgraph: `from pykvgraph.llama import Llama`, or `pykvgraph.Llama`.

Small classes that stand for arguments, such as LlamaGrammar, are llama-cpp-python's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pykvgraph._native import libllama
from pykvgraph.llama.cache import LlamaCache, LlamaDiskCache, LlamaRAMCache
from pykvgraph.llama.llama import Llama
from pykvgraph.llama.state import LlamaState
from pykvgraph.text.chat_template import ChatTemplate

if TYPE_CHECKING:
    from llama_cpp.llama import LogitsProcessorList, StoppingCriteriaList
    from llama_cpp.llama_grammar import LlamaGrammar

__all__ = [
    "ChatTemplate",
    "Llama",
    "LlamaCache",
    "LlamaDiskCache",
    "LlamaGrammar",
    "LlamaRAMCache",
    "LlamaState",
    "LogitsProcessorList",
    "StoppingCriteriaList",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "llama_grammar" if name == "LlamaGrammar" else "llama"
    return getattr(libllama.package(module), name)
