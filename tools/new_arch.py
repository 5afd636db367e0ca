"""Where a model parts from libllama, and which row an architecture without one is like.

    python tools/new_arch.py FILE.gguf
    python tools/new_arch.py NAME       # random models that llama.cpp's test-llama-archs makes (LLAMA_ARCHS)

It says which rows have most of the file's tensors, whether the file runs, and by how much its logits differ
from libllama's. When they differ by more than the tests allow, it cuts the file down to fewer layers, until
it knows the first one that is wrong. Then it makes one tensor of that layer after another neutral (zeros;
ones for a norm) in a copy that both engines read: where they agree without a tensor, the fault is in what
that tensor does. Copies are small enough for random models; of a large model, take a file with few layers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]

from compared_apart import compare  # noqa: E402
from gguf_copy import Source  # noqa: E402
from nearest_rows import Row, nearest_rows, row_of  # noqa: E402
from support.random_archs import ABSENT, PROGRAM, write_random_archs  # noqa: E402

import pykvgraph as kvg  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="FILE|NAME")
    given = parser.parse_args().model
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        paths = [Path(given)] if Path(given).exists() else random_models(given, folder)
        agree = all(report(path, folder) for path in paths)  # until one doesn't
    sys.exit(not agree)


def random_models(name: str, folder: Path) -> list[Path]:
    """Of three seeds."""
    if not PROGRAM.exists():
        sys.exit(f"there is no file {name}, and {ABSENT}")
    paths = [path for seed in (1, 2, 3) for path in write_random_archs(name, seed, folder / str(seed))]
    return paths or sys.exit(f"there is no file {name}, and test-llama-archs knows no such architecture")


def report(path: Path, folder: Path) -> bool:
    """All that is known of the file; whether it runs, and agrees with libllama."""
    try:
        with kvg.GgufFile(path) as file:
            source = Source(path)
            print(f"\n{path.name}: {source.arch}, {source.n_layer} layers, {len(source.names)} tensors")
            refusal = why_not(file)
    except (kvg.KVGraphError, OSError) as error:  # what it accepts, the gguf package can read
        print(f"{path.name}: {error}")
        return False
    except (KeyError, ValueError) as error:
        print(f"{path.name}: no model, as its keys are not those of one: {error}")
        return False
    if refusal:
        print(f"does not run: {refusal}")
        print("its keys:", ", ".join(f"{key} {value}" for key, value in source.keys().items()))
        print_rows(nearest_rows(source))
        return False
    print(f"the row: {row_of(source.arch)}")
    verdict = compare(path)
    print(verdict)
    if not verdict.agrees and verdict.error is not None:
        explain(source, folder)
    return verdict.agrees


def why_not(file: kvg.GgufFile) -> str:
    """Why the file doesn't run, without the list of all rows; "" when it does."""
    try:
        file.model_info()
    except kvg.KVGraphError as error:
        return str(error).partition("; there are: ")[0]
    return ""


def print_rows(rows: list[Row]) -> None:
    """The nearest rows, and what the file has that theirs don't, or lacks."""
    for row in rows:
        print(f"  {row.likeness:4.0%} like {row.arch}: {row.place}")
        for what, names in (("the file has", row.beyond), ("the file lacks", row.missing)):
            if names:
                print(f"       {what} {', '.join(names)}")


def explain(source: Source, folder: Path) -> None:
    """Prints the first wrong layer, and the tensors without which it is right."""
    layer = first_wrong_layer(source, folder)
    if layer is None:
        return
    n_layer = layer + 1
    print(f"layer {layer} is the first that is wrong; a file of {n_layer} layers, of one token only:")
    print(f"  {compare(source.write(folder / 'cut.gguf', n_layer), n_tokens=1)}")
    print("  (right for one token, wrong for more: rope, the mask, the scale or the order of heads)")
    print(f"with one tensor of layer {layer} neutral:")
    for name in source.of_layer(layer):
        verdict = compare(source.write(folder / "cut.gguf", n_layer, neutral=(name,)))
        print(f"  {'AGREES' if verdict.agrees else 'differs':8} {name:40} {verdict}")
    print(
        "The fault is in what the tensors do that say AGREES. None: it is in the frame, in two places, or in"
    )
    print("what no tensor of this layer belongs to: scales, soft caps, embeddings.")


def first_wrong_layer(source: Source, folder: Path) -> int | None:
    """By halves. None: a cut file isn't taken, which is printed."""
    right, wrong = 0, source.n_layer  # with so many layers
    while wrong - right > 1:
        middle = (right + wrong) // 2
        verdict = compare(source.write(folder / "cut.gguf", middle))
        if verdict.error is None:
            print(f"cut down to {middle} layers: {verdict}")
            return None
        right, wrong = (middle, wrong) if verdict.agrees else (right, middle)
    return wrong - 1


if __name__ == "__main__":
    main()
