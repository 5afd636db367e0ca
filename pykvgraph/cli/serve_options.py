"""The options of `pykvgraph serve`, spelled as llama-server's, and its environment variables."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import click

from pykvgraph.cli.adapters import adapter_options
from pykvgraph.cli.verb import (
    Cells,
    Verb,
    batch_option,
    cache_type_options,
    model_option,
    option,
    swa_option,
    threads_option,
    ubatch_option,
)
from pykvgraph.cli.where import where_options
from pykvgraph.server.settings import POOLING_NAMES, REASONING_FORMATS

Command = Callable[..., Any]
Adder = Callable[[Command], Command]

# llama-server's variables, by the name of the parameter; KVGRAPH_... come first
LLAMA_VARIABLES = {
    "model": "LLAMA_ARG_MODEL",
    "hf_repo": "LLAMA_ARG_HF_REPO",
    "model_url": "LLAMA_ARG_MODEL_URL",
    "n_ctx": "LLAMA_ARG_CTX_SIZE",
    "n_parallel": "LLAMA_ARG_N_PARALLEL",
    "n_predict": "LLAMA_ARG_N_PREDICT",
    "n_batch": "LLAMA_ARG_BATCH",
    "n_ubatch": "LLAMA_ARG_UBATCH",
    "n_threads": "LLAMA_ARG_THREADS",
    "type_k": "LLAMA_ARG_CACHE_TYPE_K",
    "type_v": "LLAMA_ARG_CACHE_TYPE_V",
    "swa_full": "LLAMA_ARG_SWA_FULL",
    "flash_attn": "LLAMA_ARG_FLASH_ATTN",
    "device": "LLAMA_ARG_DEVICE",
    "n_gpu_layers": "LLAMA_ARG_N_GPU_LAYERS",
    "tensor_split": "LLAMA_ARG_TENSOR_SPLIT",
    "rpc": "LLAMA_ARG_RPC",
    "kv_unified": "LLAMA_ARG_KV_UNIFIED",
    "spec_type": "LLAMA_ARG_SPEC_TYPE",
    "model_draft": "LLAMA_ARG_SPEC_DRAFT_MODEL",
    "draft_max": "LLAMA_ARG_SPEC_DRAFT_N_MAX",
    "host": "LLAMA_ARG_HOST",
    "port": "LLAMA_ARG_PORT",
    "api_key": "LLAMA_API_KEY",
    "api_key_file": "LLAMA_ARG_API_KEY_FILE",
    "alias": "LLAMA_ARG_ALIAS",
    "context_shift": "LLAMA_ARG_CONTEXT_SHIFT",
    "cache_prompt": "LLAMA_ARG_CACHE_PROMPT",
    "cache_reuse": "LLAMA_ARG_CACHE_REUSE",
    "cache_ram": "LLAMA_ARG_CACHE_RAM",
    "jinja": "LLAMA_ARG_JINJA",
    "chat_template": "LLAMA_ARG_CHAT_TEMPLATE",
    "chat_template_file": "LLAMA_ARG_CHAT_TEMPLATE_FILE",
    "chat_template_kwargs": "LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
    "reasoning_format": "LLAMA_ARG_THINK",
    "reasoning_budget": "LLAMA_ARG_THINK_BUDGET",
    "reasoning_budget_message": "LLAMA_ARG_THINK_BUDGET_MESSAGE",
    "metrics": "LLAMA_ARG_ENDPOINT_METRICS",
    "props": "LLAMA_ARG_ENDPOINT_PROPS",
    "slots": "LLAMA_ARG_ENDPOINT_SLOTS",
    "embeddings": "LLAMA_ARG_EMBEDDINGS",
    "pooling": "LLAMA_ARG_POOLING",
    "timeout": "LLAMA_ARG_TIMEOUT",
    "sse_ping_interval": "LLAMA_ARG_SSE_PING_INTERVAL",
    "webui": "LLAMA_ARG_UI",
    "temp": "LLAMA_ARG_TEMPERATURE",
    "top_k": "LLAMA_ARG_TOP_K",
    "top_p": "LLAMA_ARG_TOP_P",
    "min_p": "LLAMA_ARG_MIN_P",
}
_WORDS = {"enabled": "1", "disabled": "0"}


class ServeVerb(Verb):
    """Takes llama-server's environment variables as defaults."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """As click's."""
        given = {
            name: _WORDS.get(value, value)
            for name, variable in LLAMA_VARIABLES.items()
            if (value := os.environ.get(variable))
        }
        return super().make_context(info_name, args, parent, default_map=given, **extra)


class JsonObject(click.ParamType):  # type: ignore[type-arg]
    """A JSON object."""

    name = "JSON"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The object. A usage error for anything else."""
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(f"{value!r} is no JSON: {error}", param, ctx)
        if not isinstance(found, dict):
            self.fail(f"{value!r} is no JSON object", param, ctx)
        return found


