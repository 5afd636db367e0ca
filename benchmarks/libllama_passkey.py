"""The passkey task through libllama: its cache, its shift, its self-extend (which turns K the wrong way)."""

from __future__ import annotations

import ctypes
import logging
import re
from pathlib import Path
from types import TracebackType

import numpy as np
from llama_cpp import llama_cpp as ll

import pykvgraph as kvg
from pykvgraph.lab.passkey import N_ANSWER, QUESTION, Task, document_of

# a table is to be read
logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL + 1)


class LibllamaPasskey:
    """One libllama model and context; tokens are those of `model`, so that both read the same."""

    def __init__(self, path: Path, model: kvg.Model, n_ctx: int, n_batch: int, n_threads: int | None) -> None:
        self._tokenizer, self._our_model = model.tokenizer, model
        self._n_batch, self._n_ctx = n_batch, n_ctx
        model_params = ll.llama_model_default_params()
        no_devices = (ctypes.c_void_p * 1)(None)  # CPU only, even where ggml finds a GPU
        model_params.devices = ctypes.addressof(no_devices)
        model_params.n_gpu_layers = 0
        # some compilers miscompile ggml's AMX buffer type; without extra buffers it is out of the way
        model_params.use_extra_bufts = False
        self._model = ll.llama_model_load_from_file(str(path).encode(), model_params)
        if not self._model:
            raise RuntimeError(f"libllama could not load {path}")
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, n_batch
        if n_threads is not None:
            params.n_threads = params.n_threads_batch = n_threads
        params.offload_kqv = params.op_offload = False
        self._context = ll.llama_init_from_model(self._model, params)
        if not self._context:
            ll.llama_model_free(self._model)
            raise RuntimeError(f"libllama could not make a context for {path}")
        self._memory = ll.llama_get_memory(self._context)
        self._n_vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self._model))

    def run(self, task: Task) -> bool:
        """Whether the key was found."""
        document, _ = document_of(self._our_model, task)
        question = self._tokenizer.encode(QUESTION, add_special=False)
        ll.llama_memory_clear(self._memory, True)
        self._n_used = 0
        for begin in range(0, len(document), self._n_batch):
            part = document[begin : begin + self._n_batch]
            self._make_room(task, len(part))
            p0 = self._n_past()
            self._decode(part)
            if task.n_grp > 1 and begin + self._n_batch < len(document):
                # on a multiple of n_grp first, as llama.cpp's example does
                lift = p0 * (task.n_grp - 1)
                ll.llama_memory_seq_add(self._memory, 0, p0, p0 + len(part), lift)
                ll.llama_memory_seq_div(self._memory, 0, p0 + lift, p0 + lift + len(part), task.n_grp)
        self._make_room(task, len(question) + N_ANSWER)
        for begin in range(0, len(question), self._n_batch):
            self._decode(question[begin : begin + self._n_batch])
        answer = self._answer()
        digits = re.match(r"\d+", answer.strip())
        return digits is not None and digits[0] == task.drawn()[0]

    def _answer(self) -> str:
        """Greedy, up to a full stop."""
        ids: list[int] = []
        while len(ids) < N_ANSWER and "." not in self._tokenizer.decode(ids):
            logits = ll.llama_get_logits_ith(self._context, -1)
            token = int(np.argmax(np.ctypeslib.as_array(logits, (self._n_vocab,))))
            if self._tokenizer.is_eog(token):
                break
            ids.append(token)
            self._decode([token])
        return self._tokenizer.decode(ids)

    def _n_past(self) -> int:
        return int(ll.llama_memory_seq_pos_max(self._memory, 0)) + 1

    def _make_room(self, task: Task, n_tokens: int) -> None:
        n_discard = -(-self._n_batch // task.n_grp)
        while self._n_ctx - self._n_used < n_tokens:
            end = task.n_keep + n_discard
            self._n_used -= n_discard * task.n_grp
            ll.llama_memory_seq_rm(self._memory, 0, task.n_keep, end)
            ll.llama_memory_seq_add(self._memory, 0, end, -1, -n_discard)

    def _decode(self, ids: list[int]) -> None:
        batch = ll.llama_batch_init(len(ids), 0, 1)
        try:
            batch.n_tokens = len(ids)
            p0 = self._n_past()
            for i, token in enumerate(ids):
                batch.token[i], batch.pos[i] = token, p0 + i
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
                batch.logits[i] = i == len(ids) - 1
            status = ll.llama_decode(self._context, batch)
        finally:
            ll.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"libllama could not decode {len(ids)} tokens (status {status})")
        self._n_used += len(ids)

    def __enter__(self) -> LibllamaPasskey:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ll.llama_free(self._context)
        ll.llama_model_free(self._model)
