"""Seconds to the first token of a long prompt: decoded, and loaded from memory and from the disk.

    python benchmarks/tiers.py MODEL...             # on a quiet machine; about a minute a model
    python benchmarks/tiers.py --serve MODEL        # tokens a second with saves, and without, by turns

Each first token from the disk is that of a new process, which has loaded the model and nothing else. "cold":
the files are not in the page cache (posix_fadvise). "memory": the same engine, whose cells others have taken.
The time is that from submit() to the first piece. "same": whether the tokens are those of the decoded prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pykvgraph as kvg

N_PROMPT = 4000
N_CTX = 4608
N_REPEATS = 3
TALK = kvg.SamplingParams(max_tokens=8, temperature=0)
DEVICE = "cpu"


def prompt_of(model: kvg.Model, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(model.n_vocab) for _ in range(N_PROMPT)]


def engine_of(model: kvg.Model, tiers: kvg.Tiers | None, **options: Any) -> kvg.Engine:
    return kvg.Engine(model, n_ctx=N_CTX, n_seq_max=2, n_threads=2, n_threads_batch=2, tiers=tiers, **options)


def asked(engine: kvg.Engine, prompt: list[int]) -> dict[str, Any]:
    said = engine.submit(prompt, TALK).result()
    return {"seconds": said.ttft, "cached": said.n_cached, "tokens": said.tokens}


def first_token(path: Path, folder: Path) -> dict[str, Any]:
    """In a new process."""
    with kvg.Model(path, device=DEVICE) as model, engine_of(model, kvg.Tiers("4G", "20G", folder)) as engine:
        return asked(engine, prompt_of(model))


def decoded_and_from_memory(path: Path, folder: Path) -> dict[str, Any]:
    """The disk has the prompt afterwards."""
    found: dict[str, Any] = {"decoded": [], "memory": []}
    with kvg.Model(path, device=DEVICE) as model, engine_of(model, kvg.Tiers("4G", "20G", folder)) as engine:
        for each in range(N_REPEATS):
            found["decoded"].append(asked(engine, prompt_of(model, each)))
        for each in range(N_REPEATS):
            found["memory"].append(asked(engine, prompt_of(model, each)))
    return found


def child(what: str, path: Path, folder: Path) -> Any:
    done = subprocess.run(
        [sys.executable, __file__, "--child", what, str(path), str(folder)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tempfile.gettempdir(),
    )
    return json.loads(done.stdout.splitlines()[-1])


def forget_pages(folder: Path) -> None:
    os.sync()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(path: Path) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="pykvgraph-tiers-"))
    try:
        found = child("memory", path, folder)
        found["bytes"] = sum(each.stat().st_size for each in folder.iterdir())
        found["warm"] = [child("first", path, folder) for _ in range(N_REPEATS)]
        found["cold"] = []
        for _ in range(N_REPEATS):
            forget_pages(folder)
            found["cold"].append(child("first", path, folder))
    finally:
        shutil.rmtree(folder)
    expected = found["decoded"][0]["tokens"]
    row: dict[str, Any] = {
        "model": path.stem,
        "n_prompt": N_PROMPT,
        "mib_on_disk": round(found["bytes"] / 2**20, 1),
    }
    decoding = statistics.median(each["seconds"] for each in found["decoded"])
    row["decoded"] = round(decoding, 3)
    for name in ("memory", "warm", "cold"):
        seconds = statistics.median(each["seconds"] for each in found[name])
        row[name] = round(seconds, 4)
        row[f"{name}_share"] = round(seconds / decoding, 4)
        row[f"{name}_cached"] = min(each["cached"] for each in found[name])
    same = [each["tokens"] == expected for each in (found["memory"][0], *found["warm"], *found["cold"])]
    row["same"] = all(same)
    return row


def served(path: Path, with_tiers: bool) -> tuple[float, dict[str, int]]:
    """Tokens a second of 14 texts, with cells for 5: what they leave is saved, and nothing is loaded.

    And how much was saved until then, was on the disk, and was dropped.
    """
    folder = Path(tempfile.mkdtemp(prefix="pykvgraph-tiers-"))
    tiers = kvg.Tiers("256M", "4G", folder) if with_tiers else None
    try:
        with (
            kvg.Model(path, device=DEVICE) as model,
            kvg.Engine(model, n_ctx=2048, n_seq_max=4, n_threads=2, n_threads_batch=2, tiers=tiers) as engine,
        ):
            rng = random.Random(0)
            prompts = [[rng.randrange(model.n_vocab) for _ in range(250)] for _ in range(14)]
            begin = time.perf_counter()
            requests = [engine.submit(each, kvg.SamplingParams(max_tokens=64)) for each in prompts]
            n = sum(len(prompt) + len(r.result().tokens) for prompt, r in zip(prompts, requests, strict=True))
            rate, stats = n / (time.perf_counter() - begin), engine.stats().tiers
            names = ("saved", "written", "dropped", "unwritten")
            return rate, {name: getattr(stats, name) for name in names if stats}
    finally:
        shutil.rmtree(folder)


def serving(path: Path, n_rounds: int) -> dict[str, Any]:
    """By turns; the ratio is the median of those of the rounds."""
    rates: list[tuple[float, float]] = []
    counts: dict[str, int] = {}
    for each in range(n_rounds):
        pair = {
            with_saves: served(path, with_saves) for with_saves in ((True, False), (False, True))[each % 2]
        }
        rates.append((round(pair[True][0], 1), round(pair[False][0], 1)))
        counts = pair[True][1]
    ratio = statistics.median(with_saves / without for with_saves, without in rates)
    return {"model": path.stem, "with_and_without": rates, "ratio": round(ratio, 4), "last_round": counts}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        what, path, folder = sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
        print(
            json.dumps(
                decoded_and_from_memory(path, folder) if what == "memory" else first_token(path, folder)
            )
        )
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="+", type=Path)
    parser.add_argument("--serve", action="store_true", help="tokens a second, with saves and without")
    parser.add_argument("--rounds", type=int, default=N_REPEATS, help="of --serve")
    parser.add_argument("--json", type=Path, help="a file that gets the figures, beside those that it has")
    options = parser.parse_args()
    report: dict[str, Any] = {}
    if options.json and options.json.exists():
        report = json.loads(options.json.read_text(encoding="utf-8"))
    for path in options.model:
        what = "serving" if options.serve else "first_token"
        row = serving(path, options.rounds) if options.serve else measure(path.resolve())
        print(json.dumps(row), flush=True)
        report.setdefault(what, {})[path.stem] = row
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
