"""Compressed prefixes in the tiers: each is one record, which a text finds by its own tokens."""

from __future__ import annotations

from array import array

import numpy as np

from pykvgraph.context.context import Context
from pykvgraph.engine.fetches import Fetches
from pykvgraph.errors import KVGraphError
from pykvgraph.prefix import block
from pykvgraph.tiers.loader import checked
from pykvgraph.tiers.record import MissError, Name, unpack_some
from pykvgraph.tiers.rows import Saver


class CompressedRecords:
    """Of one engine. share: of their prefixes' cells; records of another share are not found.

    A record's name is that of the prefix's end, under a salt of its own: behind whole blocks, whose keys
    any text that begins with them can make.
    """

    def __init__(self, ctx: Context, saver: Saver, fetches: Fetches, share: float) -> None:
        self._ctx = ctx
        self._saver = saver
        self._fetches = fetches
        self._share = repr(share).encode()

    def has(self, ids: array[int], salt: bytes) -> bool:
        """Whether the tiers have the compressed form of these tokens, all of them."""
        key = self._name(ids, salt).key
        return key not in self._fetches.failed and self._fetches.store.has(key)

    def save(self, ids: array[int], salt: bytes, seq: int) -> None:
        """Keeps what a sequence has of a prefix, unless it is there already."""
        name = self._name(ids, salt)
        self._saver.sequence(name, seq)
        self._fetches.failed.pop(name.key, None)

    def longest(self, ids: array[int], salt: bytes, n_had: int) -> Name | None:
        """Of the prefixes that a text begins with, and has more tokens than; None: there is none, or to load
        it would take longer than to decode its tokens behind the n_had that are there."""
        store, found = self._fetches.store, None
        parent = self._root(salt)
        for begin in range(0, len(ids), block.N_TOKENS):
            own = ids[begin : begin + block.N_TOKENS]
            for tokens in store.ends(parent):
                n = len(tokens) // block.TOKEN_BYTES
                name = Name(block.END, parent, tokens, begin)
                is_longer = found is None or name.span.stop > found.span.stop
                if is_longer and begin + n < len(ids) and own[:n].tobytes() == tokens:
                    found = name if name.key not in self._fetches.failed else found
            parent = block.key(parent, own.tobytes())
        if found is None:
            store.look_again()
        return found if found and self._fetches.pays(found, n_had) else None

    def is_coming(self, name: Name, n_had: int) -> bool:
        """Whether a record is on its way from the disk to memory; else load() has it, or can't."""
        return self._fetches.is_coming(name, n_had)

    def load(self, name: Name, seq: int) -> int | None:
        """An empty sequence gets what a record has; returns how many tokens come before the first without a
        cell. None: it can't, and is empty. precondition: there are as many empty cells as the prefix has
        tokens."""
        kv, store = self._ctx.kv, self._fetches.store
        if store.size_of(name.key)[1]:  # it has not come, or has gone again
            self._fetches.fail(name.key)
            return None
        try:
            with checked(store, name) as record:
                saved = unpack_some(record, name, kv._geometry)
                kv._load(saved, seq)
        except MissError as miss:
            self._fetches.miss(miss.reason)
        except (KVGraphError, MemoryError):
            kv.seq_rm(seq, -1, -1)
            self._fetches.miss("device")
        else:
            pos = saved.groups[0].pos
            self._fetches.n_loaded += len(pos)
            gaps = np.flatnonzero(pos != np.arange(len(pos)))
            return int(gaps[0]) if len(gaps) else len(pos)
        self._fetches.fail(name.key)
        return None

    def _root(self, salt: bytes) -> bytes:
        return self._saver.root_key(block.edited(salt, b"compressed", b"", self._share, 0))

    def _name(self, ids: array[int], salt: bytes) -> Name:
        parent, end = self._root(salt), (len(ids) - 1) // block.N_TOKENS * block.N_TOKENS
        for begin in range(0, end, block.N_TOKENS):
            parent = block.key(parent, ids[begin : begin + block.N_TOKENS].tobytes())
        return Name(block.END, parent, ids[end:].tobytes(), end)
