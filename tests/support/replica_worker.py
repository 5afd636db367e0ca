"""A worker whose text is replicated, until it is killed.

python -m support.replica_worker MODEL ADDRESS
"""

from __future__ import annotations

import sys
from typing import Any

import pykvgraph as kvg
from pykvgraph import stream
from support.engines import decode, open_context, random_ids, run_of
from support.models import N_VOCAB

OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 16, "n_seq_max": 4}
PROMPT = random_ids(40, N_VOCAB, 5)
N_TEXT = 190


def main(path: str, address: str) -> None:
    with (
        kvg.Model(path, device="cpu") as model,
        open_context(model, **OPTIONS) as ctx,
        stream.open(address, timeout=600) as end,
        stream.replicated(ctx, 0, stream.Layout({end: range(model.n_layer)}), PROMPT) as copy,
    ):
        decode(ctx, run_of(PROMPT))
        token = int(ctx.logits()[-1].argmax())
        for _ in range(N_TEXT - len(PROMPT)):
            copy.send([token])
            token = int(ctx.append(token).argmax())


if __name__ == "__main__":
    main(*sys.argv[1:])
