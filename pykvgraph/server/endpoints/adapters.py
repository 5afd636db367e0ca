"""The server's LoRA adapters, their scales, and what a request says of them; /lora-adapters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.types import ASGIApp

from pykvgraph.checks import shown
from pykvgraph.model.adapter import Active, Adapter, checked_adapters
from pykvgraph.openai.errors import invalid
from pykvgraph.openai.wire_json import loads
from pykvgraph.params.params import MOST_SCALE
from pykvgraph.server.http.body import SHORT, read_body
from pykvgraph.server.http.reply import JsonReply
from pykvgraph.server.requests.fields import Fields

if TYPE_CHECKING:
    from pykvgraph.server.service import Service


class Adapters:
    """Numbered as the command line names them. scales: of requests that say nothing of adapters."""

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


async def told(service: Service, request: Request) -> ASGIApp:
    """GET /lora-adapters."""
    return JsonReply(service.adapters.told())


async def set_scales(service: Service, request: Request) -> ASGIApp:
    """POST /lora-adapters: for requests from now on that say nothing of adapters themselves."""
    settings = service.settings
    entries = loads(await read_body(request, min(settings.max_body, SHORT), settings.body_seconds))
    if not isinstance(entries, list):
        raise invalid(f"Request body must be an array, got {shown(entries)}")
    service.adapters.scales = service.adapters.scales_of(entries)
    return JsonReply({"success": True})
