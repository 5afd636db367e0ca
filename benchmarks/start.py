"""From the start of Python to a model's first token: pykvgraph beside llama_cpp, in new processes, by turns.

    python benchmarks/start.py -m model.gguf

The file is in the page cache after the first turn, which doesn't count. Seconds of the clock, and of the
processors, which vary less where the machine does other work too; medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

_TELL = "import os, time; t = os.times(); print('\\n', time.time(), t.user + t.system)"
PROGRAMS = {
    "llama_cpp": (
        "from llama_cpp import Llama; llama = Llama({model!r}, n_ctx=512, n_gpu_layers=0, verbose=False); "
        "llama('Hello', max_tokens=1, temperature=0)"
    ),
    "pykvgraph": (
        "import pykvgraph as kvg; model = kvg.Model({model!r}, device='cpu'); "
        "ctx = kvg.Context(model, n_ctx=512); list(kvg.generate(ctx, 'Hello', max_tokens=1, temperature=0.0))"
    ),
    "pykvgraph.llama": (
        "from pykvgraph.llama import Llama; "
        "llama = Llama({model!r}, n_ctx=512, n_gpu_layers=0, verbose=False); "
        "llama('Hello', max_tokens=1, temperature=0)"
    ),
}


def seconds(program: str) -> tuple[float, float]:
    """Until the first token is there: of the clock, and of the processors."""
    begin = time.time()
    run = subprocess.run(
        [sys.executable, "-c", f"{program}; {_TELL}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
    )
    end, used = map(float, run.stdout.split()[-2:])
    return end - begin, used


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in PROGRAMS}
    for _ in range(args.rounds + 1):
        for name, program in PROGRAMS.items():
            found[name].append(seconds(program.format(model=args.model)))
    for name, took in found.items():
        clock, used = (statistics.median(column) for column in zip(*took[1:], strict=True))
        print(f"{name:16} {clock:.2f} s, {used:.2f} s of the processors")


if __name__ == "__main__":
    main()
