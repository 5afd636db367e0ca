"""Resume points at the ends of a prompt's blocks, where windows have room for them."""

from __future__ import annotations

from pykvgraph.context.context import Context
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.prefix import block
from pykvgraph.prefix.index import PrefixIndex


class BlockPoints:
    """Keeps them as spare points, so that the second text that begins alike goes on near where it differs.

    Windows still have what the last step has decoded, so no step is cut for these points, and a point takes
    few cells beside the one before it: a block's. They leave room for the windows of all texts, and a batch.
    are_kept: whether the model has windows that lose positions, and no states, whose rows are gone. most: how
    many of them are worth keeping.
    """

    def __init__(self, ctx: Context) -> None:
        groups = list(enumerate(ctx.kv.groups))
        windows = [(number, group) for number, group in groups if group.kind == "window"]
        has_states = any(group.kind == "state" for _, group in groups)
        self.are_kept = bool(windows) and not has_states and not ctx.swa_full
        self.most = ctx.n_ctx // block.N_TOKENS
        self._kv = ctx.kv
        # of each group: cells to leave, and those of a point; a smaller group has a cell for each position
        n_texts = ctx.n_seq_max
        self._left = {
            number: ((n_texts + 2) * group.window + ctx.n_batch, min(group.window, block.N_TOKENS))
            for number, group in windows
            if group.n_cells >= n_texts * group.window + ctx.n_batch
        }

    def add(self, sequence: RequestSequence, begin: int, index: PrefixIndex) -> None:
        """Of a text that was decoded from position `begin` on, and has no tokens behind what is decoded."""
        end = min(sequence.n_decoded, sequence.n_prompt - 1)
        places = range((begin // block.N_TOKENS + 1) * block.N_TOKENS, end + 1, block.N_TOKENS)
        n = self._room(sequence.seq) if places else 0
        while n < len(places) and index.drop_point(only_spare=True):
            n += 1
        assert sequence.last is not None
        for place in places[max(len(places) - n, 0) :]:
            index.add_point(sequence.last, sequence.ids, place, sequence.seq, is_spare=True)

    def _room(self, seq: int) -> int:
        """For how many blocks; at least 0. The cells of the text's own window may count as room."""
        room = self._kv.room(seq)
        found = [(room[number] - left) // n_cells for number, (left, n_cells) in self._left.items()]
        return max(min(found, default=self.most), 0)
