"""A Llama of ours and one of llama-cpp-python, the referee, on the same file."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pykvgraph as kvg

llama_cpp: Any = importlib.import_module("llama_cpp")  # whose types are not for strict eyes

# where logits are rounded differently, a draw between two tokens may go the other way: so no F16 here
EXACT: dict[str, Any] = {"type_k": 0, "type_v": 0, "n_threads": 1, "n_threads_batch": 1, "verbose": False}

Pair = tuple[Any, Any]


@pytest.fixture(scope="session")
def both(stories: Path) -> Iterator[Pair]:
    theirs = llama_cpp.Llama(str(stories), **EXACT)
    with kvg.Llama(str(stories), **EXACT) as ours:
        yield ours, theirs
    theirs.close()


@pytest.fixture(scope="session")
def both_with_logits(stories: Path) -> Iterator[Pair]:
    theirs = llama_cpp.Llama(str(stories), logits_all=True, **EXACT)
    with kvg.Llama(str(stories), logits_all=True, **EXACT) as ours:
        yield ours, theirs
    theirs.close()


@pytest.fixture
def llm(stories: Path) -> Iterator[kvg.Llama]:
    with kvg.Llama(str(stories), n_ctx=128) as llm:
        yield llm


def plain(answer: Any) -> Any:
    """An answer, or a stream of chunks, without what differs from call to call."""
    if not isinstance(answer, dict):
        return [plain(chunk) for chunk in answer]
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


@pytest.fixture
def same(both: Pair) -> Callable[..., Any]:
    """Calls a method of both; returns what ours said, which must be what theirs said."""

    def ask(method: str, *arguments: Any, **named: Any) -> Any:
        ours, theirs = (plain(getattr(llama, method)(*arguments, **named)) for llama in both)
        assert ours == theirs
        return ours

    return ask
