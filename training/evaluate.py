"""Measures a passkey checkpoint without an engine: the example's runs, its cache work done on positions.

`python training/evaluate.py DIR/checkpoint.pt [--trials 100] [--grid]`
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from corpus import JUNK, KEY_FRAMES, PASS_KEY, PREFIX, QUESTION, build_tokenizer
from model import Llama
from tokenizer import Tokenizer
from train import load_model
from views import Run, follow_example, stack

RUNS = {
    "--n-junk 10 --n-grp 1 --i-pos 3": Run(10, 3),
    "--n-junk 60 --n-grp 1 --i-pos 20": Run(60, 20),
    "--n-junk 250 --n-grp 2 --i-pos 90": Run(250, 90, n_grp=2),
    "--n-junk 250 --n-grp 2 --i-pos 90 -b 512": Run(250, 90, n_grp=2, n_batch=512),
    "--n-junk 250 --n-grp 1 --i-pos 130": Run(250, 130),
    "--n-junk 250 --n-grp 1 --i-pos 190 -b 512": Run(250, 190, n_batch=512),
    "--n-junk 600 --n-grp 2 --i-pos 400 -b 512": Run(600, 400, n_grp=2, n_batch=512),
    "--n-junk 250 --n-grp 1 --i-pos 130, half discarded": Run(250, 130, half=True),
}
GRID_JUNK = [25, 50, 100, 200, 400, 800]
GRID_DEPTHS = 10


def spell(tokenizer: Tokenizer, run: Run, key: int) -> tuple[list[int], list[int]]:
    """The example's prompt, and the answer to it."""
    hidden = KEY_FRAMES[0].format(name=PASS_KEY, n=key)
    text = PREFIX + JUNK * run.i_pos + hidden + JUNK * (run.n_junk - run.i_pos)
    return tokenizer.encode(text + QUESTION.format(name=PASS_KEY), start=True), tokenizer.encode(f" {key}.")


@torch.no_grad()
def trial(model: Llama, tokenizer: Tokenizer, run: Run, seed: int) -> tuple[bool, bool]:
    """Whether the key was found, and whether it was still in the window.

    Greedy decoding finds it exactly when every token of the answer is the likeliest after the true ones
    before it.
    """
    prompt, answer = spell(tokenizer, run, random.Random(seed).randint(1, 50000))
    cache = follow_example(run, len(prompt), len(answer))
    ids = torch.tensor([prompt + answer])
    hidden = model(ids, stack([cache]))[0, len(prompt) - 1 : -1]
    found = bool((model.logits(hidden).argmax(-1) == ids[0, len(prompt) :]).all())
    begin = len(tokenizer.encode(PREFIX + JUNK * run.i_pos, start=True))
    n_key = len(tokenizer.encode(KEY_FRAMES[0].format(name=PASS_KEY, n=1))) + 2 * (len(answer) - 3)
    return found, bool(cache.alive[begin : begin + n_key].all())


def print_runs(model: Llama, tokenizer: Tokenizer, n_trials: int) -> None:
    for name, run in RUNS.items():
        n_found = sum(trial(model, tokenizer, run, seed)[0] for seed in range(n_trials))
        print(f"{name:52} {n_found:4} of {n_trials}", flush=True)


def print_grid(model: Llama, tokenizer: Tokenizer, n_trials: int) -> None:
    """Found of tried, by number of junk lines and depth; `-` where the key had been discarded."""
    total = [0, 0]
    for n_junk in GRID_JUNK:
        cells = []
        for depth in range(GRID_DEPTHS):
            run = Run(n_junk, n_junk * depth // GRID_DEPTHS, n_batch=512)
            results = [trial(model, tokenizer, run, seed) for seed in range(n_trials)]
            inside = [found for found, present in results if present]
            total = [total[0] + sum(inside), total[1] + len(inside)]
            cells.append(f"{sum(inside)}/{len(inside)}" if inside else "-")
        print(f"{n_junk:5} lines  " + " ".join(f"{cell:>6}" for cell in cells), flush=True)
    print(f"found {total[0]} of {total[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--trials", type=int, default=20, help="seeds per run, or per cell of the grid [20]")
    parser.add_argument("--grid", action="store_true", help="depth by length instead of the runs")
    parser.add_argument("--threads", type=int, default=1, help="[1]")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    show = print_grid if arguments.grid else print_runs
    show(load_model(arguments.checkpoint)[1], build_tokenizer(), arguments.trials)


if __name__ == "__main__":
    main()
