"""What is planned beside what a context has: 12 kinds of models, 4 types of K and V.

    python benchmarks/planned.py                         # on the CPU
    python benchmarks/planned.py Vulkan0                 # all layers there
    python benchmarks/planned.py Vulkan0 --split         # the last half there, the others on the CPU

Needs gguf, which writes the models. Exit code 1 when something is off by more than 2 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # whose models these are

from support.architectures import write_architecture
from support.planned import KV_TYPES, MODELS, compare

import pykvgraph as kvg

LIMIT = 0.02


def main() -> None:
    """Prints the largest error of each model and type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("device", nargs="?", default="cpu")
    parser.add_argument("--split", action="store_true")
    asked = parser.parse_args()
    worst, n = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        for spec in MODELS:
            path = write_architecture(spec, Path(folder))
            for kv_type in KV_TYPES:
                n_gpu_layers = spec.n_layer // 2 + 1 if asked.split else -1
                try:
                    rows = list(compare(path, asked.device, kv_type, n_gpu_layers))
                except kvg.UnsupportedError as refused:
                    print(f"{spec.arch:14} {kv_type:5} refused: {refused}", flush=True)
                    continue
                found = max(rows, key=lambda each: each.error)
                told = f"{found.kind} of {found.device}: {found.predicted:,} and {found.allocated:,}"
                print(f"{spec.arch:14} {kv_type:5} {100 * found.error:.3f} %  {told}", flush=True)
                worst, n = max(worst, found.error), n + 1
    print(f"{n} compared, the largest error is {100 * worst:.3f} %")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
