"""Goes on from a saved file in a process of its own: `python -m support.restored MODEL FILE TOKEN P`.

Prints as JSON the tokens that follow TOKEN where the saved sequence ends, then those that follow it at its
checkpoint before position P, and how many tokens were decoded in all.
"""

from __future__ import annotations

import json
import sys

import numpy as np

import pykvgraph as kvg
from support.engines import open_context
from support.recurrent import OPTIONS

N_NEXT = 20


def next_tokens(ctx: kvg.Context, token: int, seq: int = 0) -> list[int]:
    """The likeliest ones, each decoded alone."""
    found = []
    for _ in range(N_NEXT):
        token = int(np.argmax(ctx.append(token, seq)))
        found.append(token)
    return found


def main(path: str, state: str, token: int, p: int) -> None:
    options = {**OPTIONS, "n_batch": 1, "n_ubatch": 1, "checkpoint_cells": 48}
    with kvg.Model(path, device="cpu") as model, open_context(model, **options) as ctx:
        ctx.kv.load_file(state, seq=0)
        at_the_end = next_tokens(ctx, token)
        there = ctx.kv.rewind(0, p)
        print(json.dumps([at_the_end, there, next_tokens(ctx, token)]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
