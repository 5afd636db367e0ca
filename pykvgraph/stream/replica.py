"""The peer that keeps a copy of a text, and goes on with it: `replica`."""

from __future__ import annotations

from collections.abc import Iterator

from pykvgraph.context.context import Context
from pykvgraph.stream.layout import Layout
from pykvgraph.stream.receive import arrivals
from pykvgraph.stream.replicated import ACK, ACK_KEY


def replica(ctx: Context, seq: int, layout: Layout) -> Replica:
    """Takes what `replicated` sends, into a sequence that has no cells, and acknowledges each step.

        copy = stream.replica(ctx, 0, layout)
        try:
            for n_text in copy:             # until the text is over: how many of its tokens are known
                ...
        except TransportError:              # its worker is gone
            for token in copy.go_on():      # decoded at the sequence's end; then the text goes on
                logits = ctx.append(token)

    The transports need a timeout that no pause of the text reaches. Raises what `arrivals` raises.
    """
    return Replica(ctx, seq, layout)


class Replica:
    """What `replica` returns. text: the tokens that are known, the prompt's too."""

    def __init__(self, ctx: Context, seq: int, layout: Layout) -> None:
        self._ctx, self._seq = ctx, seq
        self._transport = layout.parts[0][0]
        self._coming = arrivals(ctx, seq, layout)

    @property
    def text(self) -> list[int]:
        return self._coming.text

    def __iter__(self) -> Iterator[int]:
        n_states = 0
        for last in self._coming:
            if self._coming.n_states != n_states:  # the way back, from tokens that come without a state
                n_states = self._coming.n_states
                self._ctx.kv.checkpoint(self._seq)
            self._transport.flush(ACK_KEY, ACK.pack(len(self.text), last))
            yield len(self.text)
        self._transport.flush(ACK_KEY, ACK.pack(-1, -1))

    def go_on(self) -> list[int]:
        """The tokens of the text that are to be decoded at the sequence's end before it can go on.

        One or two in usual models; where layers are recurrent, up to 64 more: those since the last state that
        came. None where nothing of the text is known.
        """
        if not self.text:
            return []
        return self.text[self._ctx.kv.rewind(self._seq, len(self.text) - 1) :]
