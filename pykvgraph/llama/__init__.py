"""llama-cpp-python's face on pykvgraph: `from pykvgraph.llama import Llama`, or `pykvgraph.Llama`.

Small classes that stand for arguments, such as LlamaGrammar, are llama-cpp-python's own.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from pykvgraph._native import libllama
from pykvgraph._native.fork import importing as _importing
from pykvgraph.llama.llama import Llama
from pykvgraph.llama.state import LlamaState

if TYPE_CHECKING:
    from llama_cpp.llama import LogitsProcessorList, StoppingCriteriaList
    from llama_cpp.llama_grammar import LlamaGrammar

    from pykvgraph.chat.chat_template import ChatTemplate
    from pykvgraph.llama.cache import LlamaCache, LlamaDiskCache, LlamaRAMCache

# imported when somebody asks for it
_OURS = {"ChatTemplate": "chat.chat_template"} | dict.fromkeys(
    ("LlamaCache", "LlamaDiskCache", "LlamaRAMCache"), "llama.cache"
)

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
    if name in _OURS:
        with _importing:
            return getattr(_import_module(f"pykvgraph.{_OURS[name]}"), name)
    module = "llama_grammar" if name == "LlamaGrammar" else "llama"
    return getattr(libllama.package(module), name)
