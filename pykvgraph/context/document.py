"""A document: tokens that were read by themselves, and whose cells are held until texts link to them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pykvgraph.context.batch import Batch
from pykvgraph.errors import InvalidArgumentError, NotCopied, UnsupportedError
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.kv_cache.hold import Hold


class Document(NotCopied):
    """What `Context.read()` returns. `Sequence.link()` makes it a part of a text, as often as you like.

    ids: its tokens, int32 (n,). behind: those that it was read behind. Its cells, and theirs, stay in the
    cache until release(), `kv.clear()`, or until the program drops its last reference to the Document. Texts
    that link to it have cells of their own, unless they are just `behind`.
    """

    def __init__(
        self, kv: KVCache, ids: npt.NDArray[np.int32], behind: npt.NDArray[np.int32], hold: Hold
    ) -> None:
        self.ids = ids
        self.behind = behind
        self._kv = kv
        self._hold = hold
        self._under = kv._under.key  # the adapters that it was read under

    def __len__(self) -> int:
        return len(self.ids)

    def release(self) -> None:
        """Ends the hold of its cells. Raises InvalidArgumentError when it has ended already."""
        self._hold.release()

    def attach(self, kv: KVCache, seq: int) -> None:
        """Shows its cells to an empty sequence, behind those of `behind`, from position 0 on.

        Raises InvalidArgumentError for the cache of another context, for a document that was released or read
        under other adapters, and for a sequence that isn't empty.
        """
        if kv is not self._kv:
            raise InvalidArgumentError("the document was read by another context: read it by this one")
        if kv._under.key != self._under:
            raise InvalidArgumentError("the document was read under other adapters: read it again")
        kv.attach(self._hold, seq)

    def __repr__(self) -> str:
        return f"<Document of {len(self)} tokens>"


def read_document(
    kv: KVCache,
    ids: npt.NDArray[np.int32],
    behind: npt.NDArray[np.int32],
    n_batch: int,
    decode: Callable[[Batch], object],
) -> Document:
    """Reads it in an empty sequence, which is empty again afterwards. Raises what Context.read() raises."""
    if len(ids) == 0:
        raise InvalidArgumentError("ids is empty: a document has at least one token")
    seq, text = empty_sequence(kv), np.concatenate([behind, ids])
    batch = Batch()
    try:
        for begin in range(0, len(text), n_batch):
            batch.clear()
            batch.extend(text[begin : begin + n_batch], begin, (seq,), logits=False)
            decode(batch)
        return Document(kv, ids, behind, kv.hold(seq, 0, -1))
    finally:
        kv.seq_rm(seq, -1, -1)


def empty_sequence(kv: KVCache) -> int:
    """The last sequence without cells. Raises InvalidArgumentError when there is none."""
    empty = np.flatnonzero(kv.seq_bounds().n_cells == 0)
    if len(empty) == 0:
        raise InvalidArgumentError(
            f"all {kv.n_seq_max} sequences have cells, and a document needs an empty one for a moment: open "
            "the context with a larger n_seq_max, or remove a sequence (kv.seq_rm)"
        )
    return int(empty[-1])


def require_holdable(kv: KVCache, swa_full: bool) -> None:
    """Raises UnsupportedError where a hold doesn't keep all that a text needs."""
    kinds = {group.kind for group in kv.groups}
    if "state" in kinds:
        raise UnsupportedError(
            "this model has recurrent layers, whose states belong to one text: a document can't be linked to "
            "another"
        )
    if "window" in kinds and not swa_full:
        raise UnsupportedError(
            "layers with a window don't keep all of a document: open the context with swa_full=True"
        )
