"""Damaged split models, each opened in a process of its own (support/hostile.py).

    python -m support.hostile_split FOLDER FIRST COUNT

makes mutants FIRST to FIRST + COUNT - 1, and prints one JSON object each: `mutant`, `changes`, `verdict`.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from support import chance
from support.gguf_bytes import STRING
from support.gguf_parts import INTEGERS, KINDS, Parts, take_apart
from support.hostile import in_child, tell, use
from support.models import TINY, write_split
from support.mutations import ARCHITECTURES, BYTES, odd_value, write_mutant

SPLIT_KEYS = ["split.no", "split.count", "split.tensors.count"]


def any_of(rng: random.Random, model: list[Parts]) -> tuple[int, Parts]:
    at = rng.randrange(len(model))
    return at, model[at]


def odd_split_key(rng: random.Random, model: list[Parts]) -> str:
    at, part = any_of(rng, model)
    name, kind = rng.choice(SPLIT_KEYS), rng.choice([*INTEGERS, *KINDS])
    near = [0, 1, 2, 3, 4, 11, 12, 13]
    value = odd_value(rng, kind) if kind == STRING or rng.random() < 0.5 else rng.choice(near)
    part.set(name, kind, [value] if rng.random() < 0.1 else value)
    return f"part {at}: {name} = {value!r:.40} of type {kind}"


def same_odd_count(rng: random.Random, model: list[Parts]) -> str:
    value = rng.choice([0, 1, 2, 4, 2**15, 2**16 - 1])
    for part in model:
        part.set("split.count", 2, value)
    return f"split.count = {value} in all"


def no_split_key(rng: random.Random, model: list[Parts]) -> str:
    at, part = any_of(rng, model)
    name = rng.choice(SPLIT_KEYS)
    part.keys = [key for key in part.keys if key.name != name.encode()]
    return f"part {at} without {name}"


def moved_tensor(rng: random.Random, model: list[Parts]) -> str:
    (source, giver), (target, taker) = any_of(rng, model), any_of(rng, model)
    if not giver.tensors:
        return "no tensor to move"
    tensor = rng.choice(giver.tensors)
    taker.tensors.append(deepcopy(tensor))
    copied = rng.random() < 0.5
    if not copied:
        giver.tensors = [other for other in giver.tensors if other is not tensor]
    return f"{tensor.name!r} {'copied' if copied else 'moved'} from part {source} to {target}"


def other_architecture(rng: random.Random, model: list[Parts]) -> str:
    at, part = any_of(rng, model)
    value = rng.choice([*ARCHITECTURES, b"llama"])
    part.set("general.architecture", STRING, value)
    return f"part {at} of architecture {value!r}"


def swapped(rng: random.Random, model: list[Parts]) -> str:
    a, b = rng.sample(range(len(model)), 2)
    model[a], model[b] = model[b], model[a]
    return f"parts {a} and {b} swapped"


CHANGES: list[Callable[[random.Random, list[Parts]], str]] = [
    *(odd_split_key, odd_split_key, odd_split_key, same_odd_count, no_split_key),
    *(moved_tensor, moved_tensor, other_architecture, swapped),
]


def write_split_mutant(model: list[Parts], strangers: list[Parts], index: int, paths: list[Path]) -> str:
    """Damages the model whose files these are, and tells how."""
    rng, model = random.Random(chance.seed(f"split-{index}")), deepcopy(model)
    changes = [rng.choice(CHANGES)(rng, model) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
    if rng.random() < 0.1:
        at = rng.randrange(len(model))
        model[at] = strangers[at]
        changes.append(f"part {at} of another model")
    for part, path in zip(model, paths, strict=True):
        part.raw().write(path)
    at = rng.randrange(len(model))
    what = rng.random()
    if what < 0.1:
        paths[at].unlink()
        changes.append(f"part {at} is missing")
    elif what < 0.25:
        data = bytearray(paths[at].read_bytes())
        n_directory = len(data) - len(model[at].raw().data)
        changes.append(f"part {at}: {rng.choice(BYTES)(rng, data, n_directory)}")
        paths[at].write_bytes(data)
    elif what < 0.5:
        changes.append(f"part {at}: {write_mutant(model[at], 'split', index, paths[at])}")
    return "; ".join(changes) or "none"


def take_split_apart(seed: int) -> list[Parts]:
    with tempfile.TemporaryDirectory() as directory:
        files = write_split(replace(TINY, seed=seed), Path(directory))
        return [take_apart(path.read_bytes()) for path in files]


def main(folder: Path, first: int, count: int) -> None:
    os.environ["GGML_NO_BACKTRACE"] = "1"
    model, strangers = take_split_apart(0), take_split_apart(1)
    names = [f"-{no + 1:05}-of-{len(model):05}.gguf" for no in range(len(model))]
    sound = [folder / f"sound{name}" for name in names]
    for part, path in zip(model, sound, strict=True):
        part.raw().write(path)
    tell("sound", "none", use(sound[0]))
    for index in range(first, first + count):
        paths = [folder / f"split-{index}{name}" for name in names]
        changes = write_split_mutant(model, strangers, index, paths)

        def task(path: Path = paths[0]) -> str:
            return use(path)

        verdict = in_child(task)
        tell(f"split-{index}", changes, verdict)
        for path in paths:
            if not verdict.startswith("!"):
                path.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
