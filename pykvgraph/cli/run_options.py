"""What verbs that let a model speak have in common: options of the context, where it runs, how it samples."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from pykvgraph.checks import INT32_MAX
from pykvgraph.cli.adapters import Adapters, adapter_options
from pykvgraph.cli.draft import draft_arguments, draft_options, spec_type_of, spec_type_option
from pykvgraph.cli.log_options import log_options
from pykvgraph.cli.n_ctx import sized
from pykvgraph.cli.rope import rope_options
from pykvgraph.cli.sampling import sampling_options
from pykvgraph.cli.verb import (
    Cells,
    batch_option,
    cache_type_options,
    defrag_option,
    flash_attn_option,
    margin_option,
    option,
    swa_option,
    threads_batch_option,
    threads_option,
    ubatch_option,
)
from pykvgraph.cli.where import Where, where_options
from pykvgraph.errors import DeviceError
from pykvgraph.params.params import MAX_SEED, ContextParams, SamplingParams

if TYPE_CHECKING:
    from pykvgraph.context.context import Context
    from pykvgraph.model.model import Model

Command = Callable[..., None]
COUNT = click.IntRange(min=1)
_SIZES = ("n_ctx", "n_batch", "n_ubatch", "n_threads", "n_threads_batch")
_OF_CONTEXT = (*_SIZES, "type_k", "type_v", "swa_full", "flash_attn", "defrag_threshold")


@dataclass(frozen=True)
class RunOptions:
    """What was asked for. context: Context's arguments; n_ctx may be None. sampling: SamplingParams's.

    margin: per cent of the free memory, for others. spec_type: one of SPEC_TYPES. model_draft: a file, of an
    assistant with draft-mtp; None: there is none.
    """

    where: Where
    adapters: Adapters
    context: dict[str, Any]
    sampling: dict[str, Any]
    margin: int
    spec_type: str
    model_draft: str | None
    draft_max: int

    def of_model(self) -> dict[str, Any]:
        """As Model takes it; servers are connected first."""
        return {**self.where.model(), **draft_arguments(self.spec_type, self.model_draft)}

    def context_for(
        self,
        model: Model,
        n_grp: int = 1,
        most: int = ContextParams.n_ctx,
        draft: Model | None = None,
        **others: Any,
    ) -> dict[str, Any]:
        """Context's arguments for a model, and the others; n_ctx: as given, or what the model was trained on.

        n_grp: n_ctx is so many times what it was trained on. most: unless n_ctx is given, it was trained on
        no more. draft: a draft model, whose context has as many cells. Says so when more was asked for than
        the model was trained on.
        """
        asked, n_train = self.context["n_ctx"], model.n_ctx_train * n_grp
        adapters = self.adapters.load(model)
        context = {**self.context, **self.where.context(), **others, "adapters": adapters}
        if asked not in (None, "auto") and asked > n_train:
            click.echo(f"-c {asked}: the model was trained on {n_train} tokens.", err=True)
        n_cells = asked or min(n_train, most * n_grp)
        beside = (draft, self._of_draft()) if draft else None
        return sized(model, n_cells, n_train, context, self.margin, beside)

    @contextlib.contextmanager
    def contexts(
        self, model: Model, n_grp: int = 1, **others: Any
    ) -> Iterator[tuple[Context, dict[str, Any]]]:
        """A context for a model, as context_for() says, and what generate() takes for drafts.

        With -c auto there are no drafts where not even the smallest caches of both fit, and that is said.
        """
        import pykvgraph as kvg

        with contextlib.ExitStack() as opened:
            second = None
            if self.model_draft is not None and self.spec_type == "draft-simple":
                second = opened.enter_context(kvg.Model(self.model_draft, **self.where.of_model()))
            try:
                arguments = self.context_for(model, n_grp, draft=second, **others)
            except DeviceError as error:
                if second is None or self.context["n_ctx"] != "auto":
                    raise
                click.echo(f"There are no drafts: with a cache of the draft model, {error}", err=True)
                second, arguments = None, self.context_for(model, n_grp, **others)
            context = opened.enter_context(kvg.Context(model, **arguments))
            if second is None:
                of_head = {"draft": "mtp", "draft_max": self.draft_max}
                yield context, of_head if self.spec_type == "draft-mtp" else {}
                return
            draft = opened.enter_context(kvg.Context(second, n_ctx=context.n_ctx, **self._of_draft()))
            yield context, {"draft": draft, "draft_max": self.draft_max}

    def _of_draft(self) -> dict[str, Any]:
        sizes = {name: self.context[name] for name in _SIZES if name != "n_ctx"}
        return {**sizes, "swa_full": True}


class StopString(click.types.StringParamType):
    """A text; the environment gives one, spaces and all, where click would make one of each word."""

    def split_envvar_value(self, rv: str) -> list[str]:
        return [rv]


class _NumberOfTokens(click.ParamType):  # type: ignore[type-arg]
    """A number from 1 on; -1 for as many as the model wants. No IntRange: --help would say x>=1 beside -1."""

    name = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A usage error for 0."""
        return INT32_MAX if str(value) == "-1" else COUNT.convert(value, param, ctx)


