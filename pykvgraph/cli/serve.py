"""`pykvgraph serve`: a server with llama-server's flags, endpoints and fields."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from typing import IO, TYPE_CHECKING, Any

import click

from pykvgraph.cli.adapters import Adapters
from pykvgraph.cli.draft import draft_arguments, spec_type_of
from pykvgraph.cli.serve_defaults import defaults_of
from pykvgraph.cli.serve_options import ServeVerb, serve_options
from pykvgraph.cli.verb import examples
from pykvgraph.cli.where import Where
from pykvgraph.params.cpus import usable_cpus

if TYPE_CHECKING:
    from pykvgraph.engine import Engine
    from pykvgraph.server.engine_spec import EngineSpec
    from pykvgraph.server.run import HttpServer
    from pykvgraph.server.settings import Settings

_SLOTS = 4
_WORKERS_PER_CPU = 8  # each is a process with an engine; thousands would take all memory
_CACHE_RAM = 1024  # MiB, for --cache-disk and for copies
_BODY_SECONDS = 60.0


@click.command(
    cls=ServeVerb,
    reads_variables=True,
    epilog=examples(
        "pykvgraph serve -m model.gguf",
        "pykvgraph serve -m model.gguf -c 16384 -np 8 --api-key SECRET --host 0.0.0.0",
        "pykvgraph serve -m model.gguf --workers 4",
        'curl http://127.0.0.1:8080/completion -d \'{"prompt": "Once upon"}\'',
    ),
)
@serve_options
def serve(
    model: str, where: Where, adapters: Adapters, host: tuple[str, ...], port: int, **given: Any
) -> None:
    """Serve a model over HTTP.

    Endpoints, fields and errors are llama-server's: /v1/chat/completions, /v1/completions, /completion,
    /tokenize, /props, /slots and more. Requests are answered many at a time, and what prompts begin with
    alike is decoded once. Ctrl-C, or SIGTERM, lets those finish who are being answered; a second one ends
    them.

    The environment variables of llama-server (LLAMA_ARG_...) mean the same here.
    """
    try:
        from pykvgraph.server.run import address_of
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is missing: pip install 'pykvgraph[server]'") from error
    settings = _settings(model, host, where, given)
    engine = _engine(model, where, adapters, settings, given)
    _warn_of_strangers(settings)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("pykvgraph.server").setLevel(logging.INFO)
    with contextlib.ExitStack() as listening:
        listeners: list[socket.socket] = []
        for each in host:  # with port 0 the first one chooses it for all
            own = listeners[0].getsockname()[1] if listeners else port
            listeners.append(listening.enter_context(_listener(each, own, given["reuse_port"])))
        addresses = ", ".join(map(address_of, listeners))
        click.echo(f"{addresses}: loading {model}", err=True)
        _server(settings, engine, where, given, addresses).run(sockets=listeners)


def _server(
    settings: Settings, engine: EngineSpec, where: Where, given: dict[str, Any], addresses: str
) -> HttpServer:
    def say_ready() -> None:
        click.echo(f"{addresses}: ready", err=True)

    n_workers, cluster = given["n_workers"], given["cluster"]
    _check_workers(given)
    if n_workers > 1 or cluster:
        from pykvgraph.cluster.on_ray import RayWorkers
        from pykvgraph.cluster.pool import Pool
        from pykvgraph.cluster.run import ClusterServer
        from pykvgraph.cluster.workers import Workers

        pool = Pool(
            settings,
            n_workers,
            say_ready,
            n_prefill=given["n_prefill"],
            replicates=given["replicate"],
        )
        if cluster:
            return ClusterServer(pool, RayWorkers(pool, engine, n_workers, cluster))
        return ClusterServer(pool, Workers(pool, engine, n_workers))
    from pykvgraph.server.run import Server

    def load() -> Engine:
        where.connect()
        where.warn()
        return engine.load()

    return Server(settings, load, say_ready)


def _check_workers(given: dict[str, Any]) -> None:
    n_cpus = usable_cpus()
    most = _WORKERS_PER_CPU * n_cpus
    if given["n_workers"] > most and not given["cluster"]:
        raise click.UsageError(
            f"--workers: {n_cpus} CPUs are here, for {most} workers at most; --cluster uses more machines"
        )
    n_others = given["n_workers"] - given["n_prefill"]
    if n_others < 1:
        raise click.UsageError("--prefill-workers: of --workers at least one must answer; add --workers")
    if given["replicate"] and n_others < 2:
        raise click.UsageError("--replicate: at least two of --workers must answer; add --workers")


def _engine(
    model: str, where: Where, adapters: Adapters, settings: Settings, given: dict[str, Any]
) -> EngineSpec:
    from pykvgraph.server.engine_spec import EngineSpec

    draft = {"ngram-simple": "ngram", "draft-mtp": "mtp"}.get(settings.spec_type, given["model_draft"] or "")
    return EngineSpec(
        model,
        draft,
        {**where.of_model(), **draft_arguments(settings.spec_type, given["model_draft"])},
        _context(where, given),
        _tiers(given),
        tuple(where.endpoints()),
        adapters=tuple((path, 0.0 if given["lora_at_rest"] else scale) for path, scale in adapters.given),
    )


def _context(where: Where, given: dict[str, Any]) -> dict[str, Any]:
    """Engine's arguments."""
    sizes = ("n_batch", "n_ubatch", "n_threads", "n_threads_batch")
    names = (*sizes, "type_k", "type_v", "swa_full", "flash_attn", "defrag_threshold", "margin")
    return {
        "n_ctx": given["n_ctx"] or (given["n_ctx_slot"] or 0) * _n_slots(given) or "auto",
        "n_seq_max": _n_slots(given),
        "overcommit": True,
        "cache_reuse": given["cache_reuse"],
        "pin_cells": given["cache_pins"],
        "prefix_compress": given["prefix_compress"],
        "draft_max": given["draft_max"],
        **where.context(),
        **{name: given[name] for name in names},
        "n_threads_batch": given["n_threads_batch"] or given["n_threads"],
    }


