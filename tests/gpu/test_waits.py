"""kv_tier="host": how often the host waits for the device, counted from outside the library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.models import ModelSpec
from support.rpc_server import TESTS

pytestmark = pytest.mark.gpu

SPEC = ModelSpec(n_layer=3, n_head=4, n_head_kv=2, head_dim=16)
COUNT = """
import ctypes, json, os, sys
import pykvgraph as kvg
waits = ctypes.CDLL(None).waits
def of_a_token(ctx):
    before = waits()
    ctx.append(5)
    return waits() - before
found = []
for path in sys.argv[2:]:
    with kvg.Model(path, device=sys.argv[1]) as model, kvg.Context(model, n_ctx=256, kv_tier="host") as ctx:
        ctx.append(5)
        found.append(of_a_token(ctx))
        ctx.trace(os.devnull)
        found.append(of_a_token(ctx))
print(json.dumps(found))
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_no_more_often_with_more_layers(
    device: str, model_file: Callable[[ModelSpec], Path], tmp_path: Path
) -> None:
    """But where a trace wants to know when each layer was computed."""
    counter = tmp_path / "count_waits.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", counter, TESTS / "support" / "count_waits.c", "-ldl"], check=True
    )
    preload = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), str(counter)]))
    paths = [str(model_file(replace(SPEC, n_layer=n))) for n in (3, 6)]
    done = subprocess.run(
        [sys.executable, "-c", COUNT, device, *paths],
        cwd=TESTS,
        env={**os.environ, "LD_PRELOAD": preload},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    of_3, traced_3, of_6, traced_6 = json.loads(done.stdout)
    assert 0 < of_3 == of_6
    assert traced_6 >= traced_3 + 3