class _Seed(click.IntRange):
    """A seed; -1 is none given."""

    def __init__(self) -> None:
        super().__init__(0, MAX_SEED)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A usage error for what is no seed."""
        return None if str(value) == "-1" else super().convert(value, param, ctx)


def run_options(
    *, temperature: float = SamplingParams.temperature, max_tokens: int = SamplingParams.max_tokens
) -> Callable[[Command], Command]:
    """The options; the verb gets them as `run`. A seed that isn't given is drawn."""

    def add(command: Command) -> Command:
        @functools.wraps(command)
        def run(*, where: Where, adapters: Adapters, seed: int | None, margin: int, **others: Any) -> None:
            drafts = {name: others.pop(name) for name in ("spec_type", "model_draft", "draft_max")}
            drafts["spec_type"] = _spec_type(drafts["spec_type"], drafts["model_draft"])
            context = {name: others.pop(name) for name in _OF_CONTEXT}
            names = SamplingParams.__dataclass_fields__
            sampling = {name: others.pop(name) for name in tuple(others) if name in names}
            sampling["seed"] = secrets.randbelow(MAX_SEED + 1) if seed is None else seed
            command(run=RunOptions(where, adapters, context, sampling, margin, **drafts), **others)

        wrapped: Command = run
        for each in reversed(_options(temperature, max_tokens)):
            wrapped = each(wrapped)
        return wrapped

    return add


def _spec_type(wanted: str | None, model_draft: str | None) -> str:
    """Without --spec-type and -md there are no drafts: not every model can have them here."""
    found = spec_type_of(wanted or (None if model_draft else "none"), model_draft, "", {})
    if found == "ngram-simple":
        raise click.UsageError("--spec-type ngram-simple: serve and batch have such drafts")
    return found


def _options(temperature: float, max_tokens: int) -> list[Callable[[Command], Command]]:
    return [
        option(
            "-n",
            "--predict",
            "--n-predict",
            "max_tokens",
            type=_NumberOfTokens(),
            metavar="N",
            default=max_tokens,
            help="Most tokens to generate; -1: until the model ends the text, which may be never.",
        ),
        option(
            "-c",
            "--ctx-size",
            "n_ctx",
            type=Cells(),
            metavar="N",
            show_default=f"the model's, at most {ContextParams.n_ctx}",
            help="Cells of the cache; auto: the model's, or as many as the memory has room for.",
        ),
        margin_option,
        batch_option(),
        ubatch_option,
        cache_type_options,
        swa_option,
        defrag_option(),
        flash_attn_option,
        threads_option("CPU threads for one token."),
        threads_batch_option,
        where_options,
        rope_options,
        adapter_options,
        spec_type_option("draft-simple with -md, else none"),
        draft_options,
        log_options,
        option(
            "--temp",
            "--temperature",
            "temperature",
            type=click.FloatRange(min=0),
            metavar="X",
            default=temperature,
            help="Temperature; 0 is greedy.",
        ),
        option(
            "--top-k",
            type=click.IntRange(min=0),
            metavar="N",
            default=SamplingParams.top_k,
            help="Draw from the N likeliest tokens; 0: from all.",
        ),
        option(
            "--top-p",
            type=click.FloatRange(0, 1),
            metavar="P",
            default=SamplingParams.top_p,
            help="Draw from the likeliest tokens that together have probability P; 1: from all.",
        ),
        option(
            "--min-p",
            type=click.FloatRange(0, 1),
            metavar="P",
            default=SamplingParams.min_p,
            help="Draw from tokens with at least P times the likeliest's probability; 0: from all.",
        ),
        sampling_options,
        option(
            "-s",
            "--seed",
            type=_Seed(),
            metavar="N",
            show_default="random",
            help="Seed of the draws; -1: a random one.",
        ),
        option(
            "--stop",
            "-r",
            "--reverse-prompt",
            "stop",
            multiple=True,
            type=StopString(),
            metavar="TEXT",
            help="End before this text; may be repeated.",
        ),
    ]
