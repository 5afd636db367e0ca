"""How a text goes on when it has filled its part of the cache: some of its tokens are given up."""

from __future__ import annotations

from dataclasses import dataclass

from pykvgraph.checks import integer
from pykvgraph.context.cell_scores import POLICIES, checked_policy
from pykvgraph.context.forgetting import N_RECENT, N_SINKS
from pykvgraph.errors import InvalidArgumentError

_LEAST = 8  # tokens; a window that is kept whole still has room for some


@dataclass(frozen=True)
class Window:
    """A text has at most n_ctx tokens in the cache, and goes on for as long as it likes.

    When the next token would be number n_ctx, its first n_keep tokens stay, the next n_discard are given up,
    and those behind them move down: a context shift, as llama-server's. n_keep: at most n_ctx - 4 are kept.
    n_discard: 0 is half of what isn't kept.

    forget: a policy (docs/forgetting.md): 128 tokens that matter least are given up in place of those that
    come first, or half of those that may be; the last 64 never are. Where none may be, the next n_discard
    are. A prompt that is longer than n_ctx is read part by part, and tokens are given up in between; without
    `forget` it is refused. Policies that decode tokens once more can't be used here.

    Raises InvalidArgumentError for n_ctx below 8, or with `forget` below 72, for others below 0, and for a
    policy that there isn't or that can't be used.
    """

    n_ctx: int
    n_keep: int = 0
    n_discard: int = 0
    forget: str | None = None

    def __post_init__(self) -> None:
        if self.forget is not None and POLICIES[checked_policy(self.forget)].reads:
            raise InvalidArgumentError(
                f"forget: {self.forget} decodes tokens once more, which engines don't; use window or keydiff"
            )
        least = _LEAST if self.forget is None else N_SINKS + N_RECENT + 4
        object.__setattr__(self, "n_ctx", integer(self.n_ctx, "n_ctx", least))
        object.__setattr__(self, "n_keep", min(integer(self.n_keep, "n_keep", 0), self.n_ctx - 4))
        object.__setattr__(self, "n_discard", integer(self.n_discard, "n_discard", 0))

    def is_full(self, n: int) -> bool:
        """Whether a text with n tokens in the cache has no room for one more."""
        return n + 1 >= self.n_ctx

    def discarded(self, n: int) -> range:
        """The tokens that are given up when it has n of them."""
        n_left = n - self.n_keep
        return range(self.n_keep, self.n_keep + min(self.n_discard or n_left // 2, n_left - 1))
