"""The server's LoRA adapters, their scales, and what a request says of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pykvgraph.model.adapter import Active, Adapter, checked_adapters
from pykvgraph.openai.errors import invalid
from pykvgraph.params.params import MOST_SCALE
from pykvgraph.server.requests.fields import Fields


class AdapterScales:
    """The server's LoRA adapters, numbered as the command line names them.

    scales: of requests that say nothing of adapters.
    """

    def __init__(self, given: Iterable[tuple[Adapter, float]]) -> None:
        self._all, self.scales = [], []
        for adapter, scale in given:
            self._all.append(adapter)
            self.scales.append(scale)

    def told(self) -> list[dict[str, Any]]:
        """As llama-server tells of them."""
        return [
            {
                "id": number,
                "path": str(adapter.path),
                "scale": scale,
                "task_name": adapter.metadata.get("adapter.lora.task_name", ""),
                "prompt_prefix": adapter.metadata.get("adapter.lora.prompt_prefix", ""),
            }
            for number, (adapter, scale) in enumerate(zip(self._all, self.scales, strict=True))
        ]

    def scales_of(self, entries: Any) -> list[float]:
        """Of [{"id": 0, "scale": 0.5}, ...]; those that it doesn't name have 0. Raises WireError."""
        if not isinstance(entries, list):
            raise invalid("'lora' must be an array of objects with 'id' and 'scale' fields")
        scales = [0.0] * len(self._all)
        for entry in entries:
            fields = Fields(entry)
            number = fields.integer("id", -1)
            if not 0 <= number < len(scales):
                raise invalid(f"'lora': no adapter has id {number}; /lora-adapters lists {len(scales)}")
            scale = fields.real("scale", 0.0)
            if not abs(scale) <= MOST_SCALE:
                raise invalid(f"'lora': a scale must be from {-MOST_SCALE:g} to {MOST_SCALE:g}")
            scales[number] = scale
        return scales

    def of(self, fields: Fields) -> Active:
        """Those that a body wants; an empty list says nothing. Raises WireError."""
        entries = fields.array("lora")
        scales = self.scales_of(entries) if entries else self.scales
        return checked_adapters(zip(self._all, scales, strict=True))
