"""The passkey test's table: a hundred keys for each configuration, libllama beside it, cache types, faults.

    make bars                                       # all of it, into build/bars.json
    python benchmarks/passkey_bars.py --seeds 5     # a quick look

Every configuration, and which fault is looked for on which of them, was written down before measuring. Only
the drawn places came later, when Q4_0 had missed a bar at one fixed place. The faults need a libkvgraph that
was built with KVGRAPH_TEST_HOOKS; without one they are left out, as the table says.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libllama_passkey import LibllamaPasskey

import pykvgraph as kvg
from pykvgraph._native.library import lib
from pykvgraph.bench.libllama import opened
from pykvgraph.cli.passkey import grid
from pykvgraph.demos.passkey import Task, Trial, default_n_ctx, run
from pykvgraph.models import embedded_model
from pykvgraph.params.params import ContextParams


@dataclass(frozen=True)
class Configuration:
    """A task whose seeds vary. `low`, `high`: the share of found keys that is asked for."""

    name: str
    task: Task
    low: float = 0.0
    high: float = 1.0
    key_moves: bool = False  # whether every counter must be above 0
    n_batch: int = 512
    kv_type: str = "f16"


FIXED = [
    Configuration("self-extend, as llama.cpp", Task(n_junk=250, i_pos=90, n_grp=2), 0.95),
    Configuration("shift, as llama.cpp", Task(n_junk=250, i_pos=130), 0.95),
    Configuration("shift, key shifted and moved", Task(n_junk=250, i_pos=190), 0.95, key_moves=True),
    Configuration("self-extend, key moved too", Task(n_junk=600, i_pos=400, n_grp=2), 0.95, key_moves=True),
]
# the first shift gives up positions 32 to 543, this line is at about 200
SHIFTED_OUT = Configuration("key shifted out", Task(n_junk=250, i_pos=10), high=0.02)
# A key is read at the end of the window, then everything moves by half a window: K that was not rotated is in
# the question's future.
FAR_SHIFT = Configuration("one far shift", Task(n_junk=205, i_pos=195), 0.95, n_batch=2048)
# Attention doesn't ask in which cell a row is: reading one row too far loses one row a run, and runs are as
# long as a batch.
SHORT_RUNS = Configuration("runs of two cells", Task(n_junk=250, i_pos=215), 0.95, n_batch=2)
FAULTS = {  # site: the configuration on which the accuracy must be 30 points lower
    "shift-skip": FAR_SHIFT,
    "shift-sign": FAR_SHIFT,
    "defrag-source": SHORT_RUNS,
}
COUNTERS = ("discards", "shifted_cells", "moved_cells", "key_cells_moved")
# Each key at a place drawn by its seed: at one place of one text all keys meet the same roundings, so that a
# row of FIXED is one draw in a quantized cache. Seeds have the same keys and places in both runs of 250.
DRAWN = [
    Configuration("self-extend 250, drawn", Task(n_junk=250, n_grp=2)),
    Configuration("shift 250, drawn", Task(n_junk=250)),
    Configuration("self-extend 600, drawn", Task(n_junk=600, n_grp=2)),
]
# K and V of a type, and how much less than in F16 may be found in each row
TYPE_DROPS = {"q8_0": 0.02, "q4_0": 0.05}
FAULT_DROP = 0.3
N_FAULT_SEEDS = 30  # a fault's effect is large, and runs of two cells take their time
FOUND_LOW = 0.95  # of the grid, and of drawn places in F16


def main() -> int:
    args = parse_arguments()
    start = time.perf_counter()
    with kvg.Model(args.m, device="cpu") as model:
        rows = [measure(model, args, configuration) for configuration in [*FIXED, SHIFTED_OUT]]
        rows += measure_types(model, args, rows[: len(FIXED)])
        if has_faults():
            rows += measure_faults(model, args)
        rows.append(measure_grid(model, args))
    report = {
        "model": Path(args.m).name,
        "seeds": args.seeds,
        "first_seed": args.first_seed,
        "faults": "measured" if has_faults() else "left out: this libkvgraph has no fault points",
        "rows": rows,
        "seconds": time.perf_counter() - start,
    }
    Path(args.json).parent.mkdir(parents=True, exist_ok=True)
    Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"faults {report['faults']}; {report['seconds']:.0f} s; {args.json}")
    return 0 if all(row.get("met", True) for row in rows) else 1


def measure(model: kvg.Model, args: argparse.Namespace, configuration: Configuration) -> dict[str, Any]:
    """One row: our keys, libllama's keys, what was counted, whether the bar was met."""
    ours = trials(model, args, configuration)
    row = row_of(configuration.name, configuration, ours)
    counters = {name: sum(getattr(trial, name) for trial in ours) for name in COUNTERS}
    met = configuration.low <= share_of(row) <= configuration.high
    row |= {
        "bar": f">= {configuration.low:.0%}" if configuration.low else f"<= {configuration.high:.0%}",
        "met": met and (not configuration.key_moves or all(counters.values())),
        **counters,
        **libllama_found(model, args, configuration),
    }
    show(row)
    return row


