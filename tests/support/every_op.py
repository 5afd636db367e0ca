"""Every operation of the cache in one script: what it computes must not depend on where that is done.

`python -m support.every_op MODEL ENDPOINT TYPE TIER NAME=VALUE...` runs it in a process of its own, on a
model whose arguments are given, `RPC0` being the device of the RPC server at ENDPOINT, K and V of a type and
in a `kv_tier`, and prints how far it is from the CPU.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import numpy as np

import pykvgraph as kvg
from support.engines import Logits, Token, decode, open_context, random_ids, run_of
from support.judge import nmse
from support.models import N_VOCAB

OPTIONS: dict[str, Any] = {"n_ctx": 256, "n_seq_max": 3, "defrag_threshold": -1}


def every_op(ctx: kvg.Context) -> list[Logits]:
    """The logits after each step: the prompt's, then a row for each operation."""
    kv = ctx.kv

    def next_of(seq: int) -> Logits:
        return decode(ctx, [Token(40 + seq, kv.seq_pos_max(seq) + 1, (seq,))])

    rows = [decode(ctx, run_of(random_ids(50, N_VOCAB)))]
    kv.seq_rm(0, 8, 24)
    kv.seq_add(0, 24, -1, -16)
    rows.append(next_of(0))
    kv.seq_cp(0, 1, 0, -1)
    kv.seq_div(1, 0, 20, 2)  # copies first
    kv.seq_add(1, 20, -1, -10)
    rows.append(next_of(1))
    kv.seq_rm(0, 3, 6)
    kv.defrag("sort")
    rows += [next_of(0), next_of(1)]
    kv.load(kv.save(seq=0), seq=2)
    kv.seq_rm(1, 0, -1)
    for pos in range(0, 20, 2):
        kv.seq_rm(2, pos, pos + 1)
    kv.defrag("fill")
    rows += [next_of(2), next_of(0)]
    return rows


def worst_step(found: list[Logits], expected: list[Logits]) -> float:
    """The greatest of the steps' NMSE: a prompt of many rows hides none of the others."""
    return max(nmse(a, b) for a, b in zip(found, expected, strict=True))


def mean_error(found: list[Logits], exact: list[Logits]) -> float:
    """NMSE of the operations, without the prompt: what rounding to few bits costs varies between them."""
    return float(np.mean([nmse(a, b) for a, b in zip(found[1:], exact[1:], strict=True)]))


def on_cpu(path: Path, kv_type: str = "f32") -> list[Logits]:
    with (
        kvg.Model(path, device="cpu") as model,
        open_context(model, flash_attn="off", type_k=kv_type, type_v=kv_type, **OPTIONS) as ctx,
    ):
        return every_op(ctx)


def main(path: str, endpoint: str, kv_type: str, kv_tier: str, *arguments: str) -> None:
    values = dict(argument.split("=", 1) for argument in arguments)
    device = values.pop("device")
    options: dict[str, Any] = {name: ast.literal_eval(value) for name, value in values.items()}
    (server,) = kvg.add_rpc_server(endpoint)
    assert kvg.add_rpc_server(endpoint) == (server,)  # once
    assert server.name == "RPC0"
    with (
        kvg.Model(path, device=device, **options) as model,
        open_context(model, type_k=kv_type, type_v=kv_type, kv_tier=kv_tier, **OPTIONS) as ctx,
    ):
        print(*model.layer_devices)
        try:
            open_context(model, type_k="bf16", kv_tier=kv_tier, **OPTIONS).close()
            raise AssertionError("a server is asked to keep what it may not know")
        except kvg.UnsupportedError as refused:
            assert "RPC0" in str(refused)
        print(worst_step(every_op(ctx), on_cpu(Path(path), kv_type)))


if __name__ == "__main__":
    main(*sys.argv[1:])
