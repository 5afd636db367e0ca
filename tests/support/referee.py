"""libllama on the same file, as the judge of our logits."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import numpy as np
from llama_cpp import llama_cpp as ll

from support.engines import Logits, Token
from support.kv_types import GGML_TYPES

# a test says what failed by itself
logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL + 1)


class Referee:
    """One libllama model and context. Speaks `support.engines.Engine`."""

    def __init__(
        self,
        path: Path,
        *,
        flash: bool,
        n_ctx: int = 512,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        kv_type: str = "f16",
    ) -> None:
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
        params.n_ctx = n_ctx
        params.n_batch = n_ctx
        params.n_ubatch = n_ubatch
        params.n_seq_max = n_seq_max
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = int(flash)  # 0 disabled, 1 enabled
        params.type_k = params.type_v = int(GGML_TYPES[kv_type])
        params.kv_unified = True
        params.offload_kqv = params.op_offload = False
        self._context = ll.llama_init_from_model(self._model, params)
        if not self._context:
            ll.llama_model_free(self._model)
            raise RuntimeError(f"libllama could not make a context for {path}")
        self._memory = ll.llama_get_memory(self._context)
        self._n_vocab = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self._model))

    def decode(self, tokens: Iterable[Token]) -> Logits:
        tokens = list(tokens)
        batch = ll.llama_batch_init(len(tokens), 0, max(len(t.seq_ids) for t in tokens))
        try:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i] = token.id
                batch.pos[i] = token.pos
                batch.n_seq_id[i] = len(token.seq_ids)
                for j, seq in enumerate(token.seq_ids):
                    batch.seq_id[i][j] = seq
                batch.logits[i] = token.logits
            status = ll.llama_decode(self._context, batch)
        finally:
            ll.llama_batch_free(batch)
        if status != 0:
            raise RuntimeError(f"libllama could not decode {len(tokens)} tokens (status {status})")
        return self._logits(sum(t.logits for t in tokens))

    def _logits(self, n_outputs: int) -> Logits:
        if n_outputs == 0:
            return np.empty((0, self._n_vocab), np.float32)
        rows = np.ctypeslib.as_array(ll.llama_get_logits(self._context), (n_outputs, self._n_vocab))
        return np.array(rows, np.float32)

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        assert ll.llama_memory_seq_rm(self._memory, seq, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        ll.llama_memory_seq_cp(self._memory, src, dst, p0, p1)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        ll.llama_memory_seq_add(self._memory, seq, p0, p1, delta)

    def __enter__(self) -> Referee:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ll.llama_free(self._context)
        ll.llama_model_free(self._model)
