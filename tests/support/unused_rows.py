"""Reads states that nobody has written: `MALLOC_PERTURB_=77 python -m support.unused_rows MODEL`."""

from __future__ import annotations

import sys

import pykvgraph as kvg
from support.engines import open_context
from support.recurrent import OPTIONS, fill, read_row


def main(path: str) -> None:
    with kvg.Model(path, device="cpu") as model, open_context(model, **OPTIONS) as ctx:
        fill(ctx, 20)
        used = ctx.kv.cells(len(ctx.kv.groups) - 1).pos >= 0
        assert used.any()
        for index in range(2, ctx.kv.groups[-1].n_cells):
            assert not read_row(ctx, index).any(), index


if __name__ == "__main__":
    main(sys.argv[1])
