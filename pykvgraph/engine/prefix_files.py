"""What is done with the cache between two steps to save a prefix in a file, and to load it."""

from __future__ import annotations

from array import array

from pykvgraph.errors import CacheFullError, InvalidArgumentError, StateError
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.kv_cache.saved.geometry import Geometry, under
from pykvgraph.model.adapter import Active, key_of
from pykvgraph.prefix.index import PrefixIndex
from pykvgraph.prefix.prefix_file import SavedPrefix


class PrefixFiles:
    """Of texts under a salt and adapters; `salt` has these in it, too."""

    def __init__(self, kv: KVCache, salt: bytes, active: Active) -> None:
        self._kv = kv
        self._salt = salt
        self._adapters = key_of(active)

    def saved(self, index: PrefixIndex, seq: int, ids: array[int]) -> SavedPrefix | None:
        """What the cache has of a text that is exact, by an empty sequence; None: nothing.

        Raises what kv.save() raises.
        """
        found = index.find(ids, len(ids), self._salt)
        found = found._replace(n=min(found.n, found.match.root.n_exact))
        if found.n == 0:
            return None
        last = index.attach(found, seq)
        try:
            return SavedPrefix(ids[: found.n], self._kv._save(seq, self._geometry()))
        finally:
            index.unpin(last)

    def load(self, index: PrefixIndex, seq: int, saved: SavedPrefix) -> None:
        """The index has it, by an empty sequence. Raises CacheFullError, and StateError for other cells."""
        n = len(saved.ids)
        if not index.make_room(n):
            raise CacheFullError(f"the saved prefix has {n} tokens, and there is no room for it now")
        self._kv._load_as(saved.cells, seq, self._geometry())
        if self._kv.seq_pos_max(seq) != n - 1:
            raise StateError("the saved cells are not those of the saved tokens")
        try:
            index.keep(saved.ids, n, seq, self._salt)
        except InvalidArgumentError as error:
            raise StateError(f"the saved cells are not those of the saved tokens: {error}") from error

    def _geometry(self) -> Geometry:
        return under(self._kv._geometry, self._adapters)
