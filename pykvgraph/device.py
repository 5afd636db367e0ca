"""What there is to compute on, and with which native code."""

from __future__ import annotations

import ctypes
from typing import Literal

from pykvgraph._native.ffi import KvgDeviceInfo, KvgDeviceType
from pykvgraph._native.library import lib, library, sized
from pykvgraph.types import DeviceInfo, LibraryInfo

_TYPES: dict[int, Literal["cpu", "gpu", "accel"]] = {
    KvgDeviceType.KVG_DEVICE_CPU: "cpu",
    KvgDeviceType.KVG_DEVICE_GPU: "gpu",
    KvgDeviceType.KVG_DEVICE_ACCEL: "accel",
}


def devices() -> tuple[DeviceInfo, ...]:
    """Every device that this ggml was built for and found."""
    return tuple(_device(index) for index in range(lib().kvg_device_count()))


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


def library_info() -> LibraryInfo:
    """Versions and paths of libkvgraph and of the ggml under it."""
    loaded = library()
    return LibraryInfo(
        version=loaded.version,
        path=loaded.path,
        ggml_version_built=loaded.ggml_version_built,
        ggml_version_running=loaded.ggml_version_running,
        ggml_paths=loaded.ggml_paths,
    )
