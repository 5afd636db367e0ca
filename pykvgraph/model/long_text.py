"""Long texts to token ids: parted at their special tokens here, and encoded between them by libllama."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvgraph._native.abandoned import Wanted
from pykvgraph._native.ffi import KvgTokenAttr, KvgTokenizeText, KvgTokenText
from pykvgraph._native.fork import renew_cached_properties_in_child
from pykvgraph._native.handles import Handle
from pykvgraph._native.library import lib

# bytes; libllama parts a text in a time that grows with the square of its special tokens, which are few here
LONG = 1 << 12


class LongText:
    """Encodes long texts with one vocabulary of libllama's. Several threads may use it.

    model: libllama's, which owns the vocabulary.
    """

    def __init__(self, llama: Any, model: Handle, n_vocab: int) -> None:
        self._llama = llama
        self._model = model
        self._n_vocab = n_vocab

    @functools.cached_property
    def _specials(self) -> Handle:
        attr = ctypes.cast(self._llama.llama_vocab_get_attr, KvgTokenAttr)
        text = ctypes.cast(self._llama.llama_vocab_get_text, KvgTokenText)
        return self._model.call(
            lambda model: Handle.open(
                lib().kvg_specials_new,
                self._llama.llama_model_get_vocab(model),
                self._n_vocab,
                attr,
                text,
                free=lib().kvg_specials_free,
                name="tokenizer",
                shared=True,
            )
        )

    def encode(self, data: bytes, parse_special: bool, wanted: Wanted) -> list[int]:
        """Its ids, without those that a vocabulary puts around a text. Raises AbandonedError."""
        room = 2 * len(data) + 8
        while True:
            wanted.require()
            ids = np.empty(room, np.int32)
            n = self._model.call(self._encode, data, parse_special, wanted, ids)
            wanted.require()
            if n <= room:
                found: list[int] = ids[:n].tolist()
                return found
            room = n

    def _encode(
        self, model: int, data: bytes, parse_special: bool, wanted: Wanted, ids: npt.NDArray[np.int32]
    ) -> int:
        n = ctypes.c_uint64()
        self._specials.call(
            lib().kvg_specials_encode,
            self._llama.llama_model_get_vocab(model),
            ctypes.cast(self._llama.llama_tokenize, KvgTokenizeText),
            data,
            len(data),
            parse_special,
            wanted.stop,
            ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            len(ids),
            n,
        )
        return n.value

    @property
    def longest(self) -> int:
        """Bytes of the longest token's text."""
        return int(self._specials.call(lib().kvg_specials_longest))

    @property
    def drops_spaces(self) -> bool:
        """Whether special tokens may drop the white space beside them."""
        return bool(self._specials.call(lib().kvg_specials_strip))


renew_cached_properties_in_child(LongText)
