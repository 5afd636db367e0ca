"""Tokens that a draft model or head proposes are decoded beside the last one, for when they are said."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Literal

from pykvgraph.checks import Integers, instance, integer, shown
from pykvgraph.context.context import Context, LastOutput
from pykvgraph.context.way_back import WayBack, cannot_go_back, most_back
from pykvgraph.errors import CacheFullError, InvalidArgumentError, KVGraphError, NotCopied, UnsupportedError
from pykvgraph.model.model import Model
from pykvgraph.sequence.sequence import TokenSequence

_TOKENS = "tokenizer.ggml.tokens"
_FIRST = 0.85  # the share of tokens that are expected to hold, before any is known: four at first
_KEPT = 0.95  # of what is known, with each token that is compared
_LONGEST_PAUSE = 32  # tokens without a draft, where none of the last ones' tokens held


class Lookahead(NotCopied):
    """The outputs of one text's tokens, some of them known before these tokens are said.

    draft: a context of a smaller model with the same vocabulary, whose sequence 0 this object has; "mtp": the
    draft head or the assistant of the context's own model. draft_max: tokens of a draft at most. With
    recurrent layers a draft has less than half as many tokens as checkpoint_bytes has room for states. What
    is said stays the same: only outputs of tokens that were really said are handed out, and the cells of all
    others are removed.
    A draft has as many tokens as hold about every second time, by how often the last ones did, and one at
    least; where less than half of them hold there are pauses behind drafts of which nothing did. Where the
    draft model fails, or has no room, there are no drafts.

    n_drafted: tokens that were decoded because they might follow; n_accepted: how many of these did.

    Raises InvalidArgumentError for a model of another vocabulary, and UnsupportedError for "mtp" and a model
    without a draft head, and where either cache can't go back by a few tokens (WayBack). A draft model may
    have no recurrent layers.
    """

    def __init__(self, ctx: Context, seq: int, draft: Context | Literal["mtp"], draft_max: int) -> None:
        self._back = WayBack(ctx, seq)
        self._ctx = ctx
        self._seq = seq
        self._draft: TokenSequence | None = None  # None: the model's own draft head
        if isinstance(draft, str):
            require_draft_head(draft, ctx.model)
        else:
            instance(draft, Context, "draft")
            require_same_tokens(ctx.model, draft.model)
            draft.model._require_whole()
            if most_back(draft) is not None:
                raise cannot_go_back(draft, "recurrent layers", "take another draft model")
            self._draft = TokenSequence(draft)
        self._most = integer(draft_max, "draft_max", 1)
        if self._back.n_most is not None:
            self._most = min(self._most, self._back.n_most)
        # tokens in the cache, with the outputs behind them
        self._ahead: deque[tuple[int, LastOutput]] = deque()
        self._held, self._compared = _FIRST, 1.0  # tokens; the earlier, the less they count
        self._n_last = 0  # tokens of the last draft
        self._pause = self._n_to_wait = 0
        self.n_drafted = self.n_accepted = 0

    def append(
        self, text: Callable[[], Integers], token: int, n_room: Callable[[], int]
    ) -> LastOutput | None:
        """The output behind a token that was said, which is in the cache then.

        text: the tokens before it. n_room(): how many tokens there is room for. None: it is the caller's to
        decode, and nothing else is in the cache.
        """
        if self._ahead and self._ahead[0][0] == token:
            self.n_accepted += 1
            self._ctx.kv.set_pending_token(self._seq, None)
            return self._ahead.popleft()[1]
        self.drop()
        drafted = self._drafted(text, token, n_room)
        if not drafted:
            return None
        try:
            last, *outputs = self._back.decode([token, *drafted])
        except CacheFullError:  # another thread was quicker
            return None
        self._ahead.extend(zip(drafted, outputs, strict=True))
        self._n_last = len(drafted)
        self.n_drafted += len(drafted)
        return last

    def drop(self) -> None:
        """Removes what is in the cache and was not said."""
        n_left = len(self._ahead)
        self._ahead.clear()
        if n_left:
            self._back.go_back(n_left)
        self._learn(n_left)

    def _learn(self, n_left: int) -> None:
        """So many tokens of the last draft didn't hold."""
        if not self._n_last:
            return
        n_held, self._n_last = self._n_last - n_left, 0
        for held in (True,) * n_held + (False,) * (n_left > 0):
            self._held = self._held * _KEPT + held
            self._compared = self._compared * _KEPT + 1
        may_pause = n_held == 0 and self._held < 0.5 * self._compared
        self._pause = min(2 * self._pause + 1, _LONGEST_PAUSE) if may_pause else 0
        self._n_to_wait = self._pause

    def _n_likely(self) -> int:
        """So many tokens in a row hold about every second time."""
        rate = min(max(self._held / self._compared, 0.01), 0.99)
        return max(round(math.log(0.5) / math.log(rate)), 1)

    def _drafted(self, text: Callable[[], Integers], token: int, n_room: Callable[[], int]) -> list[int]:
        if self._n_to_wait:
            self._n_to_wait -= 1
            return []
        most = min(self._n_likely(), self._most, n_room() - 1, self._ctx.n_batch - 1)
        if most < 1:
            return []
        try:
            if self._draft is None:
                return self._ctx.draft([(self._seq, token, most)])[0]
            found = [self._draft.set([*text(), token]).last.best]
            while len(found) < most:
                found.append(self._draft.append(found[-1], copy_logits=False).best)
        except (KVGraphError, MemoryError):
            return []
        return found


def require_draft_head(draft: str, model: Model) -> None:
    """Raises InvalidArgumentError for what isn't "mtp", and UnsupportedError for a model that has
    neither a head nor an assistant.
    """
    if draft != "mtp":
        raise InvalidArgumentError(f'draft must be "mtp", or one that a model makes, got {shown(draft)}')
    if not model.drafts:
        how = "its file has none, and it has no assistant: Model(path, assistant=FILE) loads one"
        if model.has_draft_head:
            how = "load it with Model(path, draft_heads=True)"
        raise UnsupportedError(f'draft="mtp": the model was loaded without a draft head: {how}')


def require_same_tokens(model: Model, draft: Model) -> None:
    """Raises InvalidArgumentError unless a token means the same to both."""
    mine, others = (each.metadata.get(_TOKENS) or [] for each in (model, draft))
    if model.n_vocab != draft.n_vocab or len(mine) != len(others):
        raise InvalidArgumentError(
            f"draft: its vocabulary has {draft.n_vocab} tokens, the model's {model.n_vocab}: "
            "use a draft model of the same family"
        )
    differs = next((i for i, pair in enumerate(zip(mine, others, strict=True)) if pair[0] != pair[1]), None)
    if differs is not None:
        raise InvalidArgumentError(
            f"draft: token {differs} is {others[differs]!r} there, and {mine[differs]!r} in the model: "
            "use a draft model of the same family"
        )
