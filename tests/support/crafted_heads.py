"""Models whose draft head knows what they say next."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np

# what a layer adds
ADDED = ("attn_output.weight", "ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight")


def crafted(source: Path, path: Path, noise: float) -> Path:
    """The file's model without what its layers add: each token decides the next one, and the head knows it.

    noise: of the hidden state, which misleads the head at times.
    """
    shutil.copyfile(source, path)
    rng = np.random.default_rng(8)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name.endswith(ADDED):
            tensor.data[:] = 0
        elif tensor.name.endswith("nextn.eh_proj.weight"):
            n = len(tensor.data)
            tensor.data[:] = np.hstack([np.eye(n), noise * rng.standard_normal((n, n))])
        elif tensor.name.endswith(("output_norm.weight", "nextn.enorm.weight")):
            tensor.data[:] = 1
    return path
