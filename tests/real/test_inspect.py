"""What `inspect` says of published files is what their publishers say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner
from support import real

from pykvgraph.cli import main

# config.json of HuggingFaceTB/SmolLM2-135M-Instruct and of google/gemma-3-270m, and numbers of parameters
PUBLISHED: dict[str, dict[str, Any]] = {
    "smollm2": {
        "arch": "llama",
        "n_layer": 30,
        "n_embd": 576,
        "n_head": 9,
        "n_head_kv": 3,
        "head_dim": 64,
        "n_vocab": 49_152,
        "n_ctx_train": 8_192,
        "n_params": 134_515_008,
    },
    "gemma3": {
        "arch": "gemma3",
        "n_layer": 18,
        "n_embd": 640,
        "n_head": 4,
        "n_head_kv": 1,
        "head_dim": 256,
        "n_vocab": 262_144,
        "n_ctx_train": 32_768,
        "n_params": 268_098_176,
    },
}
WINDOWS = {"smollm2": [0] * 30, "gemma3": [0 if layer % 6 == 5 else 512 for layer in range(18)]}


@pytest.mark.parametrize("name", PUBLISHED)
def test_inspect(name: str) -> None:
    done = CliRunner().invoke(main, ["inspect", "-m", str(real.FOLDER / f"{name}.gguf"), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["reason"] is None
    assert {key: told["recipe"][key] for key in PUBLISHED[name]} == PUBLISHED[name]
    assert [layer["window"] for layer in told["layers"]] == WINDOWS[name]
