"""The engines of the bench: ours, and libllama on the same file with the same number of threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from pykvgraph.bench.libllama import LibllamaContext, LibllamaModel, State
from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context
from pykvgraph.model.adapter import Adapter
from pykvgraph.model.model import Model
from pykvgraph.params.params import ContextParams
from pykvgraph.sequence.decode_loop import generate

Ids = npt.NDArray[np.int32]


class MeasuredEngine(Protocol):
    """The calls that a test uses. Ranges of positions are [p0, p1); p1 < 0 means no end."""

    name: str
    n_vocab: int
    filled: Any  # the saved state of sequence 0 after a test filled it; None before that

    def prefill(self, ids: Ids, pos0: int, seq: int = 0) -> None:
        """Decodes the tokens, with logits for the last one."""

    def step(self, ids: Sequence[int], pos: Sequence[int]) -> None:
        """Decodes one token for each of the sequences 0, 1, ..., all with logits."""

    def generate(self, n_tokens: int, pos0: int) -> int:
        """Generates up to n_tokens in sequence 0 with the engine's own loop; returns how many there were."""

    def clear(self) -> None: ...
    def seq_rm(self, seq: int, p0: int, p1: int) -> None: ...
    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None: ...
    def defrag(self, policy: Literal["fill", "sort"]) -> None:
        """Runs defrag at once; does nothing if the engine has no defrag."""

    def save(self) -> Any:
        """Saves sequence 0 to memory."""

    def load(self, state: Any) -> None:
        """Loads a saved state into sequence 0."""

    def close(self) -> None: ...


class OurEngine:
    """pykvgraph through its Python interface."""

    def __init__(
        self, params: ContextParams, model: Model, adapters: Iterable[tuple[Adapter, float]] = ()
    ) -> None:
        self.name = "pykvgraph"
        self.filled: bytes | None = None
        self.n_vocab = model.n_vocab
        self.context = Context(model, **vars(params), adapters=adapters)
        self._batch = Batch()

    def prefill(self, ids: Ids, pos0: int, seq: int = 0) -> None:
        for begin in range(0, len(ids), self.context.n_batch):
            part = ids[begin : begin + self.context.n_batch]
            last = begin + len(part) == len(ids)
            self._batch.clear()
            self._batch.extend(part, pos0 + begin, (seq,), logits="last" if last else False)
            self.context.decode(self._batch)

    def step(self, ids: Sequence[int], pos: Sequence[int]) -> None:
        self._batch.clear()
        for seq, (token, at) in enumerate(zip(ids, pos, strict=True)):
            self._batch.add(token, at, (seq,), logits=True)
        self.context.decode(self._batch)

    def generate(self, n_tokens: int, pos0: int) -> int:
        """The complete token loop, with sampling, text and log probabilities."""
        return sum(1 for _ in generate(self.context, [0], max_tokens=n_tokens))

    def clear(self) -> None:
        self.context.reset()

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        self.context.kv.seq_rm(seq, p0, p1)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self.context.kv.seq_add(seq, p0, p1, delta)

    def defrag(self, policy: Literal["fill", "sort"]) -> None:
        self.context.kv.defrag(policy)
        self.context.kv.update()

    def save(self) -> bytes:
        return self.context.kv.save(0)

    def load(self, state: bytes) -> None:
        self.context.kv.load(state, 0)

    def close(self) -> None:
        self.context.close()


class LibllamaEngine(LibllamaContext):
    """A context of libllama. Its name gives its attention; "streams": each sequence has its own cache."""

    def __init__(
        self, params: ContextParams, model: LibllamaModel, *, flash: bool, unified: bool = True
    ) -> None:
        super().__init__(model, dataclasses.replace(params, flash_attn=flash), unified=unified)
        self.name = f"libllama -fa {int(flash)}" + ("" if unified else ", streams")
        self.filled: State | None = None
        self._n_batch = params.n_batch

    def prefill(self, ids: Ids, pos0: int, seq: int = 0) -> None:
        last = pos0 + len(ids) - 1
        tokens = [(token, pos, (seq,), pos == last) for pos, token in enumerate(ids.tolist(), pos0)]
        for begin in range(0, len(tokens), self._n_batch):
            self.decode(tokens[begin : begin + self._n_batch])

    def step(self, ids: Sequence[int], pos: Sequence[int]) -> None:
        self.decode((token, at, (seq,), True) for seq, (token, at) in enumerate(zip(ids, pos, strict=True)))

    def generate(self, n_tokens: int, pos0: int) -> int:
        """Calls llama_decode only, without sampling or text."""
        self.decode_again(n_tokens, pos0)
        return n_tokens

    def defrag(self, policy: Literal["fill", "sort"]) -> None:
        """Does nothing: libllama has no defrag any more."""
