"""libllama itself, as the reference for the results and the speed of our engine.

Nothing here uses our engine. Only `pykvgraph.params.params` is shared, for the names of sizes and types.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.ctypeslib import as_array

from pykvgraph._native import libllama
from pykvgraph._native.library import library
from pykvgraph.errors import DeviceError, InvalidArgumentError, ModelLoadError, UnsupportedError
from pykvgraph.params.params import ContextParams

State: TypeAlias = "ctypes.Array[ctypes.c_uint8]"


class LibllamaModel:
    """A model in libllama, all of it on one device. Close its contexts before it.

    device: a name as in pykvgraph.devices(). extra_buffers: whether libllama may repack weights for the CPU;
    by default it may where that is safe. Raises ModelLoadError, and DeviceError if there is no such device.
    """

    def __init__(self, path: Path, device: str = "CPU", *, extra_buffers: bool | None = None) -> None:
        self.ll = libllama.package("llama_cpp")
        params = self.ll.llama_model_default_params()
        self.is_offloaded = device != "CPU"
        # an empty list means the CPU, even where ggml finds a GPU
        listed = [ggml_device(device)] if self.is_offloaded else []
        devices = (ctypes.c_void_p * (len(listed) + 1))(*listed, None)
        params.devices = ctypes.addressof(devices)
        params.n_gpu_layers = 1000 if self.is_offloaded else 0
        params.use_extra_bufts = extra_buffers_are_safe() if extra_buffers is None else extra_buffers
        with libllama.quiet():
            self.pointer = self.ll.llama_model_load_from_file(str(path).encode(), params)
        if not self.pointer:
            raise ModelLoadError(f"libllama could not load {path}")
        self._vocab = self.ll.llama_model_get_vocab(self.pointer)
        self.n_vocab = int(self.ll.llama_vocab_n_tokens(self._vocab))
        self.n_params = int(self.ll.llama_model_n_params(self.pointer))

    def encode(self, text: str, *, parse_special: bool = False) -> list[int]:
        """The tokens of a text, with BOS if the model wants it.

        parse_special: whether names of control tokens stand for these; otherwise they are plain text.
        """
        data = text.encode()
        ids = (ctypes.c_int32 * (len(data) + 8))()
        n = self.ll.llama_tokenize(self._vocab, data, len(data), ids, len(ids), True, parse_special)
        if n < 0:
            raise ModelLoadError(f"libllama makes more than {len(ids)} tokens of {len(data)} bytes")
        return list(ids[:n])

    def load_adapter(self, path: Path) -> int:
        """A LoRA adapter, which lives as long as the model; to be loaded before a context.

        Raises ModelLoadError.
        """
        with libllama.quiet():
            adapter = self.ll.llama_adapter_lora_init(self.pointer, str(path).encode())
        if not adapter:
            raise ModelLoadError(f"libllama could not load the adapter {path}")
        address: int = ctypes.cast(adapter, ctypes.c_void_p).value or 0
        return address

    def close(self) -> None:
        self.ll.llama_model_free(self.pointer)


class LibllamaContext:
    """A context of libllama, driven through its C interface.

    params: as for our Context; hadamard and defrag_threshold are ignored. unified: all sequences share one
    cache; otherwise it is split evenly among them. Ranges of positions are [p0, p1), and p1 < 0 means no end.
    Raises DeviceError when libllama refuses the sizes.
    """

    def __init__(self, model: LibllamaModel, params: ContextParams, *, unified: bool = True) -> None:
        self.n_vocab = model.n_vocab
        self._ll = ll = model.ll
        ours = params.native(model.n_params)
        theirs = ll.llama_context_default_params()
        for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_threads", "n_threads_batch"):
            setattr(theirs, name, getattr(ours, name))
        theirs.type_k, theirs.type_v = ours.type_k, ours.type_v
        theirs.flash_attn_type = ours.flash_attn  # the numbers are the same
        theirs.kv_unified = unified
        theirs.swa_full = params.swa_full
        theirs.offload_kqv, theirs.op_offload = model.is_offloaded, False
        with libllama.quiet():
            self._context = ll.llama_init_from_model(model.pointer, theirs)
        if not self._context:
            raise DeviceError("libllama could not make a context of these sizes")
        self._memory = ll.llama_get_memory(self._context)
        self._n_batch, self._n_outputs = params.n_batch, 0
        self._batch = batch = ll.llama_batch_init(params.n_batch, 0, params.n_seq_max)
        # read once: each access makes a new pointer object, which a benchmark would count for libllama
        self._columns = batch.token, batch.pos, batch.n_seq_id, batch.seq_id, batch.logits

    def decode(self, tokens: Iterable[tuple[int, int, Sequence[int], bool]]) -> None:
        """Decodes at most n_batch tokens: each has an id, a position, sequences, and a flag for logits.

        Waits until they are computed. Raises DeviceError when libllama refuses them.
        """
        batch, n_batch = self._batch, self._n_batch
        ids, positions, n_seq_ids, sequences, wanted = self._columns
        n_tokens = n_outputs = self._n_outputs = 0
        for token, pos, seq_ids, logits in tokens:
            if n_tokens == n_batch:
                raise InvalidArgumentError(f"these are more tokens than n_batch, {n_batch}")
            ids[n_tokens] = token
            positions[n_tokens] = pos
            n_seq_ids[n_tokens] = len(seq_ids)
            row = sequences[n_tokens]
            for j, seq in enumerate(seq_ids):
                row[j] = seq
            wanted[n_tokens] = logits
            n_outputs += logits
            n_tokens += 1
        batch.n_tokens = n_tokens
        status = self._ll.llama_decode(self._context, batch)
        if status != 0:
            raise DeviceError(f"libllama could not decode {n_tokens} tokens (status {status})")
        self._ll.llama_synchronize(self._context)
        self._n_outputs = n_outputs

    def decode_again(self, n_times: int, pos0: int) -> None:
        """Decodes token 0 n_times in sequence 0, from pos0 on, with hardly anything but llama_decode.

        ctypes takes 2 us of each call.
        """
        batch, decode, context = self._batch, self._ll.llama_decode, self._context
        batch.n_tokens, batch.token[0], batch.n_seq_id[0] = 1, 0, 1
        batch.seq_id[0][0], batch.logits[0] = 0, 1
        failed = 0
        for pos in range(pos0, pos0 + n_times):
            batch.pos[0] = pos
            failed |= decode(context, batch)
        if failed:
            raise DeviceError("libllama could not decode")
        self._ll.llama_synchronize(context)
        self._n_outputs = 1

    def logits(self) -> npt.NDArray[np.float32]:
        """The last decode's logits, float32 (n_outputs, n_vocab), in batch order; a copy."""
        if self._n_outputs == 0:
            return np.empty((0, self.n_vocab), np.float32)
        rows = as_array(self._ll.llama_get_logits(self._context), (self._n_outputs, self.n_vocab))
        return np.array(rows, np.float32)

    def clear(self) -> None:
        self._ll.llama_memory_clear(self._memory, False)

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        if not self._ll.llama_memory_seq_rm(self._memory, seq, p0, p1):
            raise UnsupportedError(f"libllama can't remove positions {p0} to {p1} from this model's memory")

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        self._ll.llama_memory_seq_cp(self._memory, src, dst, p0, p1)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self._ll.llama_memory_seq_add(self._memory, seq, p0, p1, delta)

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        self._ll.llama_memory_seq_div(self._memory, seq, p0, p1, d)

    def seq_pos_max(self, seq: int) -> int:
        return int(self._ll.llama_memory_seq_pos_max(self._memory, seq))

    def save(self, seq: int = 0) -> State:
        """Saves a sequence to memory."""
        size = self._ll.llama_state_seq_get_size(self._context, seq)
        state: State = (ctypes.c_uint8 * size)()
        self._ll.llama_state_seq_get_data(self._context, state, size, seq)
        return state

    def load(self, state: State, seq: int = 0) -> None:
        if self._ll.llama_state_seq_set_data(self._context, state, len(state), seq) == 0:
            raise DeviceError("libllama did not take its own state back")

    def set_adapters(self, adapters: Sequence[tuple[int, float]]) -> None:
        """These of LibllamaModel.load_adapter() take part from now on, each times its scale."""
        pointers = (ctypes.c_void_p * len(adapters))(*(adapter for adapter, _ in adapters))
        scales = (ctypes.c_float * len(adapters))(*(scale for _, scale in adapters))
        address = ctypes.cast(pointers, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))
        if self._ll.llama_set_adapters_lora(self._context, address, len(adapters), scales):
            raise DeviceError("libllama did not take the adapters")

    def close(self) -> None:
        self._ll.llama_batch_free(self._batch)
        self._ll.llama_free(self._context)


@contextlib.contextmanager
def opened(
    path: Path, params: ContextParams, device: str = "CPU"
) -> Iterator[tuple[LibllamaModel, LibllamaContext]]:
    """A model on one device with one context; weights are not repacked."""
    with contextlib.ExitStack() as stack:
        model = LibllamaModel(path, device, extra_buffers=False)
        stack.callback(model.close)
        context = LibllamaContext(model, params)
        stack.callback(context.close)
        yield model, context


def ggml_device(name: str) -> int:
    """ggml's handle of the device with this name. Raises DeviceError when there is none."""
    path = next(path for path in library().ggml_paths if path.name.startswith("libggml.so"))
    find = ctypes.CDLL(str(path)).ggml_backend_dev_by_name
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    found: int | None = find(name.encode())
    if not found:
        raise DeviceError(f"ggml has no device {name}: `pykvgraph info` lists them")
    return found


def extra_buffers_are_safe() -> bool:
    """Whether libllama may repack weights here. On CPUs with AMX it crashes when ggml was built by GCC 12."""
    flags = Path("/proc/cpuinfo")
    return not flags.exists() or "amx_int8" not in flags.read_text()
