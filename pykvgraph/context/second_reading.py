"""The last tokens of a sequence decoded once more, in their places, for what they attend to."""

from __future__ import annotations

from collections.abc import Sequence

from pykvgraph.context.batch import Batch
from pykvgraph.context.cell_scores import POLICIES
from pykvgraph.context.context import Context
from pykvgraph.errors import CacheFullError, UnsupportedError
from pykvgraph.kv_cache.cache import KVCache


def read_again(ctx: Context, seq: int, ids: Sequence[int]) -> None:
    """Decodes the last tokens of a sequence once more, in their places, and observes what they attend to.

    ids: theirs; as many of them as a batch takes. Raises as require_second_reading() does, and what decode()
    raises: the sequence ends before these tokens then.
    """
    ids = ids[-ctx.n_batch :]
    require_second_reading(ctx, seq, len(ids))
    kv = ctx.kv
    pending, begin = kv.pending_token(seq), kv.seq_pos_max(seq) + 1 - len(ids)
    kv.seq_rm(seq, begin, -1)
    batch = Batch()
    batch.extend(ids, begin, (seq,), False)
    ctx.decode(batch, observe=len(ids))
    kv.set_pending_token(seq, pending)


def require_second_reading(ctx: Context, seq: int, n: int) -> None:
    """Raises what would come in the middle of decoding the last n tokens of a sequence once more.

    UnsupportedError where it isn't known what they attend to, and where a sequence can't go back: after
    windows have lost what they see, and in recurrent layers; CacheFullError where others have their cells
    and there is no room for copies.
    """
    kv, position = ctx.kv, ctx.kv.seq_pos_max(seq) + 1 - n
    if n == 0 or position < 0:
        raise UnsupportedError(
            "the last tokens of the text aren't known, and can't be decoded once more: they were decoded by "
            "another call. Forget by keydiff or window, or give the text to one LongReader or generate()"
        )
    require_attention(ctx)
    require_going_back(kv, seq, position)
    found = kv.seq_count(seq, position, -1)
    if found.n_cells != n or found.n_shared > kv.n_free:
        raise CacheFullError(
            f"the last {n} tokens of sequence {seq} are decoded once more: {found.n_shared} of their cells "
            f"are others', too, and {kv.n_free} are empty. Forget by another policy, or use a larger n_ctx"
        )


def require_going_back(kv: KVCache, seq: int, position: int) -> None:
    """Raises UnsupportedError unless tokens from this position of a sequence on can be decoded again."""
    _require_no_states(kv)
    for index, group in enumerate(kv.groups):
        if group.window and kv._lost(index, seq) >= max(0, position - group.window + 1):
            raise UnsupportedError(
                f"layers with a window of {group.window} have lost positions that one at {position} sees: "
                "open the context with swa_full=True"
            )


def _require_no_states(kv: KVCache) -> None:
    if any(group.kind == "state" for group in kv.groups):
        raise UnsupportedError(
            "this model has recurrent layers, whose states can't be repaired: go back to before the "
            "edit (go_back) and decode again from there, or leave out what decodes tokens again"
        )


def require_policy(ctx: Context, policy: str) -> None:
    """Raises UnsupportedError where no text of this context can ever be read as the policy wants it.

    For texts that go on: sooner than in the middle of one.
    """
    if POLICIES[policy].reads:
        require_attention(ctx)
        _require_no_states(ctx.kv)


def require_attention(ctx: Context) -> None:
    """Raises UnsupportedError where it isn't known what tokens attend to."""
    if any(part.attention in ("flash", "plain") for part in ctx.devices):
        raise UnsupportedError(
            'what tokens attend to is known where the CPU computes attention, with flash_attn="auto". '
            "Forget by another policy, and compress no prefixes"
        )
