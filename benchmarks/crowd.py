"""Five who talk in streams beside 200 hostile clients: their gaps, and the server's memory.

    python benchmarks/crowd.py -m model.gguf --minutes 60
    python benchmarks/crowd.py -m model.gguf --signals 200

A table, and JSON in the last line. Exit code 1 when of the five's gaps p99 is over 0.5 s, or the longest over
2 s, when one of them gets an error, or the server ends. --signals: a server is started so many times, and
told to end twice at a random moment, also of its start; over 2 s from the second signal on are too many.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ended_by_signals
import hostile_clients
import numpy as np
from support.served import served_alone
from talkers import Talkers

P99, LONGEST = 0.5, 2.0  # seconds
ALONE = 10.0  # seconds before the others come, in which memory is taken
OPTIONS = ("-c", "16384", "-np", "16", "-kvu", "--embeddings", "--pooling", "mean")


def rss_mib(pid: int) -> tuple[float, float]:
    """Of a process, and of those that it has started; one that has ended has none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        children = [child for task in tasks for child in task.read_text().split()]
    except FileNotFoundError:
        return 0.0, 0.0
    own = sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))
    return own, sum(sum(rss_mib(int(child))) for child in children)


def crowd(model: Path, minutes: float) -> dict[str, Any]:
    """What is told of the five, of the server's memory, and of what the others were answered."""
    with served_alone(model, *OPTIONS) as (url, process):
        talkers = Talkers(url)
        time.sleep(ALONE)
        alone = list(talkers.gaps)
        talkers.gaps.clear()
        rss = [rss_mib(process.pid)]
        seconds = 60 * minutes
        script = Path(hostile_clients.__file__)
        command = [sys.executable, str(script), url, str(seconds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as others:
            begin = time.monotonic()
            while others.poll() is None and process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - begin >= 60 * len(rss):
                    rss.append(rss_mib(process.pid))
            gaps = list(talkers.gaps)
            lives = process.poll() is None
            rss += [rss_mib(process.pid)] if lives else []
            talkers.end()
            if not lives:
                others.kill()
            told = others.communicate()[0]
    return {
        "minutes": minutes,
        "lives": lives,
        "alone": quantiles(alone),
        "gaps": quantiles(gaps),
        "first tokens": quantiles(talkers.firsts),
        "errors": dict(talkers.errors),
        "rss": [[round(each) for each in both] for both in rss],
        "others": json.loads(told) if told else {},
    }


def quantiles(seconds: list[float]) -> dict[str, float]:
    """How many there are, and p50, p99 and the longest in seconds."""
    if not seconds:
        return {"n": 0}
    p50, p99, longest = np.quantile(seconds, (0.5, 0.99, 1)).round(4).tolist()
    return {"n": len(seconds), "p50": p50, "p99": p99, "longest": longest}


def show(found: dict[str, Any]) -> None:
    print(f"{'':14}{'n':>8}{'p50':>10}{'p99':>10}{'longest':>10}")
    for name in ("alone", "gaps", "first tokens"):
        row = found[name]
        cells = "".join(f"{row[key]:>8.3f} s" for key in ("p50", "p99", "longest") if key in row)
        print(f"{name:14}{row['n']:>8}{cells}")
    print(
        "errors of the five:", found["errors"] or "none", "" if found["lives"] else "; the server has ended"
    )
    told = " ".join(f"{own}+{children}" for own, children in found["rss"])
    print("RSS in MiB, with its grammars' processes, at the start, each minute and at the end:", told)
    for name, codes in found["others"].items():
        print(f"{name:16}", "  ".join(f"{code}: {n}" for code, n in codes.items()))


def is_good(found: dict[str, Any]) -> bool:
    gaps = found["gaps"]
    fits = gaps["n"] > 0 and gaps["p99"] <= P99 and gaps["longest"] <= LONGEST
    return bool(fits and found["lives"] and not found["errors"])


def signals(model: Path, n: int) -> bool:
    """Whether each server has ended in time."""
    found = ended_by_signals.ends(model, n)
    print(f"{'ended in':>10}{'signal at':>12}{'code':>6}  said last")
    for each in found[:10]:
        print(f"{each.seconds:>8.2f} s{each.at:>10.2f} s{each.code:>6}  {each.said}")
    print(json.dumps([each._asdict() for each in found]))
    return all(each.seconds <= ended_by_signals.LONGEST for each in found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--signals", type=int, default=0, metavar="N")
    args = parser.parse_args()
    if args.signals:
        sys.exit(not signals(args.model, args.signals))
    found = crowd(args.model, args.minutes)
    show(found)
    print(json.dumps(found))
    sys.exit(not is_good(found))


if __name__ == "__main__":
    main()
