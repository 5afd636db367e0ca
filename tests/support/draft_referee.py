"""libllama's own draft head (graph_mtp) or assistant on the same files, as the judge of ours."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pykvgraph._native import libllama

Rows = npt.NDArray[np.float32]


class DraftReferee:
    """One text: the model's hidden states, and what its draft head makes of tokens and states.

    Two contexts, as llama-server has them: one of all layers, one of the head alone, or of an assistant,
    which reads the first one's cells.
    """

    def __init__(
        self,
        path: Path,
        *,
        flash: bool,
        n_ctx: int = 512,
        assistant: Path | None = None,
        swa_full: bool = True,
    ) -> None:
        self._ll, self._ext = libllama.package("llama_cpp"), libllama.package("llama_cpp_ext")
        self._reads_cells, self._swa_full = assistant is not None, swa_full
        self._models = [self._load(file) for file in (path, assistant) if file is not None]
        self._model = self._models[0]
        assert self._reads_cells or self._ll.llama_model_n_layer_nextn(self._model) == 1
        self._n_embd = int(self._ll.llama_model_n_embd(self._model))
        self._n_vocab = int(self._ll.llama_vocab_n_tokens(self._ll.llama_model_get_vocab(self._model)))
        self._layers = self._context(self._model, self._ll.LLAMA_CONTEXT_TYPE_DEFAULT, flash, n_ctx)
        self._head = self._context(self._models[-1], self._ll.LLAMA_CONTEXT_TYPE_MTP, flash, n_ctx)

    def draft_logits(self, text: Sequence[int], drafted: Sequence[int]) -> Rows:
        """(len(drafted), n_vocab): the head's behind the text, and behind each of these but the last.

        All tokens of the text but the last are decoded before.
        """
        n = len(text) - 1
        _, states = self._decode(self._layers, text[:-1], None, 0)
        if not self._reads_cells:
            before = np.concatenate([np.zeros((1, self._n_embd), np.float32), states[:-1]])
            self._decode(self._head, text[:-1], before, 0)
        state, rows = states[-1:], []
        for i, token in enumerate([text[-1], *drafted[:-1]]):
            pos = n if self._reads_cells else n + i  # an assistant's tokens have no cells, and all stand at n
            logits, state = self._decode(self._head, [token], state, pos)
            rows.append(logits[0])
        return np.stack(rows)

    def close(self) -> None:
        for context in (self._head, self._layers):
            self._ll.llama_free(context)
        for model in self._models:
            self._ll.llama_model_free(model)

    def _load(self, path: Path) -> Any:
        params = self._ll.llama_model_default_params()
        params.n_gpu_layers, params.load_mtp, params.use_extra_bufts = 0, True, False
        devices = (ctypes.c_void_p * 1)(None)
        params.devices = ctypes.addressof(devices)
        with libllama.quiet():
            model = self._ll.llama_model_load_from_file(str(path).encode(), params)
        assert model, f"libllama could not load {path}"
        return model

    def _context(self, model: Any, kind: int, flash: bool, n_ctx: int) -> Any:
        params = self._ll.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
        params.n_threads = params.n_threads_batch = 1
        params.ctx_type, params.flash_attn_type = kind, int(flash)
        if self._reads_cells:
            params.swa_full = self._swa_full
            params.ctx_other = None if model == self._model else self._layers
        with libllama.quiet():
            context = self._ll.llama_init_from_model(model, params)
        assert context, "libllama could not make a context"
        self._ext.llama_set_embeddings_nextn(context, True, True)
        return context

    def _decode(
        self, context: Any, tokens: Sequence[int], states: Rows | None, pos: int
    ) -> tuple[Rows, Rows]:
        """Logits of each token, and the state behind it."""
        batch = self._ll.llama_batch_init(len(tokens), 0, 1)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.logits[i] = int(token), pos + i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        batch.n_tokens = len(tokens)
        if states is not None:
            states = np.ascontiguousarray(states)
            batch.embd = states.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        status = self._ll.llama_decode(context, batch)
        batch.embd = None  # it is not the batch's to free
        self._ll.llama_batch_free(batch)
        assert status == 0, f"libllama could not decode (status {status})"
        n = len(tokens)
        logits = np.ctypeslib.as_array(self._ll.llama_get_logits(context), (n, self._n_vocab))
        hidden = np.ctypeslib.as_array(self._ext.llama_get_embeddings_nextn(context), (n, self._n_embd))
        return logits.copy(), hidden.copy()


@contextlib.contextmanager
def draft_referee(path: Path, *, flash: bool, **others: Any) -> Iterator[DraftReferee]:
    """others: as DraftReferee takes them."""
    referee = DraftReferee(path, flash=flash, **others)
    try:
        yield referee
    finally:
        referee.close()
