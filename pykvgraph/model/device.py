"""The devices that ggml can compute on, and the versions of the native libraries."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Literal

from pykvgraph._native.ffi import KvgContextPart, KvgDeviceInfo, KvgDeviceType
from pykvgraph._native.fork import importing
from pykvgraph._native.handles import ALONE
from pykvgraph._native.library import lib, library, sized
from pykvgraph.checks import shown
from pykvgraph.errors import DeviceError, InvalidArgumentError
from pykvgraph.model.device_types import DeviceInfo, DevicePart, LibraryInfo

_TYPES: dict[int, Literal["cpu", "gpu", "accel"]] = {
    KvgDeviceType.KVG_DEVICE_CPU: "cpu",
    KvgDeviceType.KVG_DEVICE_GPU: "gpu",
    KvgDeviceType.KVG_DEVICE_ACCEL: "accel",
}


def devices() -> tuple[DeviceInfo, ...]:
    """Every device that the loaded ggml can compute on: the CPU, GPUs, and devices of RPC servers."""
    return ALONE.call(lambda _: tuple(_device(index) for index in range(lib().kvg_device_count())))


_RPC_PROTOCOL = [7, 0]  # major and minor of this ggml, which refuses a greater minor; there is none below 0
_RPC_HELLO = 14
_RPC_TIMEOUT = 5.0  # seconds


def add_rpc_server(endpoint: str) -> tuple[DeviceInfo, ...]:
    """Adds the devices of a ggml RPC server to devices(), and returns them. endpoint: "host:port".

    Adding the same server again changes nothing. The server must run the same ggml version. Use it only on
    this machine or in a network that you trust: neither side checks who the other is. ggml ends this process
    when a server that it uses stops answering.

    Raises InvalidArgumentError when endpoint is not "host:port", and DeviceError when no RPC server of this
    version answers there, or the loaded ggml was built without RPC.
    """
    host, port = _endpoint(endpoint)
    if not any("libggml-rpc" in path.name for path in library().ggml_paths):
        raise DeviceError(
            'this ggml has no RPC; build llama-cpp-python with CMAKE_ARGS="-DGGML_RPC=on" to have it'
        )
    _greet(endpoint, host, port)
    ALONE.call(lambda _: lib().kvg_rpc_add_server(endpoint.encode()))
    return tuple(info for info in devices() if info.description == endpoint)


def _endpoint(endpoint: str) -> tuple[str, int]:
    host, separator, port = endpoint.rpartition(":") if isinstance(endpoint, str) else ("", "", "")
    valid = separator and host.isascii() and host.isprintable() and not set(host) & set(" :,")
    if not (valid and host and port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise InvalidArgumentError(f'an RPC server is "host:port", got {shown(endpoint)}')
    return host, int(port)


def _greet(endpoint: str, host: str, port: int) -> None:
    """Raises DeviceError unless an RPC server of this version answers: ggml would end the process."""
    with importing:
        import socket
    caps = bytes(24)
    try:
        with socket.create_connection((host, port), timeout=_RPC_TIMEOUT) as connection:
            connection.settimeout(_RPC_TIMEOUT)
            connection.sendall(struct.pack("<BQ", _RPC_HELLO, len(caps)) + caps)
            reply = b""
            while len(reply) < 12 and (data := connection.recv(64)):
                reply += data
    except OSError as error:
        raise DeviceError(f"no RPC server answers at {endpoint}: {error}. Start one there first") from error
    size, *version = struct.unpack("<QBB", reply[:10]) if len(reply) >= 12 else (0,)
    if size != 4 + len(caps) or version != _RPC_PROTOCOL:
        raise DeviceError(
            f"what answers at {endpoint} is no RPC server of this ggml: run the same llama-cpp-python there"
        )


def _device(index: int) -> DeviceInfo:
    info = sized(KvgDeviceInfo)
    lib().kvg_device_get(index, ctypes.byref(info))
    return DeviceInfo(
        name=info.name.decode("utf-8", "replace"),
        description=info.description.decode("utf-8", "replace"),
        type=_TYPES[info.type],
        memory_free=info.memory_free,
        memory_total=info.memory_total,
    )


def read_parts(
    handle: int, count: Callable[[int], int], get: Callable[..., object]
) -> tuple[DevicePart, ...]:
    """The parts of a context or a plan; count and get are its two native functions."""
    return tuple(_part(handle, get, index) for index in range(count(handle)))


def _part(handle: int, get: Callable[..., object], index: int) -> DevicePart:
    part = sized(KvgContextPart)
    get(handle, index, ctypes.byref(part))
    return DevicePart(
        device=part.device.decode("utf-8", "replace"),
        n_layer=part.n_layer,
        n_cache=part.n_cache,
        weight_bytes=part.weight_bytes,
        mapped_bytes=part.mapped_bytes,
        cache_bytes=part.cache_bytes,
        pinned_bytes=part.pinned_bytes,
        compute_bytes=part.compute_bytes,
        attention=part.attention.decode(),
        shift_on_device=bool(part.shift_on_device),
        fallbacks=tuple(part.fallbacks.decode().split(", ")) if part.fallbacks else (),
    )


def library_info() -> LibraryInfo:
    """Versions and paths of libkvgraph and of the ggml that it uses."""
    loaded = library()
    return LibraryInfo(
        version=loaded.version,
        path=loaded.path,
        ggml_version_built=loaded.ggml_version_built,
        ggml_version_running=loaded.ggml_version_running,
        ggml_paths=loaded.ggml_paths,
    )
