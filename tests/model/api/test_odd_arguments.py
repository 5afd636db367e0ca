"""Every public call with each argument replaced by what is none: an error of pykvgraph's, or an answer."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pykvgraph as kvg

ODD: list[Any] = [
    None, True, object(), int, 1j, 1.5, float("nan"), float("inf"), -1, 10**30, -(10**30),
    "", "\0", "\ud800", "x", b"a", b"\0", [], [None], [[1]], ["\0"], [10**30], {}, {1: "a"}, {"a": 1}, {1},
    (1,), range(3), range(0, 9, 2), np.zeros(0), np.array(3), np.array([1, 2]), np.array([[1.5]]),
    np.array(["a"]), np.array([True]), np.float32("nan"), np.datetime64("2020"),
]  # fmt: skip
LEFT_OUT = {"close", "result", "results", "pieces", "bunches"}  # what ends an object, or waits
SLOW = {"Context", "Engine"}  # each call makes one


class Everything:
    """One object of each kind, and arguments that are right."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.model = kvg.Model(path, device="cpu")
        self.ctx = kvg.Context(self.model, n_ctx=64, n_seq_max=2)
        self.batch = kvg.Batch()
        self.batch.extend([1, 403, 407], 0)
        self.ctx.decode(self.batch)
        self.engine = kvg.Engine(self.model, n_ctx=128, n_seq_max=2)
        self.request = self.engine.submit("Once", kvg.SamplingParams(max_tokens=3))
        self.request.result()
        self.objects: dict[str, Any] = {
            "Model": self.model,
            "Context": self.ctx,
            "KVCache": self.ctx.kv,
            "Tokenizer": self.model.tokenizer,
            "Batch": self.batch,
            "Engine": self.engine,
            "Request": self.request,
            "GgufFile": kvg.GgufFile(path),
            "Sampler": kvg.Sampler(temperature=0.5),
            "LongReader": kvg.LongReader(kvg.Context(self.model, n_ctx=512, n_batch=32)),
        }
        file = str(folder / "file")
        names = {"seq": 0, "p0": 0, "p1": 1, "src": 0, "dst": 1, "delta": 1, "pos": 9, "pos0": 9, "n": 2}
        names |= {"divisor": 2, "token": 1, "n_vocab": 512, "max_tokens": 2}
        right: dict[str, Any] = {
            "path": file,
            "name": file,
            "prompt": "Once",
            "prompts": ["a"],
            "text": "Once",
            "ids": [1, 2],
        }
        right |= {"tokens": [1, 2], "seq_ids": (0,), "model": self.model, "ctx": self.ctx, "kv": self.ctx.kv}
        right |= {"batch": self.batch, "logits": np.zeros(512, "f4"), "request": self.request, "blob": b"abc"}
        self.right = {**names, **right, "params": kvg.SamplingParams(max_tokens=2)}

    def close(self) -> None:
        self.engine.close()
        self.ctx.close()
        self.model.close()


def methods() -> list[str]:
    """Of the classes above; what pykvgraph makes or does without an object comes first."""
    found = ["SamplingParams", "ThoughtLimit", "ContextShift", "Tiers", "Window", "Sampler", "Batch", "Place"]
    found += ["RawRows", "Context", "Engine", "Model", "GgufFile", "LongReader", "generate", "self_extend"]
    found += ["plan_memory", "abilities", *(f"plan.{name}" for name in public(kvg.plan))]
    classes = [
        "Model",
        "Context",
        "KVCache",
        "Tokenizer",
        "Batch",
        "Engine",
        "Request",
        "GgufFile",
        "Sampler",
    ]
    return found + [
        f"{each}.{name}" for each in [*classes, "LongReader"] for name in public(getattr(kvg, each))
    ]


def public(holder: Any) -> list[str]:
    """Names of functions."""
    names = [name for name in dir(holder) if not name.startswith("_") and name not in LEFT_OUT]
    return [
        name for name in names if callable(getattr(holder, name)) and has_arguments(getattr(holder, name))
    ]


def has_arguments(function: Any) -> bool:
    return bool(inspect.signature(function).parameters)


@pytest.fixture(scope="module")
def everything(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Everything]:
    all_of_them = Everything(stories, tmp_path_factory.mktemp("odd"))
    yield all_of_them
    all_of_them.close()


def called(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Calls it, and takes the first of what it gives one by one."""
    made = function(**arguments)
    if inspect.isgenerator(made):
        list(itertools.islice(made, 2))
    elif isinstance(made, (kvg.Model, kvg.Context, kvg.GgufFile)) or type(made).__name__ == "Engine":
        made.close()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in methods()]
)
def test_an_argument_that_is_none(everything: Everything, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(everything.right["path"]).parent)  # some are names of files
    holder, _, method = name.rpartition(".")
    owner = everything.objects.get(holder, kvg.plan if holder else kvg)
    function = getattr(owner, method)
    parameters = inspect.signature(function).parameters.values()
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    needed = {each.name: everything.right.get(each.name, 1) for each in named if each.default is each.empty}
    for parameter, odd in itertools.product(named, ODD):
        try:
            called(function, needed | {parameter.name: odd})
        except (kvg.KVGraphError, FileNotFoundError):
            continue
        except Exception as error:
            raise AssertionError(f"{name}({parameter.name}={odd!r}): {error!r}") from error
