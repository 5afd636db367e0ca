"""Options of the samplers beyond temperature and the likes: penalties, mirostat, biases, grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

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
