"""Who makes drafts: the text itself, the model's draft head or assistant, or a second model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from pykvgraph.checks import shown
from pykvgraph.context.auto_n_ctx import Draft
from pykvgraph.context.context import Context
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.speculation.draft_head import HeadDrafter
from pykvgraph.engine.speculation.draft_model import ModelDrafter
from pykvgraph.engine.speculation.gate import Gate
from pykvgraph.engine.speculation.ngram import NgramDrafter
from pykvgraph.errors import InvalidArgumentError, UnsupportedError
from pykvgraph.model.model import Model
from pykvgraph.sequence.lookahead import require_draft_head, require_same_tokens

DraftKind = Literal["ngram", "mtp", "model"]

_SIZES = ("n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch")


class Drafter(Protocol):
    """Proposes tokens that may follow texts. It may be wrong, and never raises."""

    def drafts(
        self,
        asked: Sequence[tuple[RequestSequence, int]],
        gate: Gate,
        make_room: Callable[[int], bool],
    ) -> list[list[int]]:
        """For each text at most so many tokens that may follow it.

        make_room(n): whether n cells of the engine's are empty now, once prefixes are given up for them.
        """
        ...

    def learn(self, sequence: RequestSequence, n_before: int) -> None:
        """A text has said something; n_before: tokens that it had before."""
        ...

    def close(self) -> None:
        """Frees what it has."""
        ...


def kind_of(draft: object, model: Model) -> DraftKind | None:
    """What makes drafts; None: nothing does. A model with a draft head or an assistant has drafts by that.

    Raises InvalidArgumentError for what is no kind of drafts, and UnsupportedError for "mtp" of a model that
    has neither a draft head nor an assistant.
    """
    if draft is None:
        return "mtp" if model.drafts else None
    if isinstance(draft, Model):
        return "model"
    if isinstance(draft, str) and draft == "ngram":
        return "ngram"
    if not isinstance(draft, str) or draft != "mtp":
        raise InvalidArgumentError(
            f'draft must be "ngram", "mtp", a pykvgraph.Model or None, got {shown(draft)}'
        )
    require_draft_head(draft, model)
    return "mtp"


def draft_model_of(draft: object, model: Model, context: dict[str, Any]) -> Draft | None:
    """The draft model, and its context's arguments, of those of the engine's; None: there is no second model.

    Raises InvalidArgumentError for a model of another vocabulary.
    """
    if not isinstance(draft, Model):
        return None
    require_same_tokens(model, draft)
    draft._require_whole()
    return draft, {**{name: value for name, value in context.items() if name in _SIZES}, "swa_full": True}


def drafter_of(kind: DraftKind, ctx: Context, draft: Draft | None, n_ctx: int) -> Drafter:
    """Drafts for texts of an engine's context; by a second model with a cache of n_ctx cells.

    Raises UnsupportedError for a model that can't go back by a few tokens, and what Context raises.
    """
    if kind == "mtp":
        return HeadDrafter(ctx)
    if draft is None:
        return NgramDrafter()
    model, arguments = draft
    second = Context(model, n_ctx=n_ctx, **arguments)
    if any(group.kind == "state" for group in second.kv.groups):
        second.close()
        raise UnsupportedError(f"draft: {model.arch} has recurrent layers; use a draft model without")
    return ModelDrafter(second)
