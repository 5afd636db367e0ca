"""A text that is decoded before anybody asks for it, while nobody waits."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pykvgraph.context.common_length import common_length
from pykvgraph.engine.request_sequence import CacheTerms, RequestSequence
from pykvgraph.engine.types import Completion, PromptProgress
from pykvgraph.model.adapter import Active
from pykvgraph.params.params import SamplingParams
from pykvgraph.types import Piece

# the one token that it says is heard by nobody
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


class Preparation(NamedTuple):
    """What is to be in the cache.

    old: the text in whose place it comes. salt, adapters, terms: of the request that is expected.
    """

    ids: array[int]
    old: array[int]
    salt: bytes
    adapters: Active
    terms: CacheTerms

    def begins(self, ids: array[int], salt: bytes) -> bool:
        """Whether a text under this salt begins with all of it."""
        return salt == self.salt and common_length(self.ids, ids) == len(self.ids)

    def is_of(self, ids: array[int], salt: bytes) -> bool:
        """Whether a text under this salt begins with all of it, or of the text in whose place it comes."""
        is_next = len(self.old) > 0 and ids[: len(self.old)] == self.old
        return salt == self.salt and (is_next or self.begins(ids, salt))


class _Nobody:
    """The owner of a text that no request wants yet."""

    done = False

    def __init__(self) -> None:
        self._sequences: Sequence[RequestSequence] = ()

    def _say(self, piece: Piece) -> None: ...

    def _report(self, progress: PromptProgress) -> None: ...

    def _complete(self, sample: int, completion: Completion) -> None: ...

    def _fail(self, error: BaseException) -> None: ...


class PreparedText(RequestSequence):
    """Decodes a Preparation as the prompt of a request that says one token.

    It runs alone, and nobody loses cells for it but the old text, behind what both begin with.

    old_salts: under which the index may have cells of the old text; none once they are given up.
    """

    def __init__(self, preparation: Preparation) -> None:
        ids, self.old, salt, adapters, terms = preparation
        owner = _Nobody()
        prompt = np.array(ids, np.int32)
        super().__init__(owner, 0, prompt, _PARAMS, None, salt, adapters=adapters, terms=terms)
        owner._sequences = (self,)
        self.preparation = preparation
        self.n_common = common_length(ids, self.old)
        self.old_salts: tuple[bytes, ...] = (salt,)

    def is_old_under(self, salts: Iterable[bytes]) -> None:
        """The index may have cells of the old text under these salts, too."""
        self.old_salts = tuple(dict.fromkeys((*self.old_salts, *salts)))
