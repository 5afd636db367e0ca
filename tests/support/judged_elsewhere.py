"""The rule, ten times as wide, for a model that a device computes: `python -m support.judged_elsewhere`.

Arguments: MODEL, a device, the ENDPOINT of an RPC server, whose device is then RPC0, and a `kv_tier`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pykvgraph as kvg
from support.architectures import ArchSpec
from support.engines import prompt_then_singles, random_ids
from support.judge import judge
from support.models import N_VOCAB, WeightType

# and what they have: windows, norms of heads, soft caps, sinks, experts, K and V of other layers
FAMILIES = [
    ArchSpec("qwen3moe", n_expert=8, weights=WeightType.Q8_0),
    ArchSpec("gemma2", window=24),
    ArchSpec("gemma3", 3, window=24, scaling="linear", weights=WeightType.F16),
    # all of its experts: a device's rounding may choose another one
    ArchSpec("gpt-oss", 2, 128, n_ff=64, n_expert=2, window=24, expert_weights=WeightType.MXFP4),
    ArchSpec("gemma4", 4, window=24, head_dim_window=64, n_shared=2, n_embd_layer=32),
    ArchSpec("phi3", head_dim=16, fused=True, scaling="longrope"),
]
SLACK = 10  # their kernels round more coarsely than the CPU's


def judge_elsewhere(path: Path, device: str, kv_tier: str = "device") -> None:
    """A prompt longer than a window, and single tokens."""
    ids = random_ids(80, N_VOCAB, seed=1)
    judge(
        path,
        lambda engine: prompt_then_singles(engine, ids, 50),
        n_ctx=128,
        device=device,
        slack=SLACK,
        attentions=("auto",),
        kv_tier=kv_tier,
    )


if __name__ == "__main__":
    kvg.add_rpc_server(sys.argv[3])
    judge_elsewhere(Path(sys.argv[1]), sys.argv[2], *sys.argv[4:])
