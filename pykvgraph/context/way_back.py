"""How a text goes back by some of the tokens that were decoded last."""

from __future__ import annotations

from pykvgraph._native.library import lib
from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context, LastOutput
from pykvgraph.errors import InvalidArgumentError, UnsupportedError
from pykvgraph.kv_cache.hold import ResumePoint


class WayBack:
    """Of one sequence. Where layers are recurrent, a checkpoint keeps their state behind each token.

    Others may drop checkpoints for the room that they take. So a resume point keeps the state before the
    tokens, and from there those that stay are decoded again. n_most: by how many tokens it can go back; None:
    by any number.

    Raises UnsupportedError for a cache that can't go back: with windows, unless swa_full, and with recurrent
    layers without room for checkpoints.
    """

    def __init__(self, ctx: Context, seq: int) -> None:
        self.n_most = most_back(ctx)
        self._ctx, self._seq = ctx, seq
        self._batch = Batch()
        self._tokens: list[int] = []  # those decoded last
        self._before: ResumePoint | None = None

    def decode(self, tokens: list[int]) -> list[LastOutput]:
        """The outputs behind the tokens, which come at the sequence's end; all but the first may go again.

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
        """In one call, so that nobody else takes the cells in between."""
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
    """WayBack.n_most. Raises UnsupportedError, as WayBack does."""
    most = None
    for group in ctx.kv.groups:
        if group.kind == "state":
            n_kept = group.n_cells - 2 * ctx.n_seq_max
            most = (n_kept - 1) // 2  # one for the resume point; as many again are the text's own checkpoints
            if most < 1:
                raise cannot_go_back(ctx, "recurrent layers", "a larger checkpoint_bytes helps")
        elif group.kind == "window" and group.n_cells < ctx.n_ctx:
            raise cannot_go_back(ctx, "windows", "swa_full=True, --swa-full helps")
    return most


def cannot_go_back(ctx: Context, layers: str, what_helps: str) -> UnsupportedError:
    """What to raise for a model with such layers."""
    return UnsupportedError(
        f"draft: {ctx.model.arch} has {layers}, and its cache can't go back by a few tokens ({what_helps}); "
        "an Engine (serve, batch) has drafts for such a model"
    )
