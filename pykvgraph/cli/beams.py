"""`--beam-width`: the texts that a beam search finds, in place of one that is said token by token."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from pykvgraph.checks import INT32_MAX
from pykvgraph.cli.show import print_json
from pykvgraph.cli.verb import Interruptible, option
from pykvgraph.params.params import SamplingParams

if TYPE_CHECKING:
    from pykvgraph.engine.types import Completion
    from pykvgraph.model.model import Model

Function = Callable[..., Any]


@dataclass(frozen=True)
class BeamOptions:
    """What was asked for; a width of 1: no search."""

    width: int
    n_best: int
    length_penalty: float

    def search(
        self, model: Model, prompt: str, context: dict[str, Any], sampling: dict[str, Any], as_json: bool
    ) -> None:
        """Prints the best texts. context: of Context. Ctrl-C ends it with the best that there are so far.

        Raises what Engine and SamplingParams raise.
        """
        import pykvgraph as kvg

        started = time.perf_counter()
        ids = model.tokenizer.encode(prompt)
        most = max((context["n_ctx"] - len(ids)) // self.width + 1, 1)
        if sampling["max_tokens"] == INT32_MAX:  # as many as there is room for
            sampling = {**sampling, "max_tokens": most}
        params = kvg.SamplingParams(
            **sampling, beam_width=self.width, n=self.n_best, length_penalty=self.length_penalty
        )
        with kvg.Engine(model, **context, n_seq_max=self.width, background=False) as engine:
            request = engine.submit(ids, params)
            with Interruptible() as work:
                request.results()
            request.cancel()
            engine.step()
            found = request.results()
        if as_json:
            told = {"texts": list(map(_told, found)), "n_prompt": len(ids), "n_ctx": context["n_ctx"]}
            print_json({"prompt": prompt, **told, "seconds": time.perf_counter() - started})
        for number, each in enumerate([] if as_json else found, 1):
            if self.n_best > 1:
                click.echo(f"{number}. log probability {each.logprob:.3f}, {each.n_said} tokens")
            click.echo(each.text)
        work.end()


def _told(each: Completion) -> dict[str, Any]:
    return {
        "text": each.text,
        "tokens": list(each.tokens),
        "finish_reason": each.finish_reason,
        "n_generated": each.n_said,
        "logprob": each.logprob if math.isfinite(each.logprob) else None,
    }


def beam_options(command: Function) -> Function:
    """The options; the verb gets them as `beams`."""

    @functools.wraps(command)
    def run(*, beam_width: int, n_best: int, length_penalty: float, **others: Any) -> Any:
        if n_best > beam_width:
            raise click.UsageError(f"--n-best {n_best}: a search finds as many texts as --beam-width says")
        return command(beams=BeamOptions(beam_width, n_best, length_penalty), **others)

    for each in reversed(_OPTIONS):
        run = each(run)
    return run


_OPTIONS = [
    option(
        "--beam-width",
        "beam_width",
        type=click.IntRange(min=1),
        metavar="N",
        default=SamplingParams.beam_width,
        help="Search with N beams; 1: no search. The text comes when it is found.",
    ),
    option(
        "--n-best",
        type=click.IntRange(min=1),
        metavar="N",
        default=1,
        help="Print the N best texts of a search, each with its log probability.",
    ),
    option(
        "--length-penalty",
        type=click.FloatRange(-10, 10),
        metavar="X",
        default=SamplingParams.length_penalty,
        help="Beams are ranked by log probability over their length to the power of X.",
    ),
]
