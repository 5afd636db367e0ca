"""pykvgraph beside libllama on models of random weights, with the machine described: benchmarks/results/.

python benchmarks/speed.py                  # minutes; on a quiet machine
python benchmarks/speed.py --plot results.json out.png
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # whose models these are, only larger

from support.models import ModelSpec, WeightType, write_model  # noqa: E402

import pykvgraph as kvg  # noqa: E402

WIDTHS: dict[str, Any] = {"n_layer": 16, "n_embd": 1024, "n_head": 16, "n_head_kv": 4, "n_ff": 3584}
MODELS = [ModelSpec(weights=weights, **WIDTHS) for weights in (WeightType.Q8_0, WeightType.Q4_0)]
# name: arguments of `pykvgraph bench`
RUNS = {
    "shallow": "-p 512 -n 64 -d 16",
    "deep": "-p 0 -n 64 -d 4032 --cache shift",
    "sequences": "-p 0 -n 0 -d 4032 --cache seqs",
    "cache": "-p 0 -n 0 -d 4032 --cache state --cache defrag",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "speed.json", help="where to write")
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "models", help="folder of the models")
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
    for spec in MODELS:
        path = write_model(spec, args.models)
        for run in args.runs:
            print(f"{spec}, {run}:", flush=True)
            report["runs"].append(
                {"model": str(spec), "run": run, "results": measure(path, RUNS[run], args.r)}
            )
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(args.json)


def measure(model: Path, arguments: str, repetitions: int) -> list[dict[str, Any]]:
    """A process each, so that nothing is left over from the one before."""
    command = [sys.executable, "-m", "pykvgraph", "bench", "-m", model.name, "--vs", "libllama", "-o", "json"]
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
        rate = f"{row['median']:>10.4g} {row['unit']}"
        print(f"{row['test']:<18} {row['depth']:>5} {row['engine']:<24} {rate}{ratio}", flush=True)
    return rows


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    return {
        "cpu": names[0] if names else platform.processor(),
        "n_cpus": len(os.sched_getaffinity(0)),
        "features": sorted(flag for flag in flags if flag.startswith(("avx", "amx"))),
        "pykvgraph": kvg.__version__,
        "ggml": kvg.library_info().ggml_version_running,
    }


def plot(source: Path, target: Path) -> None:
    """Our median over each engine's, a bar each."""
    from pykvgraph.viz.figure import new_figure

    runs = json.loads(source.read_text(encoding="utf-8"))["runs"]
    rows = [(run["model"], row) for run in runs for row in run["results"] if row["ratio"] is not None]
    labels = [
        f"{model.split('-')[2]} {row['test']} at {row['depth']}, {row['engine']}" for model, row in rows
    ]
    figure = new_figure(9, 1 + 0.26 * len(rows))
    axes = figure.add_subplot()
    axes.barh(labels, [row["ratio"] for _, row in rows], color="#4477aa")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("ours / theirs, tokens (cells) a second; medians of interleaved runs")
    figure.savefig(target)


if __name__ == "__main__":
    main()
