"""What a device can do for a model: asked beforehand, nothing is loaded."""

from __future__ import annotations

import os

from pykvgraph.errors import UnsupportedError
from pykvgraph.model.device_types import Abilities
from pykvgraph.params.params import ContextParams
from pykvgraph.plan.memory import plan_memory


def abilities(path: str | os.PathLike[str], device: str, cache_type: str = ContextParams.type_k) -> Abilities:
    """Which parts of decode, K-shift and defrag of this model the device can run itself.

    path, device: as Model takes them. cache_type: the type of K and V. A device of an RPC server can't be
    asked, and seems to do everything. Raises what plan_memory() raises, except UnsupportedError: its message
    is then in the result's `refused`.
    """
    try:
        part = plan_memory(path, device, n_ctx=256, n_ubatch=32, type_k=cache_type, type_v=cache_type)[0]
    except UnsupportedError as error:
        return Abilities(cache_type, "", False, False, (), str(error))
    # a device that can't move cells is refused: it could not write them either
    return Abilities(cache_type, part.attention, part.shift_on_device, True, part.fallbacks, "")
