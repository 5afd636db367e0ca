"""LlamaRAMCache and LlamaDiskCache: what texts of Llamas begin with, in memory and in files."""

from __future__ import annotations

import os
import weakref
from array import array
from collections.abc import Sequence

from pykvgraph.context.context import Context
from pykvgraph.errors import KVGraphError
from pykvgraph.model.adapter import key_of
from pykvgraph.prefix import block
from pykvgraph.prefix.index import PrefixIndex
from pykvgraph.prefix.sequence_index import SequenceIndex, needs_points
from pykvgraph.sequence.sequence import N_CHECKPOINTS
from pykvgraph.tiers.loader import Prefetch, places_for
from pykvgraph.tiers.options import Tiers
from pykvgraph.tiers.rows import Saver
from pykvgraph.tiers.search import parts_of
from pykvgraph.tiers.store import Store

_CLOSE_SECONDS = 10.0
_DISK_RAM = 1 << 30  # bytes of memory, through which everything goes to the disk


class PrefixCache:
    """What Llama.set_cache() takes: prefixes of the texts of any number of Llamas, of any models.

    A prompt that begins as a text of any of them gets its cells from here, and only the rest is decoded.
    """

    def __init__(self, tiers: Tiers) -> None:
        """Raises OSError when the directory can't be made or read."""
        self.capacity_bytes = tiers.disk or tiers.ram
        self._on_disk = tiers.disk > 0
        self._store = Store(tiers)
        weakref.finalize(self, _finish, self._store, os.getpid())

    @property
    def cache_size(self) -> int:
        """Bytes that are there now; never more than capacity_bytes."""
        in_memory, on_disk = self._store.n_bytes
        return on_disk if self._on_disk else in_memory

    def flush(self) -> bool:
        """Waits until the disk has everything; False: it hasn't, after 10 seconds."""
        return self._store.flush(_CLOSE_SECONDS)


class LlamaRAMCache(PrefixCache):
    """In memory. Raises InvalidArgumentError for what is no number of bytes."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        super().__init__(Tiers(capacity_bytes))


LlamaCache = LlamaRAMCache


class LlamaDiskCache(PrefixCache):
    """In files, which outlive the process, and which several processes may share.

    cache_dir: made if it is missing. Up to 1 GiB of memory is taken besides.
    """

    def __init__(
        self, cache_dir: str | os.PathLike[str] = ".cache/llama_cache", capacity_bytes: int = 2 << 30
    ) -> None:
        super().__init__(Tiers(_DISK_RAM, capacity_bytes, cache_dir))


class KeptPrefixes:
    """What a cache has for one context. earlier: of its text; what it gives up goes to the cache.

    Raises OSError when the model's file can't be read any more.
    """

    def __init__(self, ctx: Context, cache: PrefixCache) -> None:
        self._ctx = ctx
        self._store = cache._store
        self._geometry = ctx.kv._geometry
        self._salt = block.under(b"", key_of(ctx.adapters))
        self._saver = Saver(ctx, self._store, needs_points(ctx))
        n_points = N_CHECKPOINTS // 2 if needs_points(ctx) else 0
        self.earlier = SequenceIndex(PrefixIndex(ctx.kv, n_points, self._saver))

    def save(self, ids: Sequence[int]) -> None:
        """Keeps the text of sequence 0, which has exactly these tokens."""
        self.earlier.keep(array("i", ids), len(ids), 0, self._salt)
        self.earlier.use(_save)

    def load(self, ids: Sequence[int], n_known: int) -> int:
        """Makes sequence 0 begin as a text does, if the cache has more of it than the cells have.

        n_known: how much sequence 0 has of it. Returns how many tokens it has then, and nothing else; 0:
        there was no more, or it could not be had, and sequence 0 may be empty. The last token is left out.
        """
        wanted, limit = array("i", ids), len(ids) - 1
        n_known = max(n_known, self.earlier.find(wanted, limit, self._salt).n)
        keys = [self._saver.root_key(self._salt)]
        names, n, _ = parts_of(self._store, wanted, keys, limit, has_points=self._saver.has_points)
        if n <= n_known:
            self._store.look_again()
            return 0
        kv, end = self._ctx.kv, names[-1].span.stop
        kv.seq_rm(0, -1, -1)
        try:
            self.earlier.make_room(end)
            job = Prefetch(names, kv.reserve(places_for(names, self._geometry, self._ctx.swa_full)))
            job.fill(self._store, self._geometry, self._ctx.swa_full)
            if job.reason is None:
                job.show(kv, 0, n)
                return n
            job.cancel()
        except (KVGraphError, MemoryError):
            kv.seq_rm(0, -1, -1)
        return 0


def _save(index: PrefixIndex) -> None:
    """Has the saver keep all that there is."""
    for _ in index.save():
        pass


def _finish(store: Store, pid: int) -> None:
    """What waits for the disk gets there, for a while; in a forked process nobody writes it."""
    if os.getpid() != pid:
        return
    store.flush(_CLOSE_SECONDS)
    store.close(1.0)
