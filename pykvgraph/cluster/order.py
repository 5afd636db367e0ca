"""What a worker is told to do, and what it tells of itself when it can."""

from __future__ import annotations

import json
from typing import NamedTuple

from pykvgraph.engine import Engine
from pykvgraph.server.engine_spec import EngineSpec
from pykvgraph.server.settings import Settings


class Order(NamedTuple):
    """number: of the worker. copies: whether it exchanges copies of what it decodes with others."""

    number: int
    settings: Settings
    engine: EngineSpec
    copies: bool


class WorkerReady(NamedTuple):
    """n_ctx: cells of its cache. n_tokens: that it has room for. copies_at: where it takes copies of what
    others have; "": nowhere.
    """

    n_ctx: int
    n_tokens: int
    copies_at: str


def read_order(text: str) -> Order:
    """text: what Supervisor has written."""
    order = json.loads(text)
    return Order(
        order["number"], Settings(**order["settings"]), EngineSpec(**order["engine"]), order["copies"]
    )


def read_told(text: str) -> WorkerReady:
    """text: what a worker has told, as JSON."""
    return WorkerReady(**json.loads(text))


def room_of(engine: Engine, spec: EngineSpec) -> int:
    """Tokens of texts that its cells and its tier in memory can hold; a disk is everybody's."""
    n_cells = engine.context.n_ctx
    cell_bytes = sum(group.cell_bytes for group in engine.context.kv.groups if group.kind != "state")
    return n_cells + int(spec.tiers.get("ram", 0)) // max(cell_bytes, 1)
