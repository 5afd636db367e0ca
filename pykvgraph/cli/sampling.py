"""Options of the samplers beyond temperature and the likes: penalties, mirostat, biases, grammars."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import IO, Any

import click

from pykvgraph.cli.prompt import escaped, unescaped
from pykvgraph.cli.verb import option
from pykvgraph.params.params import SamplingParams

Function = Callable[..., Any]


class _Bias(click.ParamType):  # type: ignore[type-arg]
    """A token and what is added to its logit, spelled as llama.cpp does: 15043+1 or 15043-0.5."""

    name = "token(+/-)bias"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        at = max(value.find("+"), value.find("-"))
        try:
            return int(value[:at]), float(value[at:])
        except ValueError:
            self.fail(f"{value!r} is no token and bias, as in 15043+1 or 15043-inf", param, ctx)


def _breakers(ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """ "none" forgets those before it. Escapes are read unless --no-escape is given, as in llama.cpp."""
    begin = max((i + 1 for i, value in enumerate(values) if value == "none"), default=0)
    plain = ctx.params.get("escape") is False
    return tuple(value if plain else unescaped(value) for value in values[begin:])


_TEXT = click.File(encoding="utf-8", errors="strict")
_OPTIONS = [
    option(
        "--typical",
        "--typical-p",
        "typical_p",
        type=click.FloatRange(0, 1),
        metavar="P",
        default=SamplingParams.typical_p,
        help="Draw from the most typical tokens that together have probability P; 1: from all.",
    ),
    option(
        "--top-nsigma",
        "--top-n-sigma",
        "top_n_sigma",
        type=float,
        metavar="X",
        default=SamplingParams.top_n_sigma,
        help="Draw from logits at most X standard deviations below the largest; 0 and less: from all.",
    ),
    option(
        "--xtc-probability",
        type=click.FloatRange(0, 1),
        metavar="P",
        default=SamplingParams.xtc_probability,
        help="With probability P, leave out the likeliest tokens; 0: never.",
    ),
    option(
        "--xtc-threshold",
        type=click.FloatRange(min=0),
        metavar="P",
        default=SamplingParams.xtc_threshold,
        help="Those of probability P and more, but for the least likely of them.",
    ),
    option(
        "--dynatemp-range",
        type=click.FloatRange(min=0),
        metavar="X",
        default=SamplingParams.dynatemp_range,
        help="The temperature follows the entropy, up to X below and above; 0: off.",
    ),
    option(
        "--dynatemp-exp",
        "dynatemp_exponent",
        type=click.FloatRange(min=0),
        metavar="X",
        default=SamplingParams.dynatemp_exponent,
        help="By which power of the entropy.",
    ),
    option(
        "--repeat-penalty",
        type=click.FloatRange(min=1e-6),
        metavar="X",
        default=SamplingParams.repeat_penalty,
        help="Divide the logits of tokens that were said; 1: off.",
    ),
    option(
        "--repeat-last-n",
        "penalty_last_n",
        type=click.IntRange(min=0),
        metavar="N",
        default=SamplingParams.penalty_last_n,
        help="Penalties look at the last N tokens.",
    ),
    option(
        "--presence-penalty",
        type=float,
        metavar="X",
        default=SamplingParams.presence_penalty,
        help="Subtract X from the logits of tokens that were said; 0: off.",
    ),
    option(
        "--frequency-penalty",
        type=float,
        metavar="X",
        default=SamplingParams.frequency_penalty,
        help="Subtract X for each time that a token was said; 0: off.",
    ),
    option(
        "--dry-multiplier",
        type=click.FloatRange(min=0),
        metavar="X",
        default=SamplingParams.dry_multiplier,
        help="DRY: subtract X from the logits of tokens that go on with a repetition; 0: off.",
    ),
    option(
        "--dry-base",
        type=click.FloatRange(min=1),
        metavar="X",
        default=SamplingParams.dry_base,
        help="X times as much for each token that the repetition is longer.",
    ),
    option(
        "--dry-allowed-length",
        type=click.IntRange(min=0),
        metavar="N",
        default=SamplingParams.dry_allowed_length,
        help="Repetitions of up to N tokens cost nothing.",
    ),
    option(
        "--dry-penalty-last-n",
        type=click.IntRange(min=0),
        metavar="N",
        default=SamplingParams.dry_penalty_last_n,
        help="DRY looks at the last N tokens.",
    ),
    option(
        "--dry-sequence-breaker",
        "dry_sequence_breakers",
        multiple=True,
        metavar="TEXT",
        default=SamplingParams.dry_sequence_breakers,
        show_default=" ".join(map(escaped, SamplingParams.dry_sequence_breakers)),
        callback=_breakers,
        help="No repetition goes across TEXT; may be repeated; none: nothing breaks one.",
    ),
    option(
        "--mirostat",
        type=click.IntRange(0, 2),
        metavar="N",
        default=SamplingParams.mirostat,
        help="Mirostat 1 or 2 in place of temperature, top-k and the like; 0: off.",
    ),
    option(
        "--mirostat-ent",
        "mirostat_tau",
        type=click.FloatRange(min=0),
        metavar="X",
        default=SamplingParams.mirostat_tau,
        help="The surprise that mirostat keeps to.",
    ),
    option(
        "--mirostat-lr",
        "mirostat_eta",
        type=click.FloatRange(min=0),
        metavar="X",
        default=SamplingParams.mirostat_eta,
        help="How fast mirostat learns.",
    ),
    option(
        "-l",
        "--logit-bias",
        type=_Bias(),
        multiple=True,
        metavar="TOKEN(+/-)X",
        help="Add X to a token's logit, as in 15043-inf; may be repeated.",
    ),
    option(
        "--adaptive-target",
        type=click.FloatRange(max=1),
        metavar="P",
        default=SamplingParams.adaptive_target,
        help="Choose so that what is said has about the probability P; negative: off.",
    ),
    option(
        "--adaptive-decay",
        type=click.FloatRange(0, 0.99),
        metavar="X",
        default=SamplingParams.adaptive_decay,
        help="How much of what was said counts for that.",
    ),
    option(
        "--grammar",
        metavar="GBNF",
        help="Only texts of this grammar, as in 'root ::= [0-9]+'; or Lark, behind %llguidance {}.",
    ),
    option("--grammar-file", type=_TEXT, metavar="FILE", help="The same, from a file."),
    option("-j", "--json-schema", metavar="SCHEMA", help="Only JSON of this schema; {} means any object."),
    option("-jf", "--json-schema-file", type=_TEXT, metavar="FILE", help="The same, from a file."),
]


def sampling_options(command: Function) -> Function:
    """All of them, in this order; the command gets them by the names of SamplingParams."""

    @functools.wraps(command)
    def run(
        *,
        grammar: str | None,
        grammar_file: IO[str] | None,
        json_schema: str | None,
        json_schema_file: IO[str] | None,
        **others: Any,
    ) -> Any:
        grammar = _one_of("--grammar", grammar, grammar_file)
        json_schema = _one_of("--json-schema", json_schema, json_schema_file)
        return command(grammar=grammar, json_schema=json_schema, **others)

    for each in reversed(_OPTIONS):
        run = each(run)
    return run


def _one_of(name: str, text: str | None, file: IO[str] | None) -> str | None:
    """An option's text, or its file's."""
    if text is not None and file is not None:
        raise click.UsageError(f"{name} and {name}-file say the same: leave one out")
    if file is None:
        return text
    try:
        return file.read()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"{name}-file: {file.name} is not text in UTF-8") from error
