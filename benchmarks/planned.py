"""What is planned beside what a context has: 12 kinds of models, 4 types of K and V.

    python benchmarks/planned.py                         # on the CPU
    python benchmarks/planned.py Vulkan0                 # all layers there
    python benchmarks/planned.py Vulkan0 --split         # the last half there, the others on the CPU
    python benchmarks/planned.py --coefficients          # what TGIS would decide by, beside exact plans

Needs gguf, which writes the models. Exit code 1 when a plan is off by more than 2 %.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # whose models these are

from support.architectures import write_architecture
from support.planned import KV_TYPES, MODELS, by_coefficients, compare

import pykvgraph as kvg

LIMIT = 0.02


def main() -> None:
    """Prints the largest error of each model and type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("device", nargs="?", default="cpu")
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--coefficients", action="store_true")
    asked = parser.parse_args()
    worst: dict[str, float] = {}
    n = 0
    with tempfile.TemporaryDirectory() as folder:
        for spec in MODELS:
            path = write_architecture(spec, Path(folder))
            for kv_type in KV_TYPES:
                n_gpu_layers = spec.n_layer // 2 + 1 if asked.split else -1
                try:
                    if asked.coefficients:
                        rows = list(by_coefficients(path, kv_type))
                    else:
                        rows = list(compare(path, asked.device, kv_type, n_gpu_layers))
                except kvg.UnsupportedError as refused:
                    print(f"{spec.arch:14} {kv_type:5} refused: {refused}", flush=True)
                    continue
                found = max(rows, key=lambda each: each.error)
                told = f"{found.kind} of {found.device}: {found.predicted:,} and {found.allocated:,}"
                print(f"{spec.arch:14} {kv_type:5} {100 * found.error:.3f} %  {told}", flush=True)
                worst |= {each.kind: max(worst.get(each.kind, 0.0), each.error) for each in rows}
                n += 1
    told = ", ".join(f"{kind} {100 * error:.3f} %" for kind, error in worst.items())
    print(f"{n} compared, the largest errors are: {told}")
    sys.exit(max(worst.values()) > LIMIT and not asked.coefficients)


if __name__ == "__main__":
    main()
