"""A sequence goes back by some of the tokens that it decoded last, such as drafts that don't hold."""

from __future__ import annotations

from pykvgraph._native.library import lib
from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context, LastOutput
from pykvgraph.errors import InvalidArgumentError, UnsupportedError
from pykvgraph.kv_cache.hold import ResumePoint


class WayBack:
    """Decodes tokens of one sequence so that the last of them can be removed again.

    n_most: how many can be; None: all. Cells of layers that attend are simply removed. Of recurrent layers
    a checkpoint keeps the state behind each token. Other sequences may drop checkpoints, as these take room.
    So a resume point keeps the state before the tokens, too: where a checkpoint was dropped, the sequence
    goes back to the resume point, and the tokens that stay are decoded again.

    Raises UnsupportedError for a cache that can't go back: with windows, unless swa_full, and with recurrent
    layers that have no room for checkpoints.
    """

    def __init__(self, ctx: Context, seq: int) -> None:
        self.n_most = most_back(ctx)
        self._ctx, self._seq = ctx, seq
        self._batch = Batch()
        self._tokens: list[int] = []  # that were decoded last
        self._before: ResumePoint | None = None

    def decode(self, tokens: list[int]) -> list[LastOutput]:
        """Decodes tokens at the sequence's end, and returns the output behind each.

        go_back() may remove all of them but the first.

        Raises what Context.decode raises, and CacheFullError where states find no room, with the cache as it
        was.
        """
        kv = self._ctx.kv
        begin = kv.seq_pos_max(self._seq) + 1
        behind: range | tuple[()] = ()
        if self.n_most is not None:
            self._before = None
            self._before = kv.resume_point(self._seq)
            behind = range(begin + 1, begin + len(tokens))
        self._tokens = tokens
        self._batch.clear()
        self._batch.extend(tokens, begin, (self._seq,), "all", behind)
        return self._ctx._handle.call(self._ctx._decode_each, self._batch)

    def go_back(self, n: int) -> None:
        """Removes the last n tokens; the pending token stays."""
        kv = self._ctx.kv
        pending, p = kv.pending_token(self._seq), kv.seq_pos_max(self._seq) + 1 - n
        try:
            kv.seq_rm(self._seq, p, -1)
        except InvalidArgumentError:  # the checkpoint was dropped
            if self._before is None or kv.seq_pos_min(self._seq) != 0:
                raise
            self._ctx._handle.call(self._again, self._tokens[: len(self._tokens) - n])
        self._before = None
        kv.set_pending_token(self._seq, pending)

    def _again(self, context: int, tokens: list[int]) -> None:
        """Goes back to the resume point, and decodes these tokens again.

        All within one call of the library, so that no other thread takes the cells in between.
        """
        before = self._before
        assert before is not None
        cells = self._ctx.kv._holds.hold(context, self._seq, 0, before.p)
        lib().kvg_kv_seq_rm(context, self._seq, -1, -1)
        for held in (cells, before):
            lib().kvg_kv_attach(context, held._id, self._seq, -1)
        self._batch.clear()
        self._batch.extend(tokens, before.p, (self._seq,), "last")
        self._ctx._decode_each(context, self._batch)


def most_back(ctx: Context) -> int | None:
    """What WayBack.n_most is in this context. Raises UnsupportedError as WayBack does."""
    most = None
    for group in ctx.kv.groups:
        if group.kind == "state":
            n_kept = group.n_cells - 2 * ctx.n_seq_max
            # one state is the resume point's; of the others half may still be those of the tokens before
            most = (n_kept - 1) // 2
            if most < 1:
                raise cannot_go_back(ctx, "recurrent layers", "a larger checkpoint_bytes helps")
        elif group.kind == "window" and group.n_cells < ctx.n_ctx:
            raise cannot_go_back(ctx, "windows", "swa_full=True, --swa-full helps")
    return most


def cannot_go_back(ctx: Context, layers: str, what_helps: str) -> UnsupportedError:
    """The error for a model with such layers. layers: their name; what_helps: what the user may do."""
    return UnsupportedError(
        f"draft: {ctx.model.arch} has {layers}, and its cache can't go back by a few tokens ({what_helps}); "
        "an Engine (serve, batch) has drafts for such a model"
    )
