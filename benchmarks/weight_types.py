"""Speed by type of weights, beside libllama, and how much of the memory's speed decoding reaches.

    python benchmarks/weight_types.py                            # ten minutes; on a quiet machine
    python benchmarks/weight_types.py --also smollm2.gguf --vs ik_llama.cpp/build/bin/llama-bench
    python benchmarks/weight_types.py --plot results.json out.png

The model is a llama of 137 M parameters with random weights, which libllama quantizes, all tensors alike.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import numpy.typing as npt
from shapes import BY_TOKEN, EXPERTS_OF_GPT_OSS, EXPERTS_OF_QWEN3, ROOT, SMALL, machine, written
from speed import measure
from support.architectures import ArchSpec  # shapes has told where
from support.models import ModelSpec, WeightType

import pykvgraph as kvg

SOURCE = ModelSpec(weights=WeightType.F16, **{**SMALL, "n_layer": 10})
TYPES = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "F16", "BF16"),
)
TESTS = "-p 512 -n 48 -t 2 -d 16"
TESTS_BESIDE_FORKS = "-p 512 -n 48 -t 2 -d 0"  # some forks' llama-bench has no -d
N_THREADS = 2  # as TESTS says
N_READ = 512 << 20  # bytes: more than any cache holds
N_TURNS = 40  # of a read and some tokens: what a virtual machine's memory gives changes within a second
N_TOKENS = 8  # of a turn


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=Path, default=ROOT / "build" / "weight_types.json", help="where to write"
    )
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "models", help="folder of the models")
    parser.add_argument("--only", nargs="*", choices=TYPES, default=TYPES, help="types (default: all)")
    parser.add_argument("--also", nargs="+", type=Path, default=[], metavar="GGUF", help="other files")
    parser.add_argument("--experts", action="store_true", help="also two models with experts, of some 200 M")
    parser.add_argument("--vs", action="append", default=[], help="also a llama-bench, as of pykvgraph bench")
    parser.add_argument("-r", type=int, default=3, help="repetitions (default: 3)")
    parser.add_argument(
        "--plot", type=Path, nargs=2, metavar=("JSON", "PNG"), help="draw results, run nothing"
    )
    args = parser.parse_args()
    if args.plot:
        plot(*args.plot)
        return
    args.models.mkdir(parents=True, exist_ok=True)
    files = {name: quantized(name, args.models) for name in args.only}
    if args.experts:
        files |= {
            "experts-MXFP4": written(EXPERTS_OF_GPT_OSS, args.models),
            "experts-Q4_K": quantized("Q4_K", args.models, EXPERTS_OF_QWEN3),
        }
    files |= {path.stem: path.resolve() for path in args.also}
    words = np.ones(N_READ // 8, np.uint64)
    report: dict[str, Any] = {"machine": machine(), "runs": []}
    for name, path in files.items():
        n_bytes = read_by_token(path)
        rows = measure(path, TESTS_BESIDE_FORKS if args.vs else TESTS, args.r, args.vs)
        share, memory = share_of_memory(path, n_bytes, words)
        print(
            f"{name}: {n_bytes / 1e6:.0f} MB a token, read at {share:.0%} of {memory / 1e9:.1f} GB/s",
            flush=True,
        )
        run = {"model": name, "bytes": n_bytes, "memory": memory, "share": share, "results": rows}
        report["runs"].append(run)
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(args.json)


def quantized(name: str, directory: Path, spec: ModelSpec | ArchSpec = SOURCE) -> Path:
    """The model in this type, written on first use."""
    source = written(spec, directory)
    if name == "F16":
        return source
    target = directory / f"{source.stem}-{name}.gguf"
    if not target.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        suffix = "_S" if name in ("Q3_K", "Q4_K", "Q5_K") else ""
        params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}{suffix}")
        params.pure = True
        if llama_cpp.llama_model_quantize(bytes(source), bytes(target), ctypes.byref(params)):
            raise SystemExit(f"libllama doesn't quantize to {name}")
    return target


def read_by_token(path: Path) -> int:
    """Bytes of the weights that each token reads: without rows that are looked up and other experts."""
    reader = gguf.GGUFReader(path)
    is_tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    counts = {
        key.split(".")[-1]: field.contents() for key, field in reader.fields.items() if ".expert_" in key
    }
    n_expert = counts.get("expert_count", 0)
    share = counts["expert_used_count"] / n_expert if n_expert else 1.0
    return sum(
        round(int(tensor.n_bytes) * (share if "_exps" in tensor.name else 1.0))
        for tensor in reader.tensors
        if tensor.name not in BY_TOKEN or tensor.name == "output.weight" or is_tied
    )


def share_of_memory(path: Path, n_bytes: int, words: npt.NDArray[np.uint64]) -> tuple[float, float]:
    """At what share of the memory's speed decoding reads weights, and that speed in bytes a second.

    Memory is read and tokens are decoded by turns, and each turn has a share of its own: medians.
    """
    shares, rates = [], []
    with kvg.Model(path) as model, kvg.Context(model, n_ctx=512, n_threads=N_THREADS) as ctx:
        for turn in range(N_TURNS):
            rate = read_rate(words)
            begin = time.perf_counter()
            for i in range(N_TOKENS):
                batch = kvg.Batch()
                batch.add(0, turn * N_TOKENS + i, [0], logits=True)
                ctx.decode(batch)
            seconds = time.perf_counter() - begin
            rates.append(rate)
            shares.append(N_TOKENS * n_bytes / seconds / rate)
    return statistics.median(shares), statistics.median(rates)


def read_rate(words: npt.NDArray[np.uint64]) -> float:
    """Bytes a second at which all threads together read memory."""
    parts = np.array_split(words, N_THREADS)
    threads = [threading.Thread(target=np.bitwise_or.reduce, args=(part,)) for part in parts]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return words.nbytes / (time.perf_counter() - begin)


def plot(source: Path, target: Path) -> None:
    """Tokens a second, ours over libllama's default, and decoding's share of the memory's speed."""
    from pykvgraph.viz.figure import new_figure

    runs = json.loads(source.read_text(encoding="utf-8"))["runs"]
    names = [run["model"] for run in runs]
    figure = new_figure(9, 1.2 + 0.3 * len(names))
    ratios, shares = figure.subplots(1, 2, sharey=True)
    places = np.arange(len(names))
    for offset, test, color in ((-0.2, "pp512", "#4477aa"), (0.2, "tg48", "#ee6677")):
        ours, theirs = (
            [rate_of(run, test, engine) for run in runs] for engine in ("pykvgraph", "libllama -fa 1")
        )
        label = "prompt of 512" if test.startswith("pp") else "decode"
        ratios.barh(places + offset, np.divide(ours, theirs), 0.4, color=color, label=label)
    ratios.axvline(1.0, color="black", linewidth=1)
    ratios.set_xlabel("tokens a second: pykvgraph / libllama")
    ratios.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    shares.barh(places, [run["share"] for run in runs], 0.6, color="#228833")
    shares.axvline(1.0, color="black", linewidth=1)
    shares.set_xlabel("weights read while decoding / what memory gives")
    ratios.set_yticks(places, names)
    ratios.invert_yaxis()
    figure.savefig(target)


def rate_of(run: dict[str, Any], test: str, engine: str) -> float:
    """Tokens a second, the deepest test of that name."""
    return float([r["median"] for r in run["results"] if r["test"] == test and r["engine"] == engine][-1])


if __name__ == "__main__":
    main()
