"""A program that is short of memory: `python -m support.short_of_memory MODEL`, with `support.models.WIDE`.

Prints a line per refusal; ends with an error when something was not refused, or when what was refused changed
the cache, or when the same calls don't work once there is memory again.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import numpy as np

import pykvgraph as kvg
from support.engines import batch_of, open_context, run_of
from support.kv_rows import same_cells

HARD = resource.getrlimit(resource.RLIMIT_AS)[1]
OPTIONS = {"n_batch": 512, "n_ubatch": 256, "n_seq_max": 3, "type_k": "f32", "type_v": "f32"}


def leave(mebibytes: int) -> None:
    """No more memory than this from now on."""
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (mebibytes << 20), HARD))


def refused(call: Callable[[], object]) -> None:
    try:
        call()
    except (kvg.DeviceError, MemoryError) as error:
        print(type(error).__name__)
    else:
        sys.exit("there was memory enough: this proves nothing")


def prepare(model: kvg.Model) -> kvg.Context:
    """Two sequences in turn; a third shares scattered cells, whose copies go through scratch."""
    ctx = open_context(model, n_ctx=800, defrag_threshold=-1, **OPTIONS)
    tokens = [token for i in range(150) for seq in range(2) for token in run_of([5 + i], i, (seq,))]
    ctx.decode(batch_of([token._replace(logits=False) for token in tokens]))
    for p0 in range(0, 150, 6):
        ctx.kv.seq_cp(0, 2, p0, p0 + 5)
    return ctx


def main(path: str) -> None:
    model = kvg.Model(path, device="cpu")
    ctx, other = prepare(model), prepare(model)
    everything = batch_of(run_of([5] * 256, 150, (1,)))
    before = ctx.kv.cells()
    ctx.kv.defrag("sort")
    leave(4)
    for _ in range(2):  # an allocator that has failed once is not to be trusted
        refused(ctx.kv.update)  # 16 MiB of scratch
        refused(lambda: ctx.kv.seq_add(2, 0, -1, 7))
    refused(lambda: open_context(model, n_ctx=5000, **OPTIONS))
    refused(ctx.kv.save)
    resource.setrlimit(resource.RLIMIT_AS, (HARD, HARD))
    assert same_cells(ctx.kv.cells(), before)
    other.kv.defrag("sort")
    for each in (ctx, other):
        each.kv.seq_add(2, 0, -1, 7)
        each.kv.update()
        each.decode(everything)
    assert ctx.kv.save() == other.kv.save()
    assert np.array_equal(ctx.logits(), other.logits())


if __name__ == "__main__":
    main(sys.argv[1])