def row_of(name: str, configuration: Configuration, tried: list[Trial]) -> dict[str, Any]:
    """What every row of keys tells."""
    return {
        "name": name,
        "task": dataclasses.asdict(configuration.task),
        "n_batch": configuration.n_batch,
        "found": sum(trial.found for trial in tried),
        "n": len(tried),
    }


def libllama_found(
    model: kvg.Model, args: argparse.Namespace, configuration: Configuration
) -> dict[str, int]:
    """The first of these seeds through libllama."""
    tasks = seeded(configuration.task, args)[: args.libllama_seeds]
    if not tasks:
        return {}
    path, n_ctx = Path(args.m), n_ctx_of(model, configuration)
    n_batch = configuration.n_batch
    params = ContextParams(n_ctx=n_ctx, n_batch=n_batch, n_ubatch=n_batch, n_threads=args.t)
    with opened(path, params) as (_, context):
        other = LibllamaPasskey(context, model, n_ctx, n_batch)
        return {"libllama_found": sum(other.run(task) for task in tasks), "libllama_n": len(tasks)}


def measure_types(
    model: kvg.Model, args: argparse.Namespace, fixed: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Keys in quantized caches. `fixed`: F16's rows of FIXED."""
    drawn = measure_type(model, args, DRAWN, "f16", [FOUND_LOW] * len(DRAWN))
    rows = list(drawn)
    for configurations, in_f16 in ((FIXED, fixed), (DRAWN, drawn)):
        for kv_type, drop in TYPE_DROPS.items():
            lows = [share_of(row) - drop for row in in_f16]
            rows += measure_type(model, args, configurations, kv_type, lows)
    return rows


def measure_type(
    model: kvg.Model,
    args: argparse.Namespace,
    configurations: list[Configuration],
    kv_type: str,
    lows: list[float],
) -> list[dict[str, Any]]:
    """Rows of the keys that are still in the window when they are asked for. lows: the shares to be found."""
    rows = []
    for configuration, low in zip(configurations, lows, strict=True):
        tried = trials(model, args, dataclasses.replace(configuration, kv_type=kv_type))
        inside = [trial for trial in tried if trial.in_window]
        row = row_of(f"{configuration.name}, {kv_type}", configuration, inside)
        row |= {"bar": f">= {low:.1%}", "met": share_of(row) >= low}
        show(row)
        rows.append(row)
    return rows


def share_of(row: dict[str, Any]) -> float:
    """Of its keys, how many were found; 0 when there are none."""
    return float(row["found"] / max(1, row["n"]))


def measure_faults(model: kvg.Model, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each fault's configuration without it, then the same seeds with the fault switched on."""
    args = argparse.Namespace(**{**vars(args), "seeds": min(args.seeds, N_FAULT_SEEDS)})
    sound = {c.name: measure(model, args, c) for c in dict.fromkeys(FAULTS.values())}
    rows = list(sound.values())
    for site, configuration in FAULTS.items():
        with fault(site):
            broken = trials(model, args, configuration)
        high = share_of(sound[configuration.name]) - FAULT_DROP
        row = row_of(f"{configuration.name}, {site}", configuration, broken)
        row |= {"bar": f"<= {high:.0%}", "met": share_of(row) <= high}
        show(row)
        rows.append(row)
    return rows


def measure_grid(model: kvg.Model, args: argparse.Namespace) -> dict[str, Any]:
    """Depth over length, where the key is still in the window."""
    task = Task(seed=args.first_seed)
    with open_context(model, args, default_n_ctx(model, 1, task.n_keep)) as ctx:
        measured: list[Trial] = []
        grid(ctx, task, args.grid_trials, False, args.plot, measured)
    inside = [trial for trial in measured if trial.in_window]
    found = sum(trial.found for trial in inside)
    row = {
        "name": "grid, in the window",
        "found": found,
        "n": len(inside),
        "out_of_window": len(measured) - len(inside),
        "bar": f">= {FOUND_LOW:.0%}",
        "met": found / len(inside) >= FOUND_LOW,
    }
    show(row)
    return row


def trials(model: kvg.Model, args: argparse.Namespace, configuration: Configuration) -> list[Trial]:
    n_ctx, n_batch = n_ctx_of(model, configuration), configuration.n_batch
    with open_context(model, args, n_ctx, n_batch, configuration.kv_type) as ctx:
        return [run(ctx, task) for task in seeded(configuration.task, args)]


def n_ctx_of(model: kvg.Model, configuration: Configuration) -> int:
    return default_n_ctx(model, configuration.task.n_grp, configuration.task.n_keep)


def seeded(task: Task, args: argparse.Namespace) -> list[Task]:
    return [dataclasses.replace(task, seed=args.first_seed + i) for i in range(args.seeds)]


def open_context(
    model: kvg.Model, args: argparse.Namespace, n_ctx: int, n_batch: int = 512, kv_type: str = "f16"
) -> kvg.Context:
    return kvg.Context(
        model,
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_threads=args.t,
        n_threads_batch=args.t,
        type_k=kv_type,
        type_v=kv_type,
    )


@contextmanager
def fault(site: str) -> Iterator[None]:
    """Switched on in this thread."""
    lib().kvg_test_fault(site.encode(), 1)
    try:
        yield
    finally:
        lib().kvg_test_fault(site.encode(), 0)


def has_faults() -> bool:
    try:
        lib().kvg_test_fault(b"shift-skip", 0)
    except kvg.UnsupportedError:
        return False
    return True


def show(row: dict[str, Any]) -> None:
    beside = f"{row['libllama_found']:>4} of {row['libllama_n']}" if "libllama_found" in row else "-"
    ours = f"{row['found']} of {row['n']}"
    verdict = f"{row['bar']:>8} {'met' if row['met'] else 'NOT MET'}" if "bar" in row else ""
    print(f"{row['name']:<42} {ours:>10}  libllama {beside:>11}  {verdict}".rstrip(), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-m", metavar="MODEL", default=str(embedded_model()), help="default: the embedded one"
    )
    parser.add_argument("--seeds", type=int, default=100, help="keys for each configuration (default: 100)")
    parser.add_argument("--first-seed", type=int, default=1, help="of a hundred that follow (default: 1)")
    parser.add_argument(
        "--libllama-seeds", type=int, default=20, help="how many of them libllama reads too (default: 20)"
    )
    parser.add_argument("--grid-trials", type=int, default=2, help="keys for each place (default: 2)")
    parser.add_argument("-t", type=int, help="CPU threads (default: all)")
    parser.add_argument("--json", default="build/bars.json", help="where to write (default: build/bars.json)")
    parser.add_argument("--plot", help="a PNG of the grid")
    args = parser.parse_args()
    if args.seeds < 1 or args.grid_trials < 1 or args.libllama_seeds < 0:
        parser.error("--seeds and --grid-trials must be at least 1, --libllama-seeds at least 0")
    return args


if __name__ == "__main__":
    sys.exit(main())
