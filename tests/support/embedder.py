"""libllama's embeddings, as the judge of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from numpy.ctypeslib import as_array

from pykvgraph._native import libllama
from pykvgraph.bench.libllama import LibllamaModel
from pykvgraph.errors import DeviceError

Vector = npt.NDArray[np.float32]
UNSPECIFIED, RANK = -1, 4


def vectors_by_libllama(
    path: Path, texts: Sequence[Sequence[int]], *, pooling: int = UNSPECIFIED, flash: bool = False
) -> list[Vector]:
    """Of each text (n_embd,), or without pooling (n_tokens, n_embd), all decoded by one call on one thread.

    Of a reranker, of each text the scores of its classes.
    pooling: llama.cpp's number; the file's own unless given.
    """
    with contextlib.ExitStack() as stack:
        model = LibllamaModel(path, extra_buffers=False)
        stack.callback(model.close)
        ll, n_tokens = model.ll, sum(map(len, texts))
        params = ll.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = max(n_tokens, 512)
        params.n_seq_max = len(texts)
        params.n_threads = params.n_threads_batch = 1
        params.embeddings, params.kv_unified = True, True
        params.pooling_type, params.flash_attn_type = pooling, int(flash)
        with libllama.quiet():
            context = ll.llama_init_from_model(model.pointer, params)
        if not context:
            raise DeviceError("libllama could not make a context of these sizes")
        stack.callback(ll.llama_free, context)
        batch = ll.llama_batch_init(n_tokens, 0, 1)
        stack.callback(ll.llama_batch_free, batch)
        rows = [(seq, pos, token) for seq, ids in enumerate(texts) for pos, token in enumerate(ids)]
        batch.n_tokens = n_tokens
        for i, (seq, pos, token) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, pos, 1
            batch.seq_id[i][0], batch.logits[i] = seq, 1
        if ll.llama_decode(context, batch) != 0:
            raise DeviceError(f"libllama could not decode {n_tokens} tokens")
        pooled_by = ll.llama_pooling_type(context)
        is_rank = pooled_by == RANK
        n_embd = ll.llama_model_n_cls_out(model.pointer) if is_rank else ll.llama_model_n_embd(model.pointer)
        if pooled_by != 0:
            found = [ll.llama_get_embeddings_seq(context, seq) for seq in range(len(texts))]
            return [np.array(as_array(each, (n_embd,))) for each in found]
        states = np.stack(
            [as_array(ll.llama_get_embeddings_ith(context, i), (n_embd,)) for i in range(n_tokens)]
        )
        return np.split(states, np.cumsum([len(ids) for ids in texts])[:-1])


def cosine(a: Vector, b: Vector) -> float:
    """The least of any row."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.min((a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))))


def break_classifier(path: Path) -> None:
    """From now on the scores of the file's model are no numbers."""
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        if tensor.name == "cls.output.weight":
            tensor.data[:] = np.nan
