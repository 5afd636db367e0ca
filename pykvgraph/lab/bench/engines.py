"""Engines that a test can be run on: ours, and libllama on the same file with the same threads."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from pykvgraph._native import libllama
from pykvgraph._native.library import library
from pykvgraph.batch import Batch
from pykvgraph.context import Context
from pykvgraph.errors import DeviceError, ModelLoadError
from pykvgraph.model import Model
from pykvgraph.params import CACHE_TYPES, ContextParams
from pykvgraph.token_loop import generate

Ids = npt.NDArray[np.int32]


class Engine(Protocol):
    """What a test may ask of an engine. Ranges are [p0, p1); p1 < 0: to the end."""

    name: str
    n_vocab: int
    filled: Any  # sequence 0 as a test filled it, saved; None before

    def prefill(self, ids: Ids, pos0: int, seq: int = 0) -> None:
        """Decodes them with logits for the last."""

    def step(self, ids: Sequence[int], pos: Sequence[int]) -> None:
        """Decodes one token for each of the sequences 0, 1, ..., all with logits."""

    def generate(self, n_tokens: int, pos0: int) -> int:
        """Goes on with sequence 0 in the engine's own loop, up to n_tokens; how many there were."""

    def clear(self) -> None: ...
    def seq_rm(self, seq: int, p0: int, p1: int) -> None: ...
    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None: ...
    def defrag(self, policy: Literal["fill", "sort"]) -> None:
        """Compacts the cache at once; nothing where the engine can't."""

    def save(self) -> Any:
        """Sequence 0, in memory."""

    def load(self, state: Any) -> None:
        """Into sequence 0."""

    def close(self) -> None: ...


class OurEngine:
    """pykvgraph through its Python face."""

    def __init__(self, params: ContextParams, model: Model) -> None:
        self.name = "pykvgraph"
        self.filled: bytes | None = None
        self.n_vocab = model.n_vocab
        self.context = Context(model, **vars(params))
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
        """The token loop with all that it does: sampling, text, log probabilities."""
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


class LibllamaModel:
    """A model in libllama, for several engines: all of it on one device."""

    def __init__(self, path: Path, device: str = "CPU") -> None:
        self.ll = libllama.low_level()
        params = self.ll.llama_model_default_params()
        self.is_offloaded = device != "CPU"
        # CPU only is an empty list, even where ggml finds a GPU
        listed = [ggml_device(device)] if self.is_offloaded else []
        devices = (ctypes.c_void_p * (len(listed) + 1))(*listed, None)
        params.devices = ctypes.addressof(devices)
        params.n_gpu_layers = 1000 if self.is_offloaded else 0
        params.use_extra_bufts = extra_buffers_are_safe()
        with libllama.quiet():
            self.pointer = self.ll.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise ModelLoadError(f"libllama could not load {path}: nothing to compare with")
        self.n_vocab = self.ll.llama_vocab_n_tokens(self.ll.llama_model_get_vocab(self.pointer))

    def close(self) -> None:
        self.ll.llama_model_free(self.pointer)


def ggml_device(name: str) -> int:
    """ggml's handle of a device, by its name. Raises DeviceError when there is none."""
    path = next(path for path in library().ggml_paths if path.name.startswith("libggml.so"))
    find = ctypes.CDLL(str(path)).ggml_backend_dev_by_name
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    found: int | None = find(name.encode())
    if not found:
        raise DeviceError(f"ggml has no device {name}: `pykvgraph info` lists them")
    return found


def extra_buffers_are_safe() -> bool:
    """Whether libllama may repack weights here: where there is AMX, ggml built by GCC 12 crashes in it."""
    flags = Path("/proc/cpuinfo")
    return not flags.exists() or "amx_int8" not in flags.read_text()


