"""What a worker is told to do, and what it tells of itself when it can."""

from __future__ import annotations

import json

from pykvgraph.engine import Engine
from pykvgraph.server.engine_spec import EngineSpec
from pykvgraph.server.settings import Settings


def read_order(text: str) -> tuple[int, Settings, EngineSpec]:
    """A worker's number, and what its server is made of. text: what Keeper has written."""
    order = json.loads(text)
    return order["number"], Settings(**order["settings"]), EngineSpec(**order["engine"])


def room_of(engine: Engine, spec: EngineSpec) -> int:
    """Tokens of texts that its cells and its tier in memory can hold; a disk is everybody's."""
    n_cells = engine.context.n_ctx
    cell_bytes = sum(group.cell_bytes for group in engine.context.kv.groups if group.kind != "state")
    return n_cells + int(spec.tiers.get("ram", 0)) // max(cell_bytes, 1)
