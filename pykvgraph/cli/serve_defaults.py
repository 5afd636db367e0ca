"""What the command line says of sampling, as fields of requests that say nothing of it themselves."""

from __future__ import annotations

import json
import math
from typing import Any

import click

from pykvgraph.params.params import SAMPLERS, SamplingParams

_ALWAYS = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "seed": "seed"}
_OF_SAMPLERS = (
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "dynatemp_range",
    "dynatemp_exponent",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "adaptive_target",
    "adaptive_decay",
)


def defaults_of(given: dict[str, Any]) -> dict[str, Any]:
    """The fields, as JSON has them. A usage error for what can't be one."""
    fields = {field: given[name] for name, field in _ALWAYS.items()}
    fields |= {name: given[name] for name in _OF_SAMPLERS if given[name] != getattr(SamplingParams, name)}
    if given["penalty_last_n"] != SamplingParams.penalty_last_n:
        fields["repeat_last_n"] = given["penalty_last_n"]
    if given["dry_sequence_breakers"] != SamplingParams.dry_sequence_breakers:
        fields["dry_sequence_breakers"] = list(given["dry_sequence_breakers"]) or [""]  # that is none
    if given["logit_bias"]:
        # JSON has no infinity: false stands for it
        fields["logit_bias"] = [[token, bias > -math.inf and bias] for token, bias in given["logit_bias"]]
    if given["ignore_eos"]:
        fields["ignore_eos"] = True
    if given["stop"]:
        fields["stop"] = _texts(given["stop"], given["escape"])
    return fields | _samplers(given) | _grammar(given)


def _texts(texts: tuple[str, ...], escape: bool | None) -> list[str]:
    from pykvgraph.cli.prompt import unescaped

    return [text if escape is False else unescaped(text) for text in texts]


def _samplers(given: dict[str, Any]) -> dict[str, Any]:
    from pykvgraph.openai.errors import WireError
    from pykvgraph.server.requests.fields import Fields
    from pykvgraph.server.requests.sampling import ADAPTIVE, sampler_names

    names, letters = given["samplers"], given["sampler_seq"]
    if names is not None and letters is not None:
        raise click.UsageError("--samplers and --sampler-seq say the same: leave one out")
    wanted: Any = letters if names is None else [name for name in names.split(";") if name]
    if wanted is None:
        return {"samplers": [*SAMPLERS[:-1], ADAPTIVE]} if given["adaptive_target"] >= 0 else {}
    try:
        sampler_names(Fields({"samplers": wanted}))
    except WireError as error:
        name = "--sampler-seq" if names is None else "--samplers"
        raise click.UsageError(f"{name}: {error}") from None
    return {"samplers": wanted}


def _grammar(given: dict[str, Any]) -> dict[str, Any]:
    if given["grammar"] is not None and given["json_schema"] is not None:
        raise click.UsageError("--grammar and --json-schema: give one of them, a schema becomes a grammar")
    if given["json_schema"] is None:
        return {} if given["grammar"] is None else {"grammar": given["grammar"]}
    try:
        schema = json.loads(given["json_schema"])
    except ValueError as error:
        raise click.UsageError(f"--json-schema is no JSON: {error}") from None
    if not isinstance(schema, dict):
        raise click.UsageError("--json-schema must be a JSON object")
    return {"json_schema": schema}
