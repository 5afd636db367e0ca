"""Tokens that were handed out and are not decoded yet, at most one of each sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pykvgraph.checks import integer
from pykvgraph.errors import StateError


class PendingTokens:
    """The pending token of each sequence: sampled, handed out, and to be decoded behind its last position.

    Decoding anything on a sequence ends its pending token: either it was the first that was decoded, or the
    caller chose to go on without it. take_back() brings back what the last decode ended.
    """

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        self._tokens: dict[int, int] = {}
        self._ended: dict[int, int] = {}  # by the last decode

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def get(self, seq: int) -> int | None:
        """The pending token of a sequence; None when it has none."""
        return self._tokens.get(seq)

    def __contains__(self, seq: object) -> bool:
        return seq in self._tokens

    def put(self, seq: int, token: int) -> None:
        """The sequence's pending token from now on; unchecked."""
        self._tokens[seq] = token

    def choose(self, seq: int, token: int | None) -> None:
        """As put(), but checked: raises InvalidArgumentError. None: the sequence has none from now on."""
        if token is None:
            self.drop(seq)
        else:
            self.put(seq, integer(token, "token", 0, self.n_vocab - 1))

    def copied(
        self, src: int, dst: int, p0: int, p1: int, before: int, pos_max: Callable[[int], int]
    ) -> None:
        """After seq_cp(src, dst, p0, p1); before: the last position that dst had.

        When dst now ends where src does, and the range reaches that far, it has the pending token of src too.
        """
        if not self._tokens or src == dst:
            return
        if pos_max(dst) != before:
            self.drop(dst)
        if pos_max(dst) == pos_max(src) and self.within(src, p0, p1, pos_max):
            self._tokens[dst] = self._tokens[src]

    def within(self, seq: int, p0: int, p1: int, pos_max: Callable[[int], int]) -> list[int]:
        """Of sequence `seq`, or below 0 of all, those whose pending token would come into [p0, p1).

        pos_max: gives a sequence's last position, -1 when it has no cells. Raises InvalidArgumentError.
        """
        if not self._tokens:
            return []
        seq, p0, p1 = integer(seq, "seq"), integer(p0, "p0"), integer(p1, "p1")
        return [
            of
            for of in tuple(self._tokens)
            if (seq < 0 or of == seq) and p0 <= pos_max(of) + 1 and (p1 < 0 or pos_max(of) + 1 < p1)
        ]

    def drop(self, *seqs: int) -> None:
        """These sequences have none from now on."""
        for seq in seqs:
            self._tokens.pop(seq, None)

    def drop_all(self) -> None:
        """No sequence has one from now on."""
        self._tokens.clear()

    def keep(self, seq: int) -> None:
        """Drops those of all other sequences."""
        self._tokens = {of: token for of, token in self._tokens.items() if of == seq}

    def begin_decode(self) -> None:
        """To be called before a decode."""
        if self._ended:
            self._ended = {}

    def end_decode(self, seqs: Iterable[int]) -> None:
        """To be called after a decode that appended to these sequences."""
        for seq in seqs:
            token = self._tokens.pop(seq, None)
            if token is not None:
                self._ended[seq] = token

    def take_back(self) -> None:
        """To be called when the last decode is undone. A second call does nothing."""
        self._tokens.update(self._ended)

    def saved(self, seq: int | None) -> list[tuple[int, int]]:
        """Sequences and their tokens, for a saved state; of one sequence alone it is sequence 0."""
        if seq is None:
            return sorted(self._tokens.items())
        token = self._tokens.get(seq)
        return [] if token is None else [(0, token)]

    def check(self, saved: Iterable[tuple[int, int]], seq: int | None, n_seq_max: int) -> None:
        """Raises StateError for tokens or sequences that aren't here; before load()."""
        for of, token in saved:
            if token >= self.n_vocab or (seq is None and of >= n_seq_max):
                raise StateError(
                    f"the state has the pending token {token} of sequence {of}: there is none such"
                )

    def load(self, saved: Iterable[tuple[int, int]], seq: int | None) -> None:
        """Replaces those of a sequence, or with None all, by what saved() returned."""
        if seq is None:
            self._tokens = dict(saved)
        else:
            self.drop(seq)
            self._tokens.update((seq, token) for _, token in saved)
