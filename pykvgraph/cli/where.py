"""`-dev`, `-ngl`, `-ts`, `-nkvo`, `--rpc` as llama.cpp has them, and `-kvt`: where to run, in every verb."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from pykvgraph.cli.overrides import override_option
from pykvgraph.cli.verb import option
from pykvgraph.params.params import KV_TIERS, ContextParams, ModelParams

Command = Callable[..., None]


@dataclass(frozen=True)
class Where:
    """What was asked for."""

    device: str
    n_gpu_layers: int
    tensor_split: tuple[float, ...] | None
    offload_kqv: bool
    kv_tier: str
    rpc: str | None
    kv_overrides: dict[str, bool | int | float | str]

    def endpoints(self) -> list[str]:
        """The servers whose devices are used, too."""
        return [endpoint.strip() for endpoint in self.rpc.split(",")] if self.rpc else []

    def connect(self) -> None:
        """The servers' devices are known from then on. Raises as add_rpc_server does."""
        import pykvgraph

        for endpoint in self.endpoints():
            pykvgraph.add_rpc_server(endpoint)

    def model(self) -> dict[str, Any]:
        """As Model takes it; the servers are connected first."""
        self.connect()
        self.warn()
        return self.of_model()

    def warn(self) -> None:
        """Says so where layers were to go to a GPU, and there is none."""
        import pykvgraph

        found_none = all(device.type != "gpu" for device in pykvgraph.devices())
        if self.n_gpu_layers > 0 and self.device.lower() == "auto" and found_none:
            click.echo(
                "No GPU: this llama-cpp-python was built for none, or finds none. All layers stay on the "
                "CPU; `pykvgraph info` lists devices.",
                err=True,
            )

    def of_model(self) -> dict[str, Any]:
        """As Model takes it, once the servers are connected."""
        return {
            "device": self.device,
            "n_gpu_layers": self.n_gpu_layers,
            "tensor_split": self.tensor_split,
            "kv_overrides": self.kv_overrides,
        }

    def context(self) -> dict[str, Any]:
        """As Context takes it."""
        return {"offload_kqv": self.offload_kqv, "kv_tier": self.kv_tier}


class _Layers(click.IntRange):
    """A count; -1 for all of them."""

    name = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(-1 if value in ("all", "auto") else value, param, ctx)


class _Shares(click.types.StringParamType):
    """Numbers, with commas or slashes between them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        parts: list[Any] = str(value).replace("/", ",").split(",")
        return tuple(click.FloatRange(min=0).convert(part, param, ctx) for part in parts)


_OPTIONS = (
    option(
        "-dev",
        "--device",
        metavar="NAME,..",
        default=ModelParams.device,
        help="Where to run, by names that `info` lists, commas between them; none: on the CPU.",
    ),
    option(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        "n_gpu_layers",
        type=_Layers(min=-1),
        metavar="N",
        default=ModelParams.n_gpu_layers,
        show_default="all",
        help="Put the last N layers on these devices (the output counts as one); the others on the CPU.",
    ),
    option(
        "-ts",
        "--tensor-split",
        type=_Shares(),
        metavar="N,N,..",
        show_default="as much as each has free memory",
        help="The share of these layers that each device gets.",
    ),
    option(
        "-nkvo/-kvo",
        "--no-kv-offload/--kv-offload",
        default=False,
        help="Keep the cache in host memory, where the CPU attends over it.",
    ),
    option(
        "-kvt",
        "--kv-tier",
        type=click.Choice([*KV_TIERS]),
        default=ContextParams.kv_tier,
        help="host: keep the cache in host memory, and copy each layer's part to its device, which attends. "
        "auto: so for the layers that the device has no room for.",
    ),
    option(
        "--rpc",
        metavar="HOST:PORT,..",
        help="Use the devices of these ggml RPC servers too; only servers that you trust.",
    ),
    override_option,
)


def where_options(command: Command) -> Command:
    """The options; the command gets them as one argument, `where`."""

    @functools.wraps(command)
    def run(
        *,
        device: str,
        n_gpu_layers: int,
        tensor_split: tuple[float, ...] | None,
        no_kv_offload: bool,
        kv_tier: str,
        rpc: str | None,
        override_kv: tuple[Any, ...],
        **others: Any,
    ) -> None:
        overrides = dict(pair for some in override_kv for pair in some)
        where = Where(device, n_gpu_layers, tensor_split, not no_kv_offload, kv_tier, rpc, overrides)
        command(where=where, **others)

    for add in reversed(_OPTIONS):
        run = add(run)
    return run