def _count(names: tuple[str, ...], text: str, low: int, default: Any, **settings: Any) -> Adder:
    kind = click.IntRange(min=low)
    return option(*names, type=kind, metavar="N", default=default, help=text, **settings)


_OF_ENGINE: list[Adder] = [
    model_option(required=True),
    option(
        "-c",
        "--ctx-size",
        "n_ctx",
        type=Cells(0, auto=0),
        metavar="N",
        default="auto",
        help="Cells of the cache, for all requests together; auto or 0: as many as -np requests can fill and "
        "the memory has room for.",
    ),
    _count(
        ("-np", "--parallel", "n_parallel"),
        "Requests that are answered at a time. If it is given, each may have an equal share of -c.",
        -1,
        -1,
        show_default="4",
    ),
    option(
        "-kvu/-no-kvu",
        "--kv-unified/--no-kv-unified",
        default=None,
        help="A request may have all of -c, whatever -np is.",
    ),
    batch_option(),
    ubatch_option,
    threads_option("CPU threads for one token."),
    _count(
        ("-tb", "--threads-batch", "n_threads_batch"),
        "CPU threads for more than one.",
        1,
        None,
        show_default="as -t",
    ),
    option(
        "-fa",
        "--flash-attn",
        type=click.Choice(["on", "off", "auto"]),
        default="auto",
        help="Flash attention.",
    ),
    cache_type_options,
    swa_option,
    where_options,
    adapter_options,
    option(
        "--spec-type",
        metavar="TYPE",
        default="none",
        help="Drafts: ngram-simple: what followed the last tokens where they came before; draft-simple: what "
        "the model of -md proposes; none.",
    ),
    option(
        "-md",
        "--model-draft",
        "--spec-draft-model",
        "model_draft",
        type=click.Path(exists=True, dir_okay=False),
        metavar="FILE",
        help="A smaller GGUF file of the same vocabulary; --spec-type is draft-simple then.",
    ),
    _count(
        ("--draft-max", "--draft", "--draft-n", "--spec-draft-n-max", "draft_max"),
        "Most tokens of a draft.",
        1,
        16,
    ),
]
_OF_WIRE: list[Adder] = [
    _count(
        ("--workers", "n_workers"),
        "Processes, each with an engine of its own; a request goes to the one that has most of its prompt. "
        "-c, -np and -t are of each.",
        1,
        1,
    ),
    option(
        "--prefill-workers",
        "n_prefill",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="So many of the workers only read long prompts; the others answer.",
    ),
    option(
        "--replicate",
        is_flag=True,
        help="What a worker has of a text, a second one gets too, and goes on with it if the first dies.",
    ),
    option(
        "--cluster",
        metavar="auto|ADDRESS",
        help="Workers run on the machines of this Ray cluster; auto: of the one that runs here, or of a new "
        "one.",
    ),
    option("--host", default="127.0.0.1", help="Address to listen on."),
    option("--port", type=click.IntRange(0, 65535), default=8080, help="Port to listen on; 0: a free one."),
    option("--api-key", metavar="KEY,..", help="Only requests with one of these keys."),
    option(
        "--api-key-file",
        type=click.File(encoding="utf-8"),
        metavar="FILE",
        help="Keys, one a line; lines with # in front are comments.",
    ),
    option("-a", "--alias", metavar="NAME,..", help="Names of the model, for clients."),
    option(
        "-to",
        "--timeout",
        type=click.FloatRange(min=1),
        default=3600,
        help="Seconds that a client may take to read what was sent, and 60 at most to send a request.",
    ),
    option(
        "--sse-ping-interval",
        type=click.IntRange(min=-1),
        metavar="SECONDS",
        default=30,
        help="Between signs of life in a stream that says nothing; -1: none.",
    ),
    _count(
        ("--max-prompts",),
        "Most prompts of a body, and most answers that it asks for, as `n` is of each prompt.",
        1,
        2048,
    ),
    option("--metrics/--no-metrics", default=False, help="Serve /metrics, for Prometheus."),
    option("--props/--no-props", default=False, help="Serve POST /props."),
    option("--slots/--no-slots", default=True, help="Serve /slots."),
    option(
        "--slot-save-path",
        type=click.Path(exists=True, file_okay=False, writable=True),
        metavar="FOLDER",
        help="Where POST /slots/ID saves what the cache has of a text, and finds it again.",
    ),
    option("--embedding", "--embeddings", "embeddings", is_flag=True, help="Serve /v1/embeddings."),
    option(
        "--pooling",
        type=click.Choice(POOLING_NAMES),
        help="Which hidden states are an embedding; without it, what the file says.",
    ),
    option(
        "--embd-normalize",
        type=click.IntRange(-1, 1000),
        metavar="P",
        default=2,
        help="Embeddings are divided by their P-norm; -1: not, 0: to the range of 16 bits.",
    ),
    option("--ui/--no-ui", "--webui/--no-webui", "webui", default=True, help="Serve the page at /."),
]
_OF_ANSWERS: list[Adder] = [
    _count(
        ("-n", "--n-predict", "n_predict"),
        "Most tokens of an answer, if the request says nothing; -1: as many as fit.",
        -1,
        -1,
    ),
    option("--temp", type=click.FloatRange(min=0), metavar="X", default=0.8, help="Temperature, likewise."),
    option("--top-k", type=click.IntRange(min=0), metavar="N", default=40, help="Likewise."),
    option("--top-p", type=click.FloatRange(0, 1), metavar="P", default=0.95, help="Likewise."),
    option("--min-p", type=click.FloatRange(0, 1), metavar="P", default=0.05, help="Likewise."),
    option(
        "-s", "--seed", type=click.IntRange(min=-1), metavar="N", default=-1, help="Likewise; -1: random."
    ),
    option("--cache-prompt/--no-cache-prompt", default=True, help="Share what prompts begin with, likewise."),
    option(
        "--cache-reuse",
        type=click.IntRange(min=0),
        metavar="N",
        default=0,
        help="Move parts of N tokens and more that an older prompt has further behind; 0: none.",
    ),
    _count(
        ("-cram", "--cache-ram", "cache_ram"),
        "MiB of memory for prompts whose cells others need; 0: none, -1: no limit.",
        -1,
        None,
        show_default="0; 1024 with --cache-disk, --prefill-workers or --replicate",
    ),
    _count(("--cache-disk",), "MiB of files for them, which outlive the server; 0: none.", 0, 0),
    option(
        "--cache-dir",
        type=click.Path(file_okay=False),
        metavar="FOLDER",
        help="Where these files are; several servers may share it.",
    ),
    option(
        "--context-shift/--no-context-shift",
        default=False,
        help="An answer that fills its context goes on: old tokens are given up.",
    ),
    option(
        "--keep",
        type=click.IntRange(min=-1),
        metavar="N",
        default=0,
        help="First tokens that are never given up, if the request says nothing; -1: its prompt.",
    ),
    option(
        "--jinja/--no-jinja",
        default=True,
        help="no: prompts by libllama's own code, without tools.",
    ),
    option("--chat-template", metavar="JINJA", help="In place of the model's own; or chatml."),
    option(
        "--chat-template-file",
        type=click.File(encoding="utf-8"),
        metavar="FILE",
        help="The same, from a file.",
    ),
    option(
        "--chat-template-kwargs", type=JsonObject(), metavar="JSON", help="Variables for the chat template."
    ),
    option(
        "--reasoning-format",
        type=click.Choice(REASONING_FORMATS),
        default="auto",
        help="Where thoughts go: reasoning_content, or none: they stay in the text.",
    ),
    option(
        "--reasoning-budget",
        type=click.IntRange(min=-1),
        metavar="N",
        default=-1,
        help="Most tokens of thoughts; 0: no thinking, -1: as many as the model wants.",
    ),
    option(
        "--reasoning-budget-message",
        metavar="TEXT",
        default="",
        help="What is said when the thoughts are cut off, before their closing mark.",
    ),
]


def serve_options(command: Command) -> Command:
    """All of them, in this order."""
    for each in reversed([*_OF_ENGINE, *_OF_WIRE, *_OF_ANSWERS]):
        command = each(command)
    return command
