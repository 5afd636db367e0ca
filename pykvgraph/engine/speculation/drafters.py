"""Who makes drafts: the text itself, or a second model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from pykvgraph.checks import shown
from pykvgraph.context.auto_n_ctx import Draft
from pykvgraph.context.context import Context
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.speculation.draft_model import ModelDrafter
from pykvgraph.engine.speculation.gate import Gate
from pykvgraph.engine.speculation.ngram import NgramDrafter
from pykvgraph.errors import InvalidArgumentError, UnsupportedError
from pykvgraph.model.model import Model
from pykvgraph.sequence.lookahead import require_same_tokens

_SIZES = ("n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch")


class Drafter(Protocol):
    """Proposes tokens that may follow texts. It may be wrong, and never raises."""

    def drafts(self, asked: Sequence[tuple[RequestSequence, int]], gate: Gate) -> list[list[int]]:
        """For each text at most so many tokens that may follow it."""
        ...

    def learn(self, sequence: RequestSequence, n_before: int) -> None:
        """A text has said something; n_before: tokens that it had before."""
        ...

    def close(self) -> None:
        """Frees what it has."""
        ...


def draft_model_of(draft: object, model: Model, context: dict[str, Any]) -> Draft | None:
    """The draft model, and its context's arguments, of those of the engine's; None: there is no second model.

    Raises InvalidArgumentError for a model of another vocabulary, or what is none.
    """
    if draft is None or (isinstance(draft, str) and draft == "ngram"):
        return None
    if not isinstance(draft, Model):
        raise InvalidArgumentError(f'draft must be "ngram", a pykvgraph.Model or None, got {shown(draft)}')
    require_same_tokens(model, draft)
    draft._require_whole()
    return draft, {**{name: value for name, value in context.items() if name in _SIZES}, "swa_full": True}


def drafter_of(draft: Draft | None, n_ctx: int) -> Drafter:
    """Drafts by a second model with a cache of so many cells, or by the text itself.

    Raises UnsupportedError for a model that can't go back by a few tokens, and what Context raises.
    """
    if draft is None:
        return NgramDrafter()
    model, arguments = draft
    ctx = Context(model, n_ctx=n_ctx, **arguments)
    if any(group.kind == "state" for group in ctx.kv.groups):
        ctx.close()
        raise UnsupportedError(f"draft: {model.arch} has recurrent layers; use a draft model without")
    return ModelDrafter(ctx)