def _tiers(given: dict[str, Any]) -> dict[str, Any]:
    """Where prompts go whose cells others need, as Tiers takes it; {}: nowhere.

    A usage error for a folder or a disk without memory.
    """
    from pykvgraph.tiers.options import NO_LIMIT

    ram, disk, folder = given["cache_ram"], given["cache_disk"], given["cache_dir"]
    copies = given["n_prefill"] or given["replicate"]
    if ram is None:
        ram = _CACHE_RAM if disk or copies else 0
    if copies and not ram:
        raise click.UsageError("--prefill-workers and --replicate need --cache-ram")
    if (disk and not ram) or (folder and not disk):
        raise click.UsageError("--cache-dir needs --cache-disk, and that needs --cache-ram")
    return {"ram": NO_LIMIT if ram < 0 else ram << 20, "disk": disk << 20, "path": folder} if ram else {}


def _settings(model: str, hosts: tuple[str, ...], where: Where, given: dict[str, Any]) -> Settings:
    from pykvgraph.server.settings import Settings

    shares = given["n_parallel"] > 0 if given["kv_unified"] is None else not given["kv_unified"]
    template = given["chat_template_file"].read() if given["chat_template_file"] else given["chat_template"]
    return Settings(
        model_path=model,
        aliases=_list(given["alias"]),
        tags=_list(given["tags"]),
        hosts=hosts,
        n_slots=_n_slots(given),
        n_ctx_slot=given["n_ctx_slot"] or (given["n_ctx"] // _n_slots(given) if shares else 0),
        n_predict=given["n_predict"],
        defaults=defaults_of(given),
        special=given["special"],
        api_keys=_keys_given(given["api_key"]) + _keys_of(given["api_key_file"]),
        cache_prompt=given["cache_prompt"],
        cache_edit=given["cache_edit"],
        prepares_turns=given["prepare_turns"],
        context_shift=given["context_shift"] or given["forget"] is not None,
        forget=given["forget"] or "",
        n_keep=given["keep"],
        spec_type=spec_type_of(given["spec_type"], given["model_draft"], model, where.kv_overrides),
        embeddings=given["embeddings"],
        pooling=_pooling(given),
        embd_normalize=given["embd_normalize"],
        chat_template=template or "",
        jinja=given["jinja"],
        template_variables=_template_variables(given),
        parses_replies=not given["skip_chat_parsing"],
        prefills=given["prefill_assistant"],
        spm_infill=given["spm_infill"],
        reasoning_format=given["reasoning_format"],
        reasoning_budget=given["reasoning_budget"],
        reasoning_budget_message=given["reasoning_budget_message"],
        metrics=given["metrics"],
        verbose=click.get_current_context().params["verbose"],  # which log_options() keeps
        props=given["props"],
        cors_origins=given["cors_origins"],
        slots=given["slots"],
        slot_save_path=given["slot_save_path"] or "",
        page=given["webui"],
        io_seconds=given["timeout"],
        body_seconds=min(given["timeout"], _BODY_SECONDS),
        max_prompts=given["max_prompts"],
        ping_seconds=max(given["sse_ping_interval"], 0),
    )


def _pooling(given: dict[str, Any]) -> str:
    pooling = given["pooling"] or ""
    if given["reranking"] and pooling not in ("", "rank"):
        raise click.UsageError(
            f"--reranking scores texts, and --pooling {pooling} embeds them: leave one out"
        )
    return "rank" if given["reranking"] else pooling


def _template_variables(given: dict[str, Any]) -> dict[str, Any]:
    """Those of --chat-template-kwargs come last."""
    variables: dict[str, Any] = {}
    if given["reasoning"] != "auto":
        variables["enable_thinking"] = given["reasoning"] == "on"
    if given["reasoning_effort"] not in (None, "default"):
        variables["reasoning_effort"] = given["reasoning_effort"]
    return {**variables, **(given["chat_template_kwargs"] or {})}


def _n_slots(given: dict[str, Any]) -> int:
    return int(given["n_parallel"]) if given["n_parallel"] > 0 else _SLOTS


def _list(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


def _keys_given(text: str | None) -> tuple[str, ...]:
    keys = _list(text)
    if text is not None and not keys:
        raise click.UsageError("--api-key: there is no key in it, so everybody might ask")
    return keys


def _keys_of(file: IO[str] | None) -> tuple[str, ...]:
    lines = [line.strip() for line in file or ()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if file is not None and not keys:
        raise click.UsageError("--api-key-file: there is no key in it, so everybody might ask")
    return keys


def _listener(host: str, port: int, reuse_port: bool) -> socket.socket:
    from pykvgraph.server.run import listen

    try:
        return listen(host, port, reuse_port=reuse_port)
    except OSError as error:  # Python's own text tells the number of the error, and no way out
        why = error.strerror.split(" (")[0] if error.strerror else str(error)
        raise click.ClickException(
            f"{host}:{port}: {why}. Choose another --port (0: any that is free) or --host"
        ) from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _warn_of_strangers(settings: Settings) -> None:
    reached = [host for host in settings.hosts if not _is_loopback(host)]
    if reached and not settings.api_keys:
        click.secho(
            f"WARNING: whoever reaches {', '.join(reached)} may ask, as there is no --api-key.",
            fg="yellow",
            bold=True,
            err=True,
        )
