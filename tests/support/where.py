"""Where the tests of what is computed run: on the CPU, or on the device of `pytest --device`.

With `--kv-tier host` K and V are in host memory, and the device attends.
"""

from __future__ import annotations

from typing import Any

device = "cpu"
kv_tier = "device"


def choose(name: str, tier: str) -> None:
    """Raises ValueError for a device that isn't there."""
    global device, kv_tier
    kv_tier = tier
    if name.lower() == "cpu":
        return
    import pykvgraph as kvg  # tests/unit runs without the native library

    names = {info.name.lower(): info.name for info in kvg.devices()}
    if name.lower() not in names:
        raise ValueError(f"no device {name}; there are {', '.join(names.values())}")
    device = names[name.lower()]


def tier_of(options: dict[str, Any]) -> dict[str, Any]:
    """As Context takes it; where the CPU attends there is no other tier."""
    return {} if options.get("offload_kqv") is False else {"kv_tier": kv_tier}


def is_cpu() -> bool:
    return device == "cpu"


def examples(on_cpu: int) -> int:
    """How many of them to look at: a software device takes its time."""
    return on_cpu if is_cpu() else -(-on_cpu // 8)


def limit(on_cpu: float) -> float:
    """An NMSE between two ways to the same logits, on the CPU, as a device may have it."""
    return on_cpu if is_cpu() else 10 * on_cpu


def rule(on_cpu: float) -> float:
    """An NMSE to another engine on the CPU, as a device may have it: some multiply and add in F16."""
    return on_cpu if is_cpu() else max(1e-3, 1.5 * on_cpu)
