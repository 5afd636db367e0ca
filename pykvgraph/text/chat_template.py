"""Chat templates: Jinja in a sandbox, with what Hugging Face's templates expect to find there."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pykvgraph.errors import InvalidArgumentError


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what a model learns from; here it is what stands in it."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own way

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A chat template, as GGUF files have it in `tokenizer.chat_template`.

    It runs in Jinja's sandbox: it can neither reach Python's internals nor change what it is given. Raises
    InvalidArgumentError for a template that can't be read.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidArgumentError(f"the chat template can't be read: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt of a conversation.

        add_generation_prompt: with the beginning of the assistant's answer. variables: what else the template
        may ask for, such as tools. Raises InvalidArgumentError with the template's own words when it refuses
        the messages, and when it fails.
        """
        given = {"bos_token": self.bos_token, "eos_token": self.eos_token, **variables}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **given
            )
        except _RefusalError as refusal:
            raise InvalidArgumentError(f"the chat template refuses the messages: {refusal}") from refusal
        except Exception as error:  # a template is a program of others
            raise InvalidArgumentError(f"the chat template failed: {error!r}") from error


class _RefusalError(Exception):
    """What a template raised by raise_exception."""


def _raise(message: str) -> NoReturn:
    raise _RefusalError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Not Jinja's own, which escapes what HTML would."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
