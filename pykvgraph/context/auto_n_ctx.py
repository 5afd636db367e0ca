"""n_ctx="auto" for a model that is loaded, and what to type where a cache doesn't fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pykvgraph._native.fork import importing
from pykvgraph.errors import DeviceError
from pykvgraph.model.model import Model
from pykvgraph.params.params import MARGIN, ContextParams

if TYPE_CHECKING:
    from pykvgraph.plan.fitting import Beside

Draft = tuple[Model, Mapping[str, Any]]  # a model whose cache has as many cells, and Context's arguments


def fitting_n_ctx(
    model: Model,
    most: int,
    arguments: Mapping[str, Any],
    share: float = 1.0,
    margin: int = MARGIN,
    draft: Draft | None = None,
) -> int:
    """The most cells, up to `most`, that a Context with these arguments has memory for.

    What are no arguments of Context is passed over. share: of what may be taken, for this one of several.
    margin: per cent of the free memory, for others. draft: both together have memory for so many cells each.
    Raises as fit_n_ctx().
    """
    with importing:
        from pykvgraph.plan.fitting import fit_n_ctx
    margin, beside = _margin_of_share(margin, share), _beside(draft)
    where = {**model._where, **_of_context(arguments)}
    return fit_n_ctx(model.path, most, is_loaded=True, margin=margin, beside=beside, **where).n_ctx


def fitting_tier(
    model: Model,
    n_ctx: int,
    arguments: Mapping[str, Any],
    share: float = 1.0,
    margin: int = MARGIN,
    draft: Draft | None = None,
) -> dict[str, Any]:
    """kv_tier and resident_layers of a Context for kv_tier="auto": as much on the devices as they hold.

    {}: another kv_tier is asked for. The other arguments: as in fitting_n_ctx(). Raises what plan_memory()
    raises.
    """
    kv_tier = arguments.get("kv_tier")
    if not isinstance(kv_tier, str) or kv_tier != "auto":
        return {}
    with importing:
        from pykvgraph.plan.fitting import fit_resident_layers
    where = {**model._where, **_of_context(arguments)}
    margin, beside = _margin_of_share(margin, share), _beside(draft)
    n_resident = fit_resident_layers(model.path, n_ctx, model.n_layer, margin=margin, beside=beside, **where)
    if n_resident == model.n_layer:
        return {"kv_tier": "device", "resident_layers": 0}
    return {"kv_tier": "host", "resident_layers": n_resident}


def warning_of_memory(
    model: Model,
    n_ctx: int,
    arguments: Mapping[str, Any],
    margin: int = MARGIN,
    draft: Draft | None = None,
) -> str:
    """What to type where a Context with these arguments leaves less than margin % to others; "": fine."""
    with importing:
        from pykvgraph.plan.fitting import warning_of
    where = {**model._where, **_of_context(arguments)}
    return warning_of(model.path, n_ctx, margin=margin, beside=_beside(draft), **where)


def refusal_with_advice(error: DeviceError, model: Model, n_ctx: int, arguments: Mapping[str, Any]) -> str:
    """The text of the error with which a Context was refused, and how many cells fit, if it is fewer."""
    try:
        n_fitting = fitting_n_ctx(model, n_ctx, arguments)
    except (DeviceError, MemoryError, OSError, ImportError):  # no memory for what would find it out, either
        return str(error)
    return str(error) if n_fitting == n_ctx else f"{error}; n_ctx={n_fitting} (-c {n_fitting}) fits"


def _margin_of_share(margin: int, share: float) -> int:
    return 100 - int((100 - margin) * share)


def _beside(draft: Draft | None) -> Sequence[Beside]:
    return [(draft[0].path, {**draft[0]._where, **_of_context(draft[1])})] if draft else []


def _of_context(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What plan_memory() takes of them; adapters, pairs with scales, by their files."""
    names = {field.name for field in fields(ContextParams)} - {"n_ctx"}
    known = {name: value for name, value in arguments.items() if name in names}
    return {**known, "adapters": [adapter.path for adapter, _ in arguments.get("adapters", ())]}
