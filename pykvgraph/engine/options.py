"""What an engine is told, checked before anything is made, and the context and the steps that come of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from pykvgraph.checks import flag, integer, real, shown
from pykvgraph.context.context import Context
from pykvgraph.context.context_shift import can_move
from pykvgraph.engine.compressed import N_KEPT
from pykvgraph.engine.sizes import MemoryBudget, Sizes, sizes_for
from pykvgraph.engine.speculation.drafters import draft_model_of, drafter_of, kind_of
from pykvgraph.engine.speculation.speculation import MOST_ROWS, Speculation
from pykvgraph.engine.step import Stepper
from pykvgraph.errors import InvalidArgumentError, UnsupportedError
from pykvgraph.model.adapter import Adapter, pairs_of
from pykvgraph.model.model import Model
from pykvgraph.params.params import MARGIN
from pykvgraph.plan.memory_model import SPECULATION_SHARE
from pykvgraph.sequence.sequence import EVERY
from pykvgraph.tiers.options import Tiers


@dataclass(frozen=True)
class EngineOptions:
    """How an engine runs; the fields are Engine's arguments, and `context` has those of its context.

    Raises InvalidArgumentError, which names the field.
    """

    n_ctx: int | Literal["auto"] = "auto"
    n_seq_max: int = 16
    n_batch: int = 512
    prefix_cache: bool = True
    overcommit: bool = False
    max_itl: float | None = None
    draft: Literal["ngram", "mtp"] | Model | None = None
    draft_max: int = 16
    draft_share: float = SPECULATION_SHARE
    cache_reuse: int = 0
    tiers: Tiers | None = None
    memory_share: float = 1.0
    margin: int = MARGIN
    background: bool = True
    adapters: Iterable[tuple[Adapter, float]] = ()
    pin_cells: int | None = None
    prefix_compress: float | None = None
    context: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = {"checkpoint_cells", "checkpoint_bytes"} & self.context.keys()
        if own:
            raise InvalidArgumentError(f"{min(own)}: the engine sizes it itself")
        n_ctx = self.n_ctx
        checked = {
            "adapters": pairs_of(self.adapters),
            "n_ctx": n_ctx if isinstance(n_ctx, str) and n_ctx == "auto" else integer(n_ctx, "n_ctx", 1),
            "n_seq_max": integer(self.n_seq_max, "n_seq_max", 1),
            "n_batch": integer(self.n_batch, "n_batch"),
            "max_itl": None if self.max_itl is None else real(self.max_itl, "max_itl", 1e-6, 1e6),
            "draft_max": integer(self.draft_max, "draft_max", 1),
            "draft_share": real(self.draft_share, "draft_share", 0.0, 1.0),
            "memory_share": real(self.memory_share, "memory_share", 1e-6, 1.0),
            "margin": integer(self.margin, "margin", 0, 99),
            "prefix_cache": flag(self.prefix_cache, "prefix_cache"),
            "cache_reuse": integer(self.cache_reuse, "cache_reuse", 0),
            "overcommit": flag(self.overcommit, "overcommit"),
            "background": flag(self.background, "background"),
        }
        if self.pin_cells is not None:
            checked["pin_cells"] = integer(self.pin_cells, "pin_cells", 0)
        if self.prefix_compress is not None:
            checked["prefix_compress"] = real(self.prefix_compress, "prefix_compress", 0.05, 0.95)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._require_prefix_cache()

    def _require_prefix_cache(self) -> None:
        """By what needs it."""
        if self.tiers is not None and not (isinstance(self.tiers, Tiers) and self.prefix_cache):
            raise InvalidArgumentError(
                f"tiers must be pykvgraph.Tiers, with prefix_cache, got {shown(self.tiers)}"
            )
        for name in ("prefix_compress", "cache_reuse"):
            if getattr(self, name) and not self.prefix_cache:
                raise InvalidArgumentError(f"{name}: nothing is cached without prefix_cache")

    def open(self, model: Model) -> tuple[Context, Stepper]:
        """A context of this size, and what takes steps on it.

        Raises what Context, sizes_for() and the draft's model raise, InvalidArgumentError for a draft that
        is none, and UnsupportedError for cache_reuse and tiers where the cache can't.
        """
        kind = kind_of(self.draft, model)
        given = {**self.context, "adapters": self.adapters}
        batch = {"n_batch": self.n_batch, "n_ubatch": given.pop("n_ubatch", min(self.n_batch, 512))}
        if kind is not None:  # each text asks for the logits of its last token and of every draft
            batch["n_outputs_max"] = self.n_seq_max * (1 + min(self.draft_max, self.n_batch))
        n_seqs = self.n_seq_max + (0 if self.prefix_compress is None else N_KEPT)
        second = draft_model_of(self.draft, model, {**given, **batch, "n_seq_max": n_seqs})
        budget = MemoryBudget(self.memory_share, self.margin)
        n_states = min(self.draft_max, MOST_ROWS) if kind is not None else 0
        n_cells = self.n_ctx if isinstance(self.n_ctx, int) else None
        sizes = sizes_for(model, n_cells, self.n_seq_max, batch, n_states, budget, second, **given)
        ctx = Context(model, **{**given, **batch, "n_seq_max": n_seqs, **sizes.context})
        try:
            self._require_cells(ctx)
            speculation = None
            if kind is not None and sizes.has_draft:
                every = EVERY if self.prefix_cache and sizes.n_points else 0
                drafter = drafter_of(kind, ctx, second, sizes.n_ctx)
                speculation = Speculation(drafter, self.draft_max, self.draft_share, every)
            return ctx, self._stepper(ctx, sizes, speculation)
        except BaseException:
            ctx.close()
            raise

    def _require_cells(self, ctx: Context) -> None:
        """That can do what is asked of them."""
        if self.tiers is not None and ctx.kv.ages:
            raise UnsupportedError(
                "tiers: rows that age can't be taken out of the cache; use one type for K and one for V"
            )
        if self.cache_reuse and not can_move(ctx):
            raise UnsupportedError("cache_reuse: this model's cache can't be shifted: nothing can be moved")

    def _stepper(self, ctx: Context, sizes: Sizes, speculation: Speculation | None) -> Stepper:
        return Stepper(
            ctx,
            n_points=sizes.n_points,
            shares=self.prefix_cache,
            overcommit=self.overcommit,
            max_itl=self.max_itl,
            speculation=speculation,
            reuse=self.cache_reuse,
            tiers=self.tiers,
            n_pinned=ctx.n_ctx // 4 if self.pin_cells is None else self.pin_cells,
            compress=self.prefix_compress,
        )
