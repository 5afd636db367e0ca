"""The options of `pykvgraph serve`, spelled as llama-server's, and its environment variables."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from pykvgraph.cli.adapters import adapter_options
from pykvgraph.cli.draft import OF_ENGINE, draft_options, spec_type_option
from pykvgraph.cli.llama_verb import LlamaVerb
from pykvgraph.cli.log_options import log_options
from pykvgraph.cli.prompt import escape_option
from pykvgraph.cli.rope import rope_options
from pykvgraph.cli.run_options import StopString
from pykvgraph.cli.sampling import sampling_options
from pykvgraph.cli.verb import (
    Cells,
    batch_option,
    cache_type_options,
    defrag_option,
    flash_attn_option,
    margin_option,
    model_option,
    option,
    swa_option,
    threads_batch_option,
    threads_option,
    toggle_option,
    ubatch_option,
)
from pykvgraph.cli.where import where_options
from pykvgraph.server.settings import CACHE_EDITS, FORGETFUL, POOLING_NAMES, REASONING_FORMATS

Command = Callable[..., Any]
Adder = Callable[[Command], Command]


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


def _addresses(ctx: click.Context, param: click.Parameter, given: str) -> tuple[str, ...]:
    hosts = tuple(host.strip() for host in given.split(",") if host.strip())
    for host in hosts:
        if "/" in host or host.endswith(".sock"):  # as llama-server tells them
            told = f"{host}: this server has no UNIX sockets; name an address, as 127.0.0.1"
            raise click.BadParameter(told, ctx, param)
    if not hosts:
        raise click.BadParameter("name an address, as 127.0.0.1", ctx, param)
    return hosts


def _count(names: tuple[str, ...], text: str, low: int, default: Any, **settings: Any) -> Adder:
    kind = click.IntRange(min=low)
    return option(*names, type=kind, metavar="N", default=default, help=text, **settings)


class _Slots(click.IntRange):
    """How many slots; auto is -1."""

    def __init__(self) -> None:
        super().__init__(min=-1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A usage error for anything else."""
        return super().convert(-1 if value == "auto" else value, param, ctx)


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
    margin_option,
    option(
        "-np",
        "--parallel",
        "n_parallel",
        type=_Slots(),
        metavar="N",
        default=-1,
        show_default="auto: 4",
        help="Requests that are answered at a time. If it is given, each may have an equal share of -c.",
    ),
    option(
        "-kvu/-no-kvu",
        "--kv-unified/--no-kv-unified",
        default=None,
        help="A request may have all of -c, whatever -np is.",
    ),
    _count(
        ("--kv-unified-per-slot", "n_ctx_slot"),
        "A request may have N tokens; without -c, there are cells for -np such requests.",
        1,
        None,
        show_default="as -np and -kvu say",
    ),
    batch_option(),
    ubatch_option,
    threads_option("CPU threads for one token."),
    threads_batch_option,
    flash_attn_option,
    cache_type_options,
    swa_option,
    defrag_option(),
    where_options,
    rope_options,
    adapter_options,
    option(
        "--lora-init-without-apply",
        "lora_at_rest",
        is_flag=True,
        help="Scales of all adapters are 0, until POST /lora-adapters or a request says something else.",
    ),
    spec_type_option(OF_ENGINE),
    draft_options,
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
    option(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS,..",
        callback=_addresses,
        help="Addresses to listen on.",
    ),
    option("--port", type=click.IntRange(0, 65535), default=8080, help="Port to listen on; 0: a free one."),
    option("--api-key", metavar="KEY,..", help="Only requests with one of these keys."),
    option(
        "--api-key-file",
        type=click.File(encoding="utf-8"),
        metavar="FILE",
        help="Keys, one a line; lines with # in front are comments.",
    ),
    option(
        "--reuse-port",
        is_flag=True,
        help="Other servers may listen on the port, too; the system gives each of them some of the clients.",
    ),
    option("-a", "--alias", metavar="NAME,..", help="Names of the model, for clients."),
    option("--tags", metavar="NAME,..", help="What /v1/models tells besides."),
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
    option(
        "--cors-origins",
        default="*",
        metavar="ORIGINS",
        help="Pages of which origins may ask: '*' for all, 'localhost' for those of this machine, or some, "
        "as in 'https://a.example,https://b.example'.",
    ),
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
        help="Which hidden states are an embedding; rank: scores of a reranker. Without it, what the file "
        "says.",
    ),
    option("--rerank", "--reranking", "reranking", is_flag=True, help="Serve /v1/rerank: as --pooling rank."),
    option(
        "--embd-normalize",
        type=click.IntRange(-1, 1000),
        metavar="P",
        default=2,
        help="Embeddings are divided by their P-norm; -1: not, 0: to the range of 16 bits.",
    ),
    option("--ui/--no-ui", "--webui/--no-webui", "webui", default=True, help="Serve the page at /."),
    option("--spm-infill", is_flag=True, help="/infill: the suffix before the prefix."),
    log_options,
]
_OF_ANSWERS: list[Adder] = [
    _count(
        ("-n", "--predict", "--n-predict", "n_predict"),
        "Most tokens of an answer, if the request says nothing; -1: as many as fit.",
        -1,
        -1,
    ),
    option(
        "--temp",
        "--temperature",
        "temp",
        type=click.FloatRange(min=0),
        metavar="X",
        default=0.8,
        help="Temperature, likewise.",
    ),
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
        help="Move parts of N tokens and more that an older prompt has at other places; 0: none.",
    ),
    option(
        "--cache-edit",
        type=click.Choice(CACHE_EDITS),
        default="exact",
        help="How a prompt is read that is an earlier one, edited, if the request says nothing. exact: from "
        "the first difference on. approximate: what follows the edit is moved. off: exact, always.",
    ),
    option(
        "--prefix-compress",
        type=click.FloatRange(0.05, 0.95),
        metavar="SHARE",
        default=None,
        show_default="off",
        help="In idle time, keep this share of prefixes that many begin with, for cache_compressed.",
    ),
    option(
        "--prepare-turns/--no-prepare-turns",
        default=True,
        help="While nobody waits, decode what the next turn of a chat begins with, if its template drops "
        "thoughts.",
    ),
    _count(
        ("--cache-pins",),
        "Cells that requests may keep for a time (cache_control, prompt_cache_retention); 0: none.",
        0,
        None,
        show_default="a quarter of the cells",
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
        "--forget",
        type=click.Choice(FORGETFUL),
        metavar="POLICY",
        show_default="off",
        help="As --context-shift, but the tokens that matter least go, and prompts may be longer than the "
        f"context: {', '.join(FORGETFUL)}.",
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
    toggle_option("-rea", "--reasoning", help="enable_thinking for the chat template; auto: it isn't told."),
    option(
        "--reasoning-effort",
        metavar="LEVEL",
        help="reasoning_effort for the chat template, unless a request has one.",
    ),
    option(
        "--skip-chat-parsing/--no-skip-chat-parsing",
        default=False,
        help="Thoughts and calls of tools stay in the text.",
    ),
    option(
        "--prefill-assistant/--no-prefill-assistant",
        default=True,
        help="A last message of the assistant begins the answer; no: it is a message like others.",
    ),
]
_OF_SAMPLERS: list[Adder] = [
    option("--ignore-eos", is_flag=True, help="Answers go on behind what would end them."),
    option("-sp", "--special", is_flag=True, help="Control tokens add their names to the text."),
    option(
        "-r",
        "--reverse-prompt",
        "stop",
        multiple=True,
        type=StopString(),
        metavar="TEXT",
        help="Answers end before this text, if the request has no stop; may be repeated.",
    ),
    option("--samplers", metavar="NAME;..", help="Which samplers there are, and in which order."),
    option("--sampler-seq", "--sampling-seq", "sampler_seq", metavar="LETTERS", help="The same, in short."),
    escape_option(
        r"In -r and --dry-sequence-breaker \n, \t, \xHH and the like are escapes.", show_default="yes"
    ),
    sampling_options,
]
_GROUPS = {
    "Model and engine": _OF_ENGINE,
    "Server": _OF_WIRE,
    "Answers": _OF_ANSWERS,
    "Sampling, of requests that say nothing of it": _OF_SAMPLERS,
}


def serve_options(command: Command) -> Command:
    """All of them, in this order."""
    for each in reversed([each for group in _GROUPS.values() for each in group]):
        command = each(command)
    return command


class ServeVerb(LlamaVerb):
    """Its options are listed in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click's, with a heading for each group."""
        left = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        for title, adders in _GROUPS.items():
            names = _names_of(adders)
            _write(formatter, title, [left.pop(name) for name in tuple(left) if name in names])
        _write(formatter, "Others", list(left.values()))
        formatter.write_paragraph()
        formatter.write_text(
            "Each other option of llama-server is taken without an effect, or refused, and says so: "
            "docs/coming-from-llama-server.md lists them."
        )


def _write(formatter: click.HelpFormatter, title: str, records: list[tuple[str, str] | None]) -> None:
    with formatter.section(title):
        formatter.write_dl([record for record in records if record is not None])


def _names_of(adders: list[Adder]) -> set[str | None]:
    """Of the parameters that these add."""

    def none(**_: Any) -> None:
        """Has no parameters of its own."""

    command: Any = none
    for each in adders:
        command = each(command)
    return {param.name for param in command.__click_params__}
