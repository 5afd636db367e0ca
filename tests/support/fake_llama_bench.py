"""A llama-bench that measures nothing: it prints a result all the same, or does what it was told to.

    python fake_llama_bench.py [--lacks d,gp,dev] [--does WHAT] [--log FILE] [what llama-bench takes]

A run of N tokens took it N milliseconds, and the one before, which warms up, ten times as long. --log: gets
a line of JSON for each start: its options, and the GPUs of CUDA's that it may see. FILE.pids: the processes
of a run that hangs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HELP = {
    "p": "-p, --n-prompt <n>",
    "n": "-n, --n-gen <n>",
    "d": "-d, --n-depth <n>",
    "gp": "-gp <pp,tg>",
    "t": "-t, --threads <n>",
    "dev": "-dev, --device <dev0/dev1/...>",
}
COMMIT = "abc1234"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--lacks", default="")
    parser.add_argument("--does", default="")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--help", action="store_true")
    for name in ("-m", "-t", "-b", "-ub", "-ctk", "-ctv", "-ngl", "-r", "-o", "-dev", "-gp"):
        parser.add_argument(name)
    for name in ("-p", "-n", "-d"):
        parser.add_argument(name, type=int, default=0)
    return parser.parse_args()


def result(asked: argparse.Namespace) -> dict[str, Any]:
    """As ik_llama.cpp's: a -gp of 100,8 is told as a prompt of 100 and 8 tokens, and only these are timed."""
    n_prompt, n_gen = asked.p, asked.n
    n_timed = n_prompt + n_gen
    if asked.gp:
        n_prompt, n_gen = map(int, asked.gp.split(","))
        n_timed = n_gen
    told = {"build_commit": COMMIT, "n_prompt": n_prompt, "n_gen": n_gen}
    if "d" not in asked.lacks.split(","):
        told["n_depth"] = asked.d
    return {**told, "samples_ns": [n_timed * 10_000_000, n_timed * 1_000_000]}


def misbehave(asked: argparse.Namespace) -> None:
    """What ends it, or keeps it from ending. At its first token every one of them is well."""
    if asked.p == 1:
        return
    if asked.does == "fails":
        print("usage: fake_llama_bench.py")
        print("a line before", "error: no memory for this  ", "", file=sys.stderr, sep="\n")
        sys.exit(3)
    if asked.does == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if asked.does == "hangs":
        child = subprocess.Popen(["sleep", "600"])
        Path(f"{asked.log}.pids").write_text(f"{os.getpid()} {child.pid}\n")
        time.sleep(600)


def main() -> None:
    asked = parsed()
    if asked.help:
        print(
            "usage: llama-bench [options]",
            *(HELP[name] for name in HELP if name not in asked.lacks.split(",")),
            sep="\n  ",
        )
        return
    if asked.log:
        with asked.log.open("a") as log:
            said = {**vars(asked), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
            log.write(json.dumps(said, default=str) + "\n")
    misbehave(asked)
    told = result(asked)
    if asked.does == "prints words" and asked.p != 1:
        print("| model | test | t/s |")
        return
    if asked.does == "measures less" and asked.p != 1:
        told["n_prompt"] = 3
    if asked.does == "measures nothing" and asked.p != 1:
        told["samples_ns"] = []
    results = [told, told] if asked.does == "prints two" else [told]
    # a fork's own words stand behind the first bracket, where it loads the model
    print("[", *(["== {loads} the model =="] if asked.does == "talks" else []), sep="\n")
    print(",\n".join(json.dumps(each, indent=2) for each in results), "]", sep="\n")


if __name__ == "__main__":
    main()
