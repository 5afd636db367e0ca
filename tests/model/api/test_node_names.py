"""ggml's own trace of a graph, which prints the nodes' names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import pykvgraph as kvg
with kvg.Model(sys.argv[1], device="cpu") as model, kvg.Context(model, n_ctx=64) as ctx:
    list(kvg.generate(ctx, [1, 2, 3], max_tokens=2))
"""


def test_a_trace_tells_which_node_is_which(stories: Path) -> None:
    """Each product as its weight, inputs by their meaning, and where each layer attends and ends."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(stories)],
        env={**os.environ, "GGML_SCHED_DEBUG": "2", "KVGRAPH_LOG": "debug"},
        capture_output=True,
        text=True,
        check=True,
    )
    nodes = set(re.findall(r"node #\s*\d+ \(\s*\w+\):\s+(\S+)", done.stderr))
    wanted = {"embedded", "logits"}
    for layer in range(5):
        wanted |= {f"{name}-{layer}" for name in ("k_cells", "v_cells", "attention", "layer")}
        wanted |= {
            f"blk.{layer}.{name}" for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_down")
        }
    assert wanted <= nodes, wanted - nodes
    assert "tokens" in done.stderr and "mask" in done.stderr
