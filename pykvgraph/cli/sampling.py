"""Options of the samplers beyond temperature and the likes: penalties, mirostat, biases, grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from pykvgraph.cli.prompt import escaped, unescaped
from pykvgraph.cli.verb import option
from pykvgraph.params import SamplingParams

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


def _breakers(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """ "none" forgets those before it, and escapes mean what they mean in --prompt, as in llama.cpp."""
    begin = max((i + 1 for i, value in enumerate(values) if value == "none"), default=0)
    return tuple(unescaped(value) for value in values[begin:])


_OPTIONS = [
    option(
        "--typical",
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
    option("--grammar", metavar="GBNF", help="Only texts of this grammar, as in 'root ::= [0-9]+'."),
    option("-j", "--json-schema", metavar="SCHEMA", help="Only JSON of this schema; {} means any object."),
]


def sampling_options(function: Function) -> Function:
    """All of them, in this order."""
    for each in reversed(_OPTIONS):
        function = each(function)
    return function
