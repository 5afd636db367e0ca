"""Chat templates: Jinja in a sandbox, with what Hugging Face's templates expect to find there."""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pykvgraph.errors import InvalidArgumentError

TEMPLATE_KEY = "tokenizer.chat_template"  # where GGUF files have it
_MOST = 10_000  # what a template may multiply with; a power has as many digits


class ChatTemplate:
    """A chat template, as GGUF files have it in `tokenizer.chat_template`.

    It runs in Jinja's sandbox: it can't reach Python's internals, and works on a copy of what it is given.
    Where templates rely on llama.cpp's engine, it does as that one does: what is missing adds no text, and
    lists of the template's own can grow. Raises InvalidArgumentError for a template that can't be read.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=_Missing,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.filters["safe"] = str  # nothing is escaped here
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidArgumentError(f"the chat template can't be read: {error}") from error

    def render(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation.

        add_generation_prompt: with the beginning of the assistant's answer. variables: what else the template
        may ask for, such as tools. Raises InvalidArgumentError with the template's own words when it refuses
        the messages, and when it fails.
        """
        given = {"bos_token": self.bos_token, "eos_token": self.eos_token, **variables}
        given |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(copy.deepcopy(given))
        except _RefusalError as refusal:
            raise InvalidArgumentError(f"the chat template refuses the messages: {refusal}") from refusal
        except Exception as error:  # a template is a program of others
            raise InvalidArgumentError(f"the chat template failed: {error!r}") from error


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, where lists may grow, text takes up whatever is added to it, and nothing gets huge."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Asked for each of these operations."""
        sides = left, right
        has_text = any(isinstance(each, str) for each in sides)
        if operator == "+" and has_text and not any(isinstance(each, _Missing) for each in sides):
            return f"{left}{right}"
        sizes = [len(each) if hasattr(each, "__len__") else abs(each) for each in sides]
        if operator != "+" and max(sizes) > _MOST:
            raise OverflowError(f"{operator} with what is over {_MOST}")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Asked for each attribute that a template names."""
        if isinstance(obj, list) and attr == "append":
            return True
        return super().is_safe_attribute(obj, attr, value)


class _Missing(jinja2.ChainableUndefined):
    """A variable or a key that isn't there."""

    def __add__(self, other: Any) -> Any:
        return other

    __radd__ = __add__

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what a model learns from; here it is what stands in it."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own way

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_plain,
    )


def _plain(value: Any) -> Any:
    """What a filter such as `map` leaves behind, as a list."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"a {type(value).__name__} has no JSON")
