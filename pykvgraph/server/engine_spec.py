"""What a server's engine is made of, as data, so that another process can make one like it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pykvgraph.engine import Engine
from pykvgraph.model.device import add_rpc_server
from pykvgraph.model.model import Model
from pykvgraph.params.cpus import usable_cpus
from pykvgraph.params.params import default_threads
from pykvgraph.tiers.options import NO_LIMIT, Tiers


@dataclass(frozen=True)
class EngineSpec:
    """model, draft: GGUF files; draft may be "ngram" or "mtp", and "" is none. where: Model's arguments;
    with "mtp" they have draft_heads or an assistant.

    context: Engine's arguments, without draft and tiers. tiers: the arguments of Tiers; none: there are no
    tiers. rpc: servers whose devices are used, too. most_threads: where context says nothing of threads, not
    more than these; 0: as many as an engine takes. adapters: files and scales.
    """

    model: str
    draft: str
    where: Mapping[str, Any]
    context: Mapping[str, Any]
    tiers: Mapping[str, Any]
    rpc: tuple[str, ...] = ()
    most_threads: int = 0
    adapters: tuple[tuple[str, float], ...] = ()

    def load(self) -> Engine:
        """Raises what Model and Engine raise."""
        for endpoint in self.rpc:
            add_rpc_server(endpoint)
        model = Model(self.model, **self.where)
        draft: Model | Literal["ngram", "mtp"] | None = None
        if self.draft in ("ngram", "mtp"):
            draft = "ngram" if self.draft == "ngram" else "mtp"
        elif self.draft:
            draft = Model(self.draft, **self.where)
        tiers = Tiers(**self.tiers) if self.tiers else None
        context = {**self.context, **self._threads(model)}
        adapters = [(model.load_adapter(path), scale) for path, scale in self.adapters]
        return Engine(model, draft=draft, tiers=tiers, adapters=adapters, **context)

    def share_of(self, n: int, n_cpus: int = 0) -> EngineSpec:
        """One of n like it on a machine: its part of the memory; n_cpus, or 0: its part of this machine's."""
        n_cpus = n_cpus or max(usable_cpus() // n, 1)
        tiers = dict(self.tiers)
        if tiers and tiers["ram"] != NO_LIMIT:
            tiers["ram"] = max(tiers["ram"] // n, 1)
        context = {**self.context, "memory_share": 1 / n}
        return dataclasses.replace(self, context=context, tiers=tiers, most_threads=n_cpus)

    def _threads(self, model: Model) -> dict[str, int]:
        if not self.most_threads or self.context.get("n_threads"):
            return {}
        n = min(default_threads(model.n_params), self.most_threads)
        return {"n_threads": n, "n_threads_batch": self.context.get("n_threads_batch") or n}