class LibllamaEngine:
    """A context of libllama, through its C interface and one batch that is filled again and again."""

    def __init__(
        self, params: ContextParams, model: LibllamaModel, *, flash: bool, unified: bool = True
    ) -> None:
        self.name = "libllama" + (" -fa 1" if flash else " -fa 0") + ("" if unified else ", streams")
        self.n_vocab = model.n_vocab
        self.filled: ctypes.Array[ctypes.c_uint8] | None = None
        ll = self._ll = model.ll
        native = ll.llama_context_default_params()
        # a cache that isn't unified is split evenly among its sequences
        native.n_ctx, native.n_batch, native.n_ubatch = params.n_ctx, params.n_batch, params.n_ubatch
        native.n_seq_max = params.n_seq_max
        native.n_threads, native.n_threads_batch = params.n_threads, params.n_threads_batch
        native.type_k, native.type_v = CACHE_TYPES[params.type_k], CACHE_TYPES[params.type_v]
        native.flash_attn_type = int(flash)
        native.kv_unified = unified
        native.offload_kqv, native.op_offload = model.is_offloaded, False
        with libllama.quiet():
            self._context = ll.llama_init_from_model(model.pointer, native)
        if not self._context:
            raise DeviceError("libllama could not make a context of these sizes: nothing to compare with")
        self._memory = ll.llama_get_memory(self._context)
        self._batch = ll.llama_batch_init(params.n_batch, 0, 1)
        for i in range(params.n_batch):
            self._batch.n_seq_id[i] = 1

    def prefill(self, ids: Ids, pos0: int, seq: int = 0) -> None:
        batch, n_batch = self._batch, int(self._ll.llama_n_batch(self._context))
        for begin in range(0, len(ids), n_batch):
            part = ids[begin : begin + n_batch]
            batch.n_tokens = len(part)
            for i, token in enumerate(part.tolist()):
                batch.token[i], batch.pos[i] = token, pos0 + begin + i
                batch.seq_id[i][0] = seq
                batch.logits[i] = 0
            batch.logits[len(part) - 1] = begin + len(part) == len(ids)
            self._decode()

    def step(self, ids: Sequence[int], pos: Sequence[int]) -> None:
        batch = self._batch
        batch.n_tokens = len(ids)
        for seq, (token, at) in enumerate(zip(ids, pos, strict=True)):
            batch.token[seq], batch.pos[seq] = token, at
            batch.seq_id[seq][0] = seq
            batch.logits[seq] = 1
        self._decode()

    def generate(self, n_tokens: int, pos0: int) -> int:
        """llama_decode and nothing else; ctypes takes 2 us of it a call."""
        batch, decode, context = self._batch, self._ll.llama_decode, self._context
        batch.n_tokens, batch.token[0], batch.seq_id[0][0], batch.logits[0] = 1, 0, 0, 1
        failed = 0
        for i in range(n_tokens):
            batch.pos[0] = pos0 + i
            failed |= decode(context, batch)
        if failed:
            raise DeviceError("libllama could not decode")
        self._ll.llama_synchronize(context)
        return n_tokens

    def _decode(self) -> None:
        status = self._ll.llama_decode(self._context, self._batch)
        if status != 0:
            raise DeviceError(f"libllama could not decode {self._batch.n_tokens} tokens (status {status})")
        self._ll.llama_synchronize(self._context)

    def clear(self) -> None:
        self._ll.llama_memory_clear(self._memory, False)

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        self._ll.llama_memory_seq_rm(self._memory, seq, p0, p1)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self._ll.llama_memory_seq_add(self._memory, seq, p0, p1, delta)

    def defrag(self, policy: Literal["fill", "sort"]) -> None:
        """libllama has none any more."""

    def save(self) -> ctypes.Array[ctypes.c_uint8]:
        size = self._ll.llama_state_seq_get_size(self._context, 0)
        state: ctypes.Array[ctypes.c_uint8] = (ctypes.c_uint8 * size)()
        self._ll.llama_state_seq_get_data(self._context, state, size, 0)
        return state

    def load(self, state: ctypes.Array[ctypes.c_uint8]) -> None:
        if self._ll.llama_state_seq_set_data(self._context, state, len(state), 0) == 0:
            raise DeviceError("libllama did not take its own state back")

    def close(self) -> None:
        self._ll.llama_batch_free(self._batch)
        self._ll.llama_free(self._context)
