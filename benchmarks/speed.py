"""pykvgraph beside libllama on models of random weights, with the machine described: benchmarks/results/.

python benchmarks/speed.py                  # minutes; on a quiet machine
python benchmarks/speed.py --plot results.json out.png
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shapes import GEMMA3, GPT_OSS, LARGE, QWEN3, QWEN35, ROOT, SMALL, STORIES, machine, written
from support.architectures import ArchSpec  # shapes has told where
from support.models import ModelSpec, WeightType

# name: what is run. 219 M parameters, 968 M, and 0.3 M, where a token's time is mostly not arithmetic.
MODELS: dict[str, tuple[ModelSpec | ArchSpec | Path, tuple[str, ...]]] = {
    "219M-Q8_0": (
        ModelSpec(weights=WeightType.Q8_0, **SMALL),
        ("shallow", "deep", "sequences", "cache", "load"),
    ),
    "219M-Q4_0": (
        ModelSpec(weights=WeightType.Q4_0, **SMALL),
        ("shallow", "deep", "sequences", "cache", "load"),
    ),
    "968M-Q4_0": (ModelSpec(weights=WeightType.Q4_0, **LARGE), ("shallow", "deep", "load")),
    "qwen3-Q8_0": (QWEN3, ("shallow", "deep")),
    "gemma3-Q8_0": (GEMMA3, ("shallow", "deep")),
    "qwen35-Q8_0": (QWEN35, ("shallow", "deep")),
    "gpt-oss-Q8_0": (GPT_OSS, ("shallow", "deep")),
    "stories260K": (STORIES, ("overhead",)),
}
# name: arguments of `pykvgraph bench`; "load" is measured here
RUNS = {
    "shallow": "-p 512 -n 64 -d 16",
    "deep": "-p 0 -n 64 -d 4032 --cache shift --cache holes",
    "sequences": "-p 0 -n 0 -d 4032 --cache seqs",
    "cache": "-p 0 -n 0 -d 8064 --cache state --cache defrag",
    "overhead": "-p 0 -n 0 -d 64 --cache overhead",
    "load": "",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "speed.json", help="where to write")
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "models", help="folder of the models")
    parser.add_argument(
        "--only", nargs="+", choices=MODELS, default=list(MODELS), help="models (default: all)"
    )
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="which (default: all)")
    parser.add_argument("-r", type=int, default=5, help="repetitions (default: 5)")
    parser.add_argument(
        "--plot", type=Path, nargs=2, metavar=("JSON", "PNG"), help="draw results, run nothing"
    )
    args = parser.parse_args()
    if args.plot:
        plot(*args.plot)
        return
    args.models.mkdir(parents=True, exist_ok=True)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": machine(), "runs": []}
    for name in args.only:
        source, runs = MODELS[name]
        path = written(source, args.models)
        for run in runs:
            if run not in args.runs:
                continue
            print(f"{name}, {run}:", flush=True)
            results = load(path, args.r) if run == "load" else measure(path, RUNS[run], args.r)
            report["runs"].append({"model": name, "run": run, "results": results})
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(args.json)


def measure(
    model: Path, arguments: str, repetitions: int, rivals: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """A process each, so that nothing is left over from the one before. Rivals: as of --vs, more of them."""
    command = [sys.executable, "-m", "pykvgraph", "bench", "-m", model.name, "-o", "json"]
    for rival in ("libllama", *rivals):
        command += ["--vs", rival]
    # elsewhere than in the source tree, which Python would take for the package
    done = subprocess.run(
        [*command, "-r", str(repetitions), *arguments.split()],
        cwd=model.parent,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    rows: list[dict[str, Any]] = json.loads(done.stdout)["results"]
    for row in rows:
        ratio = "" if row["ratio"] is None else f"  ours is {row['ratio']:.2f}x"
        rate = "    not measured" if row["median"] is None else f"{row['median']:>10.4g} {row['unit']}"
        print(f"{row['test']:<18} {row['depth']:>5} {row['engine']:<24} {rate}{ratio}", flush=True)
    return rows


# Loads a model and decodes 600 tokens; prints the seconds of the loading, and resident KiB at the end.
LOAD = """
import sys, time
from pathlib import Path
import pykvgraph as kvg
from pykvgraph.bench.engines import LibllamaEngine, OurEngine
from pykvgraph.bench.tests import random_ids
from pykvgraph.bench.libllama import LibllamaModel
from pykvgraph.params.params import ContextParams
path, engine = Path(sys.argv[1]), sys.argv[2]
kvg.Model(path).tokenizer  # both libraries are in memory, and the file in the page cache
start = time.perf_counter()
model = kvg.Model(path, device="cpu") if engine == "pykvgraph" else LibllamaModel(path)
seconds = time.perf_counter() - start
params = ContextParams(n_ctx=1024, n_threads=2, n_threads_batch=2, defrag_threshold=-1)
if engine == "pykvgraph":
    opened = OurEngine(params, model)
else:
    opened = LibllamaEngine(params, model, flash=engine.endswith("1"))
opened.prefill(random_ids(opened, 600), 0)
status = Path("/proc/self/status").read_text()
print(seconds, status.split("VmRSS:")[1].split()[0])
"""


def load(model: Path, repetitions: int) -> list[dict[str, Any]]:
    """Milliseconds to load a model that is in the page cache, and what is resident once it has decoded."""
    engines = ("pykvgraph", "libllama -fa 1", "libllama -fa 0")
    found: dict[str, list[tuple[float, int]]] = {engine: [] for engine in engines}
    for _ in range(repetitions):
        for engine in engines:
            out = subprocess.run(
                [sys.executable, "-c", LOAD, model.name, engine],
                cwd=model.parent,
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            ).stdout.split()
            found[engine].append((float(out[0]), int(out[1])))
    rows = []
    for engine in engines:
        seconds = statistics.median(each[0] for each in found[engine])
        resident = statistics.median(each[1] for each in found[engine])
        print(f"{engine:<24} {seconds * 1e3:8.1f} ms {resident / 1024:8.0f} MiB", flush=True)
        rows.append({"test": "load", "engine": engine, "seconds": seconds, "resident_kib": resident})
    return rows


COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")


def plot(source: Path, target: Path) -> None:
    """Our median over the better of libllama's, a bar each, by model."""
    from pykvgraph.viz.figure import new_figure

    runs = json.loads(source.read_text(encoding="utf-8"))["runs"]
    best: dict[tuple[str, str], float] = {}
    for run in runs:
        for row in run["results"]:
            if row.get("ratio") is not None:
                key = (run["model"], f"{row['test']} at {row['depth']}")
                best[key] = min(best.get(key, float("inf")), row["ratio"])
    models = list(dict.fromkeys(model for model, _ in best))
    figure = new_figure(8, 1 + 0.24 * len(best))
    axes = figure.add_subplot()
    for color, model in zip(itertools.cycle(COLORS), models, strict=False):
        mine = {f"{model} {test}": ratio for (of, test), ratio in best.items() if of == model}
        axes.barh(list(mine), list(mine.values()), color=color, label=model)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("pykvgraph / the better of libllama's flags, by tokens or cells a second")
    figure.savefig(target)


if __name__ == "__main__":
    main()
