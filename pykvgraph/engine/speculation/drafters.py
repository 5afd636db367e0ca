"""Who makes drafts: the text itself, or a second model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from pykvgraph.checks import shown
from pykvgraph.context.context import Context
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.speculation.draft_model import ModelDrafter, require_same_tokens
from pykvgraph.engine.speculation.gate import Gate
from pykvgraph.engine.speculation.ngram import NgramDrafter
from pykvgraph.errors import InvalidArgumentError, UnsupportedError
from pykvgraph.model.model import Model

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


def drafter_of(
    draft: object, model: Model, n_ctx: int | Literal["auto"], context: dict[str, Any]
) -> Drafter | None:
    """Engine's argument; context: the arguments of the engine's, of which a draft model's has the sizes.

    Raises InvalidArgumentError for a model of another vocabulary, or what is none, UnsupportedError for one
    that can't go back by a few tokens, and what Context raises.
    """
    if draft is None:
        return None
    if isinstance(draft, str) and draft == "ngram":
        return NgramDrafter()
    if not isinstance(draft, Model):
        raise InvalidArgumentError(f'draft must be "ngram", a pykvgraph.Model or None, got {shown(draft)}')
    require_same_tokens(model, draft)
    draft._require_logits()
    sizes = {name: value for name, value in context.items() if name in _SIZES}
    ctx = Context(draft, n_ctx=n_ctx, swa_full=True, **sizes)
    if any(group.kind == "state" for group in ctx.kv.groups):
        ctx.close()
        raise UnsupportedError(f"draft: {draft.arch} has recurrent layers; use a draft model without")
    return ModelDrafter(ctx)
