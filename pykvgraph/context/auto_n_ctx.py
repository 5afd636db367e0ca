"""n_ctx="auto" for a model that is loaded, and what to type where a cache doesn't fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from pykvgraph._native.fork import importing
from pykvgraph.errors import DeviceError
from pykvgraph.model.model import Model
from pykvgraph.params.params import MARGIN, ContextParams

if TYPE_CHECKING:
    from pykvgraph.plan.fitting import Beside

Tier = Literal["device", "host"]
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
    margin = 100 - int((100 - margin) * share)
    where = {**model._where, **_of_context(arguments)}
    return fit_n_ctx(model.path, most, is_loaded=True, margin=margin, beside=_beside(draft), **where).n_ctx


def fitting_tier(model: Model, arguments: Mapping[str, Any], margin: int = MARGIN) -> tuple[Tier, int]:
    """kv_tier and resident_layers of a Context with these arguments: as much on the devices as they hold.

    Raises what plan_memory() raises.
    """
    with importing:
        from pykvgraph.plan.fitting import fit_resident_layers
    where = {**model._where, **_of_context(arguments)}
    n_ctx = arguments["n_ctx"]
    n_resident = fit_resident_layers(model.path, n_ctx, model.n_layer, margin=margin, **where)
    return ("device", 0) if n_resident == model.n_layer else ("host", n_resident)


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
    except (DeviceError, MemoryError):
        return str(error)
    return str(error) if n_fitting == n_ctx else f"{error}; n_ctx={n_fitting} (-c {n_fitting}) fits"


def _beside(draft: Draft | None) -> Sequence[Beside]:
    return [(draft[0].path, {**draft[0]._where, **_of_context(draft[1])})] if draft else []


def _of_context(arguments: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(ContextParams)} - {"n_ctx"}
    return {name: value for name, value in arguments.items() if name in names}
