"""What requests have read: in which of it a new text may find its parts, and why it has not found more."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from pykvgraph.context.common_length import common_length
from pykvgraph.prefix.node import ALL, Origin

_MOST = 128  # texts


class EarlierText:
    """The text of a request that runs, or has ended.

    ids: its tokens; while it runs, they become more. salt: under which the index of prefixes has its cells.
    key: the caller's salt. session, adapters: of whom and under which; b"": none. n_exact, made_of: as the
    index's root of `salt` has them. request: the number of its request. n_read: how many of its tokens had
    cells when it left.
    """

    __slots__ = ("adapters", "ids", "key", "made_of", "n_exact", "n_read", "request", "salt", "session")

    def __init__(
        self, ids: array[int], salt: bytes, key: bytes, session: bytes, adapters: bytes, request: int
    ) -> None:
        self.ids = ids
        self.salt = salt
        self.key = key
        self.session = session
        self.adapters = adapters
        self.request = request
        self.n_exact = ALL
        self.made_of: tuple[Origin, ...] = ()
        self.n_read = 0

    def common(self, ids: bytes) -> int:
        """With how many tokens it begins as these do, 32 bits each."""
        if not self.ids or self.ids[:1].tobytes() != ids[: self.ids.itemsize]:
            return 0
        return common_length(self.ids.tobytes(), ids)


class EarlierTexts:
    """The last 128 of them, and `most` tokens at most. One that another goes on from is that other."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._texts: list[EarlierText] = []  # the newest last

    def __iter__(self) -> Iterator[EarlierText]:
        """The newest first."""
        return reversed(self._texts)

    def add(self, text: EarlierText) -> None:
        """It begins to run. What it goes on from, or has been until now, is forgotten."""
        ids = text.ids.tobytes()
        self._texts = [each for each in self._texts if not _goes_on(text, ids, each)][1 - _MOST :]
        self._texts.append(text)
        n = sum(len(each.ids) for each in self._texts)
        while n > self._most and len(self._texts) > 1:
            n -= len(self._texts.pop(0).ids)

    def of_session(self, text: EarlierText) -> list[EarlierText]:
        """Those that a text may be an edit of.

        Those of its session; where it has no name, those without one that begin like it for the longest.
        """
        found = [
            each
            for each in self
            if (each.key, each.session, each.adapters) == (text.key, text.session, text.adapters)
        ]
        if text.session:
            return found
        ids = text.ids.tobytes()
        common = [each.common(ids) for each in found]
        most = max(common, default=0)
        return [each for each, n in zip(found, common, strict=True) if n == most]


def _goes_on(text: EarlierText, ids: bytes, other: EarlierText) -> bool:
    """Whether the new text begins with all of another one's, and has its place. ids: of the text."""
    if other.ids is text.ids:
        return True
    same = (other.salt, other.session) == (text.salt, text.session)
    return same and len(other.ids) <= len(text.ids) and other.common(ids) == len(other.ids)
