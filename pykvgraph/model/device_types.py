"""The records that tell of devices; their fields can't be changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class DeviceInfo:
    """A device that ggml can compute on."""

    name: str  # as `Model(device=...)` takes it
    description: str
    type: Literal["cpu", "gpu", "accel"]
    memory_free: int  # bytes; 0 when the device doesn't tell
    memory_total: int


@dataclass(frozen=True)
class DevicePart:
    """The memory that a context and its model use on one device, and how the device computes."""

    device: str
    n_layer: int  # number of layers whose weights are on the device, the output not counted
    n_cache: int  # number of layers whose cells are on the device
    weight_bytes: int  # of the weights, those that are mapped from the file included
    mapped_bytes: int  # of these, those that are mapped: other processes may have them in memory, too
    cache_bytes: int  # of K and V
    pinned_bytes: int  # of these, those in pinned host memory: a device copies from and to it directly
    # of the graphs' intermediate results. A context keeps up to eight graphs of at most 32 tokens beside the
    # largest one as these come up; a plan has all of them. Logits of more than 32 tokens of one micro-batch,
    # or n_seq_max if that is more, come to that.
    compute_bytes: int
    attention: str  # "flash", "plain", "attend" (pykvgraph's CPU kernel); "" when it reads no cells
    shift_on_device: bool  # the device rotates K itself, or has no cells; False: the CPU rotates K for it
    fallbacks: tuple[str, ...]  # ggml operations of the device's layers that the CPU computes


@dataclass(frozen=True)
class Abilities:
    """What a device can do for a model when the cache is on the device and K and V have type cache_type."""

    cache_type: str
    attention: str  # as in DevicePart; "" when the device can't run the model
    shift_on_device: bool  # the device rotates K itself; False: the CPU rotates K for it
    can_defrag: bool
    fallbacks: tuple[str, ...]  # ggml operations of a decode that the CPU computes for the device
    refused: str  # why the device can't run the model; "" when it can


@dataclass(frozen=True)
class LibraryInfo:
    """Versions and paths of libkvgraph and of the ggml that this process uses; libllama is not in it.

    version, path: of libkvgraph. ggml_version_built: the ggml that libkvgraph was compiled against.
    ggml_version_running: the ggml that is loaded. ggml_paths: the files of that ggml.
    """

    version: str
    path: Path
    ggml_version_built: str
    ggml_version_running: str
    ggml_paths: tuple[Path, ...]
