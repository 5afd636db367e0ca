"""ggml's own copies, timed through its C interface: what a device and its bus can do."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import pykvgraph as kvg
from pykvgraph._native.library import library
from pykvgraph.bench.libllama import ggml_device

REPETITIONS = 5
POINTER = ctypes.c_void_p


class InitParams(ctypes.Structure):
    _fields_ = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def function(name: str, result: Any, *arguments: Any) -> Any:
    base = ctypes.CDLL(str(next(p for p in library().ggml_paths if p.name.startswith("libggml-base"))))
    found = getattr(base, name)
    found.restype, found.argtypes = result, arguments
    return found


class Tensors:
    """A backend of a device, and F32 tensors of n_bytes each on it. Raises DeviceError without room."""

    def __init__(self, device: str, n_bytes: int, n: int) -> None:
        new_backend = function("ggml_backend_dev_init", POINTER, POINTER, POINTER)
        self.device = ggml_device(device)
        self.backend = new_backend(self.device, None)
        self.context = function("ggml_init", POINTER, InitParams)(InitParams(1 << 20, None, True))
        new_tensor = function("ggml_new_tensor_1d", POINTER, POINTER, ctypes.c_int, ctypes.c_int64)
        self.tensors = [new_tensor(self.context, 0, n_bytes // 4) for _ in range(n)]
        allocate = function("ggml_backend_alloc_ctx_tensors", POINTER, POINTER, POINTER)
        self.buffer = allocate(self.context, self.backend)
        if not self.buffer:
            raise kvg.DeviceError(f"{device} has no room for {n} buffers of {n_bytes} bytes")

    def __enter__(self) -> Tensors:
        return self

    def __exit__(self, *_: object) -> None:
        function("ggml_backend_buffer_free", None, POINTER)(self.buffer)
        function("ggml_free", None, POINTER)(self.context)
        function("ggml_backend_free", None, POINTER)(self.backend)


def copy_rate(device: str, n_bytes: int) -> float:
    """Bytes a second, read and written counted, of a graph of one ggml_cpy."""
    with Tensors(device, n_bytes, 2) as there:
        node = function("ggml_cpy", POINTER, POINTER, POINTER, POINTER)(there.context, *there.tensors)
        function("ggml_backend_view_init", ctypes.c_int, POINTER)(node)  # it is a view of the target
        graph = function("ggml_new_graph", POINTER, POINTER)(there.context)
        function("ggml_build_forward_expand", None, POINTER, POINTER)(graph, node)
        compute = function("ggml_backend_graph_compute", ctypes.c_int, POINTER, POINTER)
        seconds = [timed(lambda: compute(there.backend, graph)) for _ in range(REPETITIONS + 1)]
    return 2 * n_bytes / statistics.median(seconds[1:])


def bus_rate(device: str, n_bytes: int) -> float:
    """Bytes a second from host memory to the device: pinned memory, where the device has it."""
    with Tensors(device, n_bytes, 1) as there:
        pinned = function("ggml_backend_dev_host_buffer_type", POINTER, POINTER)(there.device)
        ordinary = function("ggml_backend_cpu_buffer_type", POINTER)()
        allocate = function("ggml_backend_buft_alloc_buffer", POINTER, POINTER, ctypes.c_size_t)
        host = allocate(pinned or ordinary, n_bytes)
        function("ggml_backend_buffer_clear", None, POINTER, ctypes.c_uint8)(host, 1)
        begin = function("ggml_backend_buffer_get_base", POINTER, POINTER)(host)
        sizes = ctypes.c_size_t, ctypes.c_size_t
        set_async = function("ggml_backend_tensor_set_async", None, POINTER, POINTER, POINTER, *sizes)
        wait = function("ggml_backend_synchronize", None, POINTER)

        def copy() -> None:
            set_async(there.backend, there.tensors[0], begin, 0, n_bytes)
            wait(there.backend)

        seconds = [timed(copy) for _ in range(REPETITIONS + 1)]
        function("ggml_backend_buffer_free", None, POINTER)(host)
    return n_bytes / statistics.median(seconds[1:])
